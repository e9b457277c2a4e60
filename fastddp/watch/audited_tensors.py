"""Which tensors are compared over ranks, and in which step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LARGEST_SLICE = 4 * 2**20  # bytes
_SMALLEST_SLICE = 64 * 2**10  # bytes; what is smaller is not divided
_ALIGNMENT = 16  # elements; so that a slice of any dtype begins with a whole word

LookUp = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """What is compared in one step: slices of tensors, about as many bytes as in any other step."""

    names: list[str]
    """The tensor of each slice."""
    slices: list[tuple[LookUp, int, int]]
    """Elements [begin, end) of what is found; looked up in each step, because tensors are replaced."""

    def found(self) -> list[tuple[Tensor | None, int, int]]:
        """The slices, for ``_C.Digests``; None where a tensor is gone or has become too small."""
        found: list[tuple[Tensor | None, int, int]] = []
        for look_up, begin, end in self.slices:
            tensor = look_up()
            is_there = isinstance(tensor, Tensor) and tensor.numel() >= end
            found.append((tensor if is_there else None, begin, end))  # type: ignore[arg-type]
        return found


@dataclass(frozen=True)
class Round:
    """Parts that have every tensor once between them."""

    parts: list[Part]
    count: int
    """What :meth:`AuditedTensors.count` was then."""
    description: int
    """A digest of 63 bits of names, dtypes, shapes and slices: equal on ranks that compare the same."""


class AuditedTensors:
    """Parameters, and what a user adds to them.

    Args:
        parameters: (name, parameter) pairs, frozen ones too.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._optimizers: list[Optimizer] = []
        self._buffers: dict[str, nn.Module] = {}  # by name, and whose they are

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """From the next round on the state of the parameters in ``optimizer`` is compared as well.

        Raises:
            TypeError: it is no ``torch.optim.Optimizer``.
            ValueError: ranks have different parts of its state (``ZeroRedundancyOptimizer``); or it has none of the
                parameters.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"audit() takes a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        # Not by isinstance: importing torch.distributed.optim takes half as long as importing torch.
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
            raise ValueError(
                "audit() compares optimizer state that all ranks have alike, and ZeroRedundancyOptimizer gives each "
                "rank a part of its own. Leave the call out: parameters are audited without it."
            )
        ours = {id(parameter) for _, parameter in self._parameters}
        if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("audit() got an optimizer that has none of the model's parameters.")
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)

    def add_buffers(self, module: nn.Module, names: Iterable[str]) -> None:
        """From the next round on these buffers of ``module`` are compared as well.

        Raises:
            ValueError: ``module`` has no such buffer.
        """
        names = list(names)
        known = dict(module.named_buffers(remove_duplicate=False))
        for name in names:
            if name not in known:
                raise ValueError(f"audit() got the name of a buffer that the module does not have: {name!r}.")
        self._buffers |= dict.fromkeys(names, module)

    def round(self, steps: int) -> Round:
        """All tensors that there are now, in ``steps`` parts."""
        all_found = [(name, look_up, look_up()) for name, look_up in self._all()]
        present = [(name, look_up, tensor) for name, look_up, tensor in all_found if _has_bits(tensor)]
        total = sum(tensor.nbytes for _, _, tensor in present)
        largest = min(_LARGEST_SLICE, max(_SMALLEST_SLICE, total // steps))
        parts = [Part([], []) for _ in range(steps)]
        description = hashlib.sha256()
        done = 0  # bytes
        for name, look_up, tensor in present:
            description.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            for begin, end in _slices(tensor, largest):
                middle = done + (begin + end) * tensor.itemsize // 2
                part = parts[min(steps - 1, middle * steps // max(1, total))]
                part.names.append(name)
                part.slices.append((look_up, begin, end))
                description.update(f"{begin} {end}\n".encode())
            done += tensor.nbytes
        digest = int.from_bytes(description.digest()[:8], "little") >> 1
        return Round(parts, self.count(), digest)

    def count(self) -> int:
        """How many tensors there are, about: a quick look at whether a round still has all of them."""
        states = sum(len(optimizer.state.get(p, ())) for optimizer in self._optimizers for _, p in self._parameters)
        return len(self._parameters) + states + len(self._buffers)

    def _all(self) -> Iterator[tuple[str, LookUp]]:
        for name, parameter in self._parameters:
            yield name, lambda parameter=parameter: parameter  # type: ignore[misc]
        for number, optimizer in enumerate(self._optimizers):
            of = "" if len(self._optimizers) == 1 else f" of optimizer {number}"
            for name, parameter in self._parameters:
                for key in sorted(optimizer.state.get(parameter, {}), key=str):
                    yield f"{name}: {key}{of}", _StateEntry(optimizer, parameter, key)
        for name, module in self._buffers.items():
            yield name, lambda module=module, name=name: module.get_buffer(name)  # type: ignore[misc]


@dataclass(frozen=True)
class _StateEntry:
    optimizer: Optimizer
    parameter: Tensor
    key: str

    def __call__(self) -> object:
        return self.optimizer.state.get(self.parameter, {}).get(self.key)


def _has_bits(tensor: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose memory holds its values, and nothing else does."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.numel() > 0
    )


def _slices(tensor: Tensor, largest: int) -> Iterator[tuple[int, int]]:
    """Elements [begin, end) of slices of about ``largest`` bytes at most; all, where a slice would be a copy of all."""
    count = -(-tensor.nbytes // largest) if tensor.is_contiguous() else 1
    step = -(-tensor.numel() // count)
    step = -(-step // _ALIGNMENT) * _ALIGNMENT
    for begin in range(0, tensor.numel(), step):
        yield begin, min(tensor.numel(), begin + step)
