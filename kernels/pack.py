"""pack and unpack: a bucket's gradients into its wire, and back, in one launch each.

Shape letters:

    N  gradients of the bucket
    L  elements of the wire
    C  chunks of the bucket, one program each

:mod:`.pack_reference` says the same in plain torch; :mod:`.pack_kernels` is what runs on the device.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from .address_table import AddressTable
from .pack_kernels import CHUNK_ELEMENTS, OPTIONS, measure_kernel, pack_kernel, unpack_kernel

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}


def moves(gradient: torch.dtype, wire: torch.dtype) -> bool:
    """Whether the kernels move gradients of one dtype to and from a wire of the other."""
    return {gradient, wire} <= TRITON_DTYPES.keys() and (gradient == torch.float64) == (wire == torch.float64)


def kernel_constants(gradient: torch.dtype, wire: torch.dtype, chunk_elements: int) -> dict[str, Any]:
    """The compile-time arguments of both kernels.

    Raises:
        ValueError: a pair of dtypes that the kernels do not move.
    """
    for name, dtype in (("gradients have", gradient), ("wire has", wire)):
        if dtype not in TRITON_DTYPES:
            raise ValueError(
                f"the {name} dtype {dtype}; supported are {', '.join(map(str, TRITON_DTYPES))} "
                "(complex gradients: pass torch.view_as_real of them)"
            )
    if not moves(gradient, wire):
        raise ValueError(f"gradients of {gradient} with a wire of {wire}: fp64 travels only as fp64")
    compute = torch.promote_types(gradient, torch.float32)
    return {"GRADIENT": TRITON_DTYPES[gradient], "COMPUTE": TRITON_DTYPES[compute], "CHUNK": chunk_elements}


def pack(gradients: Sequence[torch.Tensor | None], wire: torch.Tensor, table: AddressTable, scale: float = 1.0) -> None:
    """Write ``cast(fp32(gradient) * scale)`` into the wire; zeros for an undefined gradient. One launch.

    Args:
        gradients: N tensors of the parameters' shapes, one dtype (fp32, fp16, bf16, fp64), or None. Strides are free,
            expanded ones included; those of the parameter are fastest. A gradient may be its own place in the wire, and
            is then scaled there.
        wire: [L], contiguous; fp32, fp16 or bf16, or fp64 for fp64 gradients (then scaled in fp64).
        table: of the bucket, on the wire's device. Uploaded only if a gradient moved since the last call.
        scale: multiplied before the cast. With 1.0 and equal dtypes the bits are copied.

    Raises:
        ValueError: a wrong length, count, shape, dtype or device, named.

    Example: gradients [2, 4], None and [6, 8] of parameters with 2, 1 and 2 elements, scale 0.5, give the wire
    [1, 2, 0, 3, 4].
    """
    _launch(pack_kernel, gradients, wire, table, scale)


def unpack(
    wire: torch.Tensor, gradients: Sequence[torch.Tensor | None], table: AddressTable, scale: float = 1.0
) -> torch.Tensor:
    """Write ``cast(fp32(wire) * scale)`` into the gradients; an undefined gradient is skipped. One launch.

    Returns [C, 2], fp64: for each chunk the sum of the squares of what was written, and how many elements are not
    finite.

    Arguments and errors as :func:`pack`, and

    Raises:
        ValueError: a gradient that may overlap itself (expanded): elements of the wire would race for its memory.

    Example: the wire [1, 2, 0, 3, 4] and gradients of 2, None and 2 elements give [1, 2], None and [3, 4].
    """
    partials = torch.zeros(len(table.chunks), 2, dtype=torch.float64, device=wire.device)
    _launch(unpack_kernel, gradients, wire, table, scale, partials)
    return partials


def measure(wire: torch.Tensor) -> torch.Tensor:
    """Return what the wire's elements are, [programs, 2], fp64: sums of squares, and counts of what is not finite.

    Example: the wire [3, 4, nan] gives [[nan, 1]].
    """
    programs = -(-wire.numel() // CHUNK_ELEMENTS)
    partials = torch.empty(programs, 2, dtype=torch.float64, device=wire.device)
    if programs > 0:
        with _current(wire.device):
            measure_kernel[(programs,)](wire, wire.numel(), partials, CHUNK=CHUNK_ELEMENTS, **OPTIONS)
    return partials


def _current(device: torch.device) -> Any:
    # Triton launches on the current device.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _launch(
    kernel: Any,
    gradients: Sequence[torch.Tensor | None],
    wire: torch.Tensor,
    table: AddressTable,
    scale: float,
    *partials: torch.Tensor,
) -> None:
    table.layout.check_wire(wire)
    if wire.device != table.device:
        raise ValueError(f"the wire is on {wire.device}, but its table on {table.device}: build the table there")
    if wire.device.type == "cpu" and isinstance(kernel, triton.JITFunction):
        raise ValueError("the wire is on the CPU, where Triton does not run: use fastddp._C's kernels there")
    rows = table.refresh(gradients, wire)
    if kernel is unpack_kernel and table.overlapping is not None:
        gradient = gradients[table.overlapping]
        assert gradient is not None
        raise ValueError(
            f"gradient {table.overlapping} has shape {tuple(gradient.shape)} and strides {gradient.stride()}, so its "
            "elements may share memory and cannot be unpacked into: pass a gradient.contiguous()"
        )
    dtype = next((gradient.dtype for gradient in gradients if gradient is not None), wire.dtype)
    constants = kernel_constants(dtype, wire.dtype, table.layout.chunk_elements)
    if len(table.chunks) == 0:
        return
    with _current(wire.device):
        kernel[(len(table.chunks),)](wire, rows, table.chunks, scale, *partials, **constants, **OPTIONS)
