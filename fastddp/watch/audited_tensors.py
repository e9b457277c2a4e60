"""Which tensors ranks compare, and in which step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastddp.errors import see

_LARGEST_SLICE = 4 * 2**20  # bytes
_SMALLEST_SLICE = 64 * 2**10  # bytes; smaller tensors stay whole
_ALIGNMENT = 16  # elements; a slice of any dtype then begins at a whole word

LookUp = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """The slices of tensors to compare in one step, about as many bytes as in any other."""

    names: list[str]  # the name of each slice's tensor
    slices: list[tuple[LookUp, int, int]]
    """Elements [begin, end) of a tensor, which is looked up in each step: it may be replaced."""

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
    """Parts that together have every tensor once."""

    parts: list[Part]
    count: int  # :meth:`AuditedTensors.count` at that time
    description: int  # a 63-bit digest of names, dtypes, shapes and slices: equal on ranks that compare the same


class AuditedTensors:
    """Parameters (frozen ones too), and the optimizer state and buffers that a user adds."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._optimizers: list[Optimizer] = []
        self._buffers: dict[str, nn.Module] = {}  # by name: the module

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Compare the state of the parameters in ``optimizer`` as well, from the next round on.

        TypeError: it is no ``torch.optim.Optimizer``; ValueError: each rank has its own part of the state
        (``ZeroRedundancyOptimizer``); or the optimizer has none of the parameters.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"audit() takes a torch.optim.Optimizer, not {type(optimizer).__name__}." + see("FD024"))
        # Not by isinstance: importing torch.distributed.optim takes half as long as importing torch.
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
            raise ValueError(
                "audit() compares optimizer state that all ranks have alike, and ZeroRedundancyOptimizer gives each "
                "rank a part of its own. Leave the call out: parameters are audited without it." + see("FD023")
            )
        ours = {id(parameter) for _, parameter in self._parameters}
        if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("audit() got an optimizer that has none of the model's parameters." + see("FD024"))
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)

    def add_buffers(self, module: nn.Module, names: Iterable[str]) -> None:
        """Compare these buffers of ``module`` too, from the next round on; ValueError: it has no such buffer."""
        names = list(names)
        known = dict(module.named_buffers(remove_duplicate=False))
        for name in names:
            if name not in known:
                raise ValueError(
                    f"audit() got the name of a buffer that the module does not have: {name!r}." + see("FD024")
                )
        self._buffers |= dict.fromkeys(names, module)

    def round(self, steps: int) -> Round:
        """Divide all present tensors into ``steps`` parts."""
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
        """About how many tensors there are: a quick check whether a round still has all."""
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
    """Whether it is a plain tensor: its own strided memory holds all its values."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.numel() > 0
    )


def _slices(tensor: Tensor, largest: int) -> Iterator[tuple[int, int]]:
    """Slices [begin, end) of about ``largest`` bytes at most; one, if the tensor is not contiguous (slicing copies)."""
    count = -(-tensor.nbytes // largest) if tensor.is_contiguous() else 1
    step = -(-tensor.numel() // count)
    step = -(-step // _ALIGNMENT) * _ALIGNMENT
    for begin in range(0, tensor.numel(), step):
        yield begin, min(tensor.numel(), begin + step)
