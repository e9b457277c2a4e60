"""Pack and unpack in plain torch: one copy for each gradient.

Shape letters:

    N  gradients of one call, each with a view: the gradient's elements in the wire, in the gradient's shape
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(gradients: Sequence[Tensor | None], views: Sequence[Tensor], scale: float = 1.0) -> None:
    """Write ``cast(fp32(gradient) * scale)`` into its view; zeros for an undefined gradient.

    Args:
        gradients: N tensors with any strides, fp32, fp16, bf16 or fp64, or None.
        views: N tensors of these shapes; fp32, fp16 or bf16, or fp64 for fp64 gradients (then scaled in fp64).
        scale: the factor before the cast. With 1.0 and equal dtypes the bits are copied.

    >>> wire = torch.empty(5)
    >>> pack([torch.tensor([2.0, 4.0]), None, torch.tensor([6.0, 8.0])], wire.split([2, 1, 2]), scale=0.5)
    >>> wire
    tensor([1., 2., 0., 3., 4.])
    """
    for gradient, view in zip(gradients, views, strict=True):
        if gradient is None:
            view.zero_()
        else:
            view.copy_(_scaled(gradient, view.dtype, scale))


def unpack(gradients: Sequence[Tensor | None], views: Sequence[Tensor], scale: float = 1.0) -> None:
    """Write ``cast(fp32(view) * scale)`` into its gradient; an undefined gradient is skipped. Arguments as of `pack`.

    >>> gradients = [torch.zeros(2), None, torch.zeros(2)]
    >>> unpack(gradients, torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0]).split([2, 1, 2]))
    >>> gradients
    [tensor([1., 2.]), None, tensor([3., 4.])]
    """
    for gradient, view in zip(gradients, views, strict=True):
        if gradient is not None:
            gradient.copy_(_scaled(view, gradient.dtype, scale))


def _scaled(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    compute = torch.promote_types(values.dtype, torch.float32)
    factor = torch.tensor(scale, dtype=compute, device=values.device)
    if values.dtype == dtype and factor == 1.0:
        return values
    return (values.to(compute) * factor).to(dtype)
