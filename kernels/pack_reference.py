"""What pack and unpack mean, in plain torch: one copy for each gradient.

Shape letters:

    N  gradients of the bucket
    L  elements of the wire
"""

from collections.abc import Sequence

import torch

from .layout import BucketLayout


def pack(
    gradients: Sequence[torch.Tensor | None], wire: torch.Tensor, layout: BucketLayout, scale: float = 1.0
) -> None:
    """Write ``cast(fp32(gradient) * scale)`` into the wire; zeros for an undefined gradient.

    Args:
        gradients: N tensors of the parameters' shapes with any strides, fp32, fp16, bf16 or fp64, or None.
        wire: [L], contiguous; fp32, fp16 or bf16, or fp64 for fp64 gradients (then scaled in fp64).
        layout: of the bucket.
        scale: multiplied before the cast. With 1.0 and equal dtypes the bits are copied.

    Raises:
        ValueError: a wrong length, count, shape, dtype or device, named.

    >>> wire = torch.empty(5)
    >>> layout = BucketLayout.of([torch.empty(2), torch.empty(1), torch.empty(2)])
    >>> pack([torch.tensor([2.0, 4.0]), None, torch.tensor([6.0, 8.0])], wire, layout, scale=0.5)
    >>> wire
    tensor([1., 2., 0., 3., 4.])
    """
    layout.check_wire(wire)
    layout.check_gradients(gradients, wire)
    for gradient, view in zip(gradients, layout.views(wire), strict=True):
        if gradient is None:
            view.zero_()
        else:
            view.copy_(_scaled(gradient, wire.dtype, scale))


def unpack(
    wire: torch.Tensor, gradients: Sequence[torch.Tensor | None], layout: BucketLayout, scale: float = 1.0
) -> None:
    """Write ``cast(fp32(wire) * scale)`` into the gradients; an undefined gradient is skipped.

    Arguments and errors as :func:`pack`.

    >>> gradients = [torch.zeros(2), None, torch.zeros(2)]
    >>> layout = BucketLayout.of([torch.empty(2), torch.empty(1), torch.empty(2)])
    >>> unpack(torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0]), gradients, layout)
    >>> gradients
    [tensor([1., 2.]), None, tensor([3., 4.])]
    """
    layout.check_wire(wire)
    layout.check_gradients(gradients, wire)
    for gradient, view in zip(gradients, layout.views(wire), strict=True):
        if gradient is not None:
            gradient.copy_(_scaled(view, gradient.dtype, scale))


def _scaled(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    compute = torch.promote_types(values.dtype, torch.float32)
    factor = torch.tensor(scale, dtype=compute, device=values.device)
    if values.dtype == dtype and factor == 1.0:
        return values
    return (values.to(compute) * factor).to(dtype)
