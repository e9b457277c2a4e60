"""``main_grads=``: fp32 gradients of 16-bit parameters, and the attribute that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Adamax, AdamW, NAdam, Optimizer, RAdam
from torch.utils.weak import WeakIdKeyDictionary

from fastddp.config import Config
from fastddp.errors import see
from fastddp.module.parameters import NamedParameters

_16_BITS = (torch.float16, torch.bfloat16)

# For each parameter whose ``grad_dtype`` was set here: the dtype before, and the dtype set. This outlives wrappers,
# because an fp32 gradient may stay in ``.grad`` when its wrapper is gone.
_grad_dtypes: MutableMapping[Tensor, tuple[torch.dtype | None, torch.dtype]] = WeakIdKeyDictionary()


def without_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, of this one's shape, strides and device, and of ``dtype``."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    like.untyped_storage().resize_(0)
    return like


@dataclass(frozen=True)
class MainGradients:
    """The dtype and the place of gradients (Note [Main gradients], ``csrc/bucket/gradient_memory.h``)."""

    dtype: torch.dtype | None  # of the gradients of 16-bit parameters; None, and of others: the parameter's
    are_apart: bool  # whether they are in ``parameter.main_grad``

    @classmethod
    def of_config(cls, config: Config) -> MainGradients:
        """As the options say."""
        return cls(None if config.main_grads is None else torch.float32, config.main_grads == "main_grad")

    def gradient_of(self, parameter: Any) -> Tensor | None:
        """The gradient of ``parameter``."""
        return parameter.main_grad if self.are_apart else parameter.grad

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The dtype of its gradient."""
        return self.dtype if self.dtype is not None and parameter.dtype in _16_BITS else parameter.dtype

    def like(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors with the gradients' shapes, strides, dtypes and devices. They may have no memory."""
        return [
            tensor if (dtype := self.dtype_of(tensor)) == tensor.dtype else without_memory(tensor, dtype)
            for tensor in parameters
        ]

    def check(self, parameters: NamedParameters) -> None:
        """Raise RuntimeError if a gradient that is there has another dtype, ValueError if main gradients are sparse."""
        if self.dtype is None:
            return _check_none_of_another_dtype(parameters)
        for index in parameters.sparse:
            if self.are_apart or self.dtype_of(parameters.tensors[index]) != parameters.tensors[index].dtype:
                raise ValueError(
                    f"The gradients of parameter {parameters.names[index]} are sparse, and main_grads is for dense "
                    "ones. Build its module with sparse=False, or leave out main_grads." + see("FD030")
                )
        if self.are_apart:
            return None
        for name, parameter in parameters:
            if parameter.grad is not None and parameter.grad.dtype != self.dtype_of(parameter):
                raise RuntimeError(
                    f"Parameter {name} has a gradient in {parameter.grad.dtype}, which main_grads, for {self.dtype}, "
                    "cannot change. Call module.zero_grad() before wrapping it." + see("FD030")
                )
        return None

    def let_grad_differ(self, parameters: Iterable[Tensor]) -> None:
        """If gradients are in ``.grad``, let autograd cast and add them up in their own dtype (from torch 2.13 on).

        If an earlier wrapper has set a ``grad_dtype`` that this one does not need, the dtype before it is restored.
        """
        for parameter in parameters:
            if self.dtype is not None and not self.are_apart and parameter.dtype in _16_BITS:
                _grad_dtypes.setdefault(parameter, (parameter.grad_dtype, self.dtype))  # type: ignore[attr-defined]
                parameter.grad_dtype = self.dtype  # type: ignore[attr-defined]
            else:
                _give_back(parameter)

    def set_zero(self, parameters: Iterable[Tensor]) -> None:
        """Zero the gradients in place, if they are in ``main_grad``. No layer has added to them then."""
        if self.are_apart:
            torch._foreach_zero_([parameter.main_grad for parameter in parameters])  # type: ignore[attr-defined]
            for parameter in parameters:
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def hear_layers(self, parameters: NamedParameters) -> Callable[[int], bool]:
        """What the reducer asks after a parameter's hook: has a layer added to ``main_grad``, as Megatron's do?

        They have handed autograd a tensor without meaning, which is dropped. If ``zero_out_wgrad`` is set it is zeros,
        to which another use of the parameter may have added. Raises RuntimeError if nobody averages ``main_grad``.
        """

        def has_added(index: int) -> bool:
            parameter: Any = parameters.tensors[index]
            added = bool(getattr(parameter, "grad_added_to_main_grad", False))
            is_alone = parameter.grad is None and getattr(parameter, "main_grad", None) is not None
            if not self.are_apart and (added or is_alone):
                name = parameters.names[index]
                raise RuntimeError(f"fastddp: a layer has added the gradient of parameter {name} {_LOST}")
            if added and not getattr(parameter, "zero_out_wgrad", False):
                parameter.grad = None
            return added

        return has_added


_LOST = (
    "to its main_grad, as those of Megatron and Transformer Engine do, and it would stay on this rank. Wrap the module "
    'with main_grads="main_grad", or build the layer without fused accumulation.' + see("FD049")
)


def check_optimizer(optimizer: Optimizer, parameters: NamedParameters) -> None:
    """Raise RuntimeError if ``optimizer`` cannot step in torch as a gradient has another dtype than its parameter."""
    interpolates = isinstance(optimizer, (Adam, AdamW, Adamax, NAdam, RAdam))
    groups = [group for group in optimizer.param_groups if interpolates or group.get("fused")]
    names = {parameter: name for name, parameter in parameters} if groups else {}
    for group in groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or gradient.dtype == parameter.dtype or parameter not in names:
                continue
            average = optimizer.state.get(parameter, {}).get("exp_avg", parameter)  # made in the parameter's dtype
            if group.get("fused") or average.dtype != gradient.dtype:
                kind = type(optimizer).__name__ + (" with fused=True" if group.get("fused") else "")
                raise RuntimeError(
                    f"fastddp: {kind} cannot step with parameter {names[parameter]}, which is {parameter.dtype} and "
                    f"has a gradient in {gradient.dtype} (main_grads). {_WHO_CAN}" + see("FD030")
                )


_WHO_CAN = (
    "No fused optimizer of torch's takes that. Adam, AdamW, Adamax, NAdam and RAdam do if their state has the "
    "gradient's dtype; SGD, Adagrad, Adadelta, Adafactor, ASGD, RMSprop and Rprop always do. Give this optimizer fp32 "
    "copies of the parameters (docs/concepts.md, Main gradients), use one of those, or leave out main_grads."
)


def _give_back(parameter: Tensor) -> None:
    before, ours = _grad_dtypes.pop(parameter, (None, None))
    if ours is not None and parameter.grad_dtype == ours:  # type: ignore[attr-defined]  # or somebody else has set it
        parameter.grad_dtype = before  # type: ignore[attr-defined]


def _check_none_of_another_dtype(parameters: NamedParameters) -> None:
    for name, parameter in parameters:
        if parameter in _grad_dtypes and parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            raise RuntimeError(
                f"Parameter {name} has a gradient in {parameter.grad.dtype}, from a wrapper with main_grads, and "
                "this one has gradients in the parameters' dtypes. Call module.zero_grad() before wrapping it without "
                "that option." + see("FD030")
            )
