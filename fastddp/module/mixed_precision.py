"""``mixed_precision``: the module computes in low precision; parameters, gradients and optimizer stay as they are.

Torch's DDP swaps each parameter's memory for that of a low-precision copy, from forward until the gradients have been
reduced. Here the parameters are left alone. Copies stand in their places (:mod:`fastddp.module.stand_ins`), and the
parameters get gradients in their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from fastddp.errors import see
from fastddp.module.nested import map_tensors
from fastddp.module.parameters import ignored_parameters
from fastddp.module.stand_ins import check_replaceable

_WIRES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LowPrecision:
    """Torch's ``_MixedPrecision`` applied to one module.

    Its ``param_dtype`` is for parameters and floating-point inputs while the module runs, ``reduce_dtype`` for
    gradients while they travel (None: ``param_dtype``), ``buffer_dtype`` for floating-point buffers, for good. Where
    one is None, nothing is cast. Parameters and buffers whose names are ``ignored`` keep their dtype.

    Raises:
        TypeError: ``config`` is no ``_MixedPrecision``.
        ValueError: a dtype is not of floating-point numbers, gradients cannot travel in it, or ``module`` is compiled.
    """

    def __init__(self, config: _MixedPrecision, module: nn.Module, ignored: set[str]) -> None:
        _check(config)
        if config.param_dtype is not None:
            check_replaceable(module, "mixed_precision")
        self._dtype = config.param_dtype
        self._ignored = ignored_parameters(module, ignored)
        self.wire: torch.dtype | None = config.reduce_dtype or config.param_dtype
        """The dtype in which gradients travel; None: their own."""
        self._buffer_dtype = config.buffer_dtype

    def cast_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Cast floating-point ``buffers`` to ``buffer_dtype``, for good."""
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.data = buffer.to(self._buffer_dtype)  # keeps the tensor, which others may refer to

    def copy_of(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """A step of stand-ins: a low-precision copy of ``tensor``, which stands for ``parameter``."""
        return tensor if parameter in self._ignored else self._cast(tensor)

    def cast(self, inputs: Any) -> Any:
        """``inputs`` with their floating-point tensors, as :mod:`~fastddp.module.nested` finds them, cast."""
        return map_tensors(self._cast, inputs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _check(config: _MixedPrecision) -> None:
    if not isinstance(config, _MixedPrecision):
        raise TypeError(
            "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision or None, got "
            f"{type(config).__module__}.{type(config).__qualname__}." + see("FD032")
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(config, name)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"mixed_precision: {name} must be a floating-point dtype or None, got {dtype}." + see("FD032")
            )
    wire = config.reduce_dtype or config.param_dtype
    if wire is not None and wire not in _WIRES:
        raise ValueError(
            f"mixed_precision: gradients cannot be added up in {wire}. Set reduce_dtype to one of "
            f"{', '.join(map(str, _WIRES))}." + see("FD032")
        )
