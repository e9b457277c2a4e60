"""What is in ``parameter.grad`` where each rank has a part of the gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastddp.errors import see

_ZEROING = (Tensor.zero_, torch._foreach_zero_)
# What nn.Module moves gradients by: to another device, and there in place of what was here.
_MOVING = (Tensor.cpu, Tensor.cuda, Tensor.to)
_REPLACING = (Tensor.data.__set__, torch._has_compatible_shallow_copy_type)  # type: ignore[attr-defined]
_FACTS = ("device", "dtype", "grad_fn", "is_cuda", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
HARMLESS = {
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.numel,
    Tensor.requires_grad_,
    Tensor.size,
    *(getattr(Tensor, name).__get__ for name in _FACTS),
}


class ShardedGradient(Tensor):
    """Says that the gradient is sharded. It has the gradient's shape, dtype and device, and no memory.

    ``zero_grad`` works on it. Any use of values raises RuntimeError, because no rank has the whole gradient: most of
    all :func:`torch.nn.utils.clip_grad_norm_`, which would clip nothing.
    """

    _name: str
    _zero: Callable[[], None]

    @staticmethod
    def of(parameter: Tensor, dtype: torch.dtype, name: str, zero: Callable[[], None]) -> ShardedGradient:
        """Return the notice of a parameter.

        Args:
            parameter: whose gradient is sharded.
            dtype: the gradient's.
            name: the parameter's, for errors.
            zero: sets this rank's part of the gradient to zero.
        """
        empty = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)
        notice: ShardedGradient = Tensor._make_subclass(ShardedGradient, empty)  # type: ignore[attr-defined]
        notice._name, notice._zero = name, zero
        return notice

    def _moved(self, move: Callable[..., Tensor], *args: Any, **kwargs: Any) -> ShardedGradient:
        here = torch.empty((), dtype=self.dtype, device=self.device)
        there = move(here, *args, **kwargs)
        return (
            self if there is here else ShardedGradient.of(there.expand(self.shape), there.dtype, self._name, self._zero)
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient of {self._name}"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let through what reads no values; raise RuntimeError for everything else."""
        if func in HARMLESS or (func in _REPLACING and all(isinstance(arg, ShardedGradient) for arg in args)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _ZEROING:
            return _zero(args[0])
        if func in _MOVING:
            return args[0]._moved(func, *args[1:], **(kwargs or {}))
        first = _first((*args, *(kwargs or {}).values()))
        assert first is not None
        raise RuntimeError(
            f"The gradient of parameter {first._name} is sharded: each rank has a part of it, in the optimizer, and "
            f"parameter.grad has no values for {_named(func)}. Use fastddp.clip_grad_norm_(model, ...), "
            "model.last_grad_norm() or model.found_inf(), or change gradients before backward averages them, by "
            "parameter.register_hook." + see("FD041")
        )


def _zero(gradients: Any) -> Any:
    for gradient in [gradients] if isinstance(gradients, Tensor) else gradients:
        if isinstance(gradient, ShardedGradient):
            gradient._zero()
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(gradient)  # the reducer sees by it what has been removed
        else:
            gradient.zero_()
    return gradients


def _first(args: Iterable[Any]) -> ShardedGradient | None:
    """The first notice among arguments, which may be lists."""
    for arg in args:
        found = _first(arg) if isinstance(arg, (list, tuple)) else arg
        if isinstance(found, ShardedGradient):
            return found
    return None


def _named(func: Any) -> str:
    """Of a function of torch's, or of the attribute whose getter it is."""
    name: str = func.__name__
    return _named(func.__self__) if name == "__get__" else name


def zeroing(holder: Tensor | None) -> Callable[[], None]:
    """Zeroes the gradient of this rank's part, which is ``holder``; None: it has none."""
    this = (lambda: None) if holder is None else weakref.ref(holder)

    def zero() -> None:
        held = this()
        if held is not None and held.grad is not None:
            held.grad.zero_()

    return zero
