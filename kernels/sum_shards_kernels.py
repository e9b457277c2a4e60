"""The Triton kernel that adds up all ranks' shards of one part of a 16-bit wire.

    sum: target[j] = cast(((0 + fp32(shards[0, j])) + fp32(shards[1, j])) + ...)

Launch signature::

    sum_shards  (shards: T*, ranks: int64, elements: int64, target: T*)

    grid  = (programs of ELEMENTS elements, 1, 1)
    block = (32 * num_warps, 1, 1)

``shards`` is a matrix: row r has the ``elements`` numbers that rank r sent. The sum has the order of the rows.
``target`` may be one of the rows. csrc/transport/sum_shards.cpp launches the kernel; :mod:`.sum_shards_reference`
computes the same in plain torch. A launch appends Triton's two scratch pointers, both null here.

No address is assumed to be aligned. Where rows and target begin at multiples of 16 bytes, everything moves 16 bytes at
a time. For n ranks the kernel moves 2 n + 2 bytes per element: it reads each shard once, and writes the sum.
"""

# Triton adds tuples when it compiles.
# mypy: disable-error-code="assignment"

from typing import Any

import torch
import triton
import triton.language as tl

from .pack_kernels import TRITON_DTYPES

ELEMENTS = 4096
"""The elements of one program: for each rank, two accesses of 16 bytes in each of 256 threads."""

DTYPES = (torch.float16, torch.bfloat16)

_ELEMENTS = tl.constexpr(ELEMENTS)
_ACCESS_BYTES = tl.constexpr(16)
_BYTES = tl.constexpr(2)  # of an element
# The size of tiles in which a program takes unaligned memory. They have a layout of their own.
_SCALAR_STEP = tl.constexpr(1024)
# How many ranks' numbers a program reads at a time.
_IN_FLIGHT = tl.constexpr(4)


def dtype_constants(dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments.

    Raises:
        ValueError: a dtype that the kernel does not add up.
    """
    if dtype not in DTYPES:
        raise ValueError(f"the shards have dtype {dtype}; supported are {', '.join(map(str, DTYPES))}")
    return {"DTYPE": TRITON_DTYPES[dtype]}


def _name(specialization) -> str:
    """The name in profilers and in the binary, such as ``fastddp_sum_shards_bf16``."""
    return f"fastddp_sum_shards_{specialization.constants['DTYPE']}"


@triton.jit
def _pointers(address, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    first = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        first = tl.multiple_of(first, _ACCESS_BYTES)
    return first + index


@triton.jit
def _add_up(shards, ranks, row_bytes, target, index, live, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Add up one tile; shards and target are the addresses of its first element."""
    sums = tl.zeros(index.shape, tl.float32)
    for step in range(0, ranks, _IN_FLIGHT):
        tiles = ()
        for part in tl.static_range(_IN_FLIGHT):
            row = shards + (step + part) * row_bytes
            read = live & (step + part < ranks)
            # The shards are not needed again.
            pointers = _pointers(row, index, DTYPE, ALIGNED)
            tiles = tiles + (tl.load(pointers, mask=read, other=0.0, eviction_policy="evict_first"),)
        for part in tl.static_range(_IN_FLIGHT):
            # A missing shard adds 0, which changes nothing, since a sum that began with 0 is never -0.
            sums += tiles[part].to(tl.float32)
    tl.store(_pointers(target, index, DTYPE, ALIGNED), sums.to(DTYPE), mask=live)


@triton.jit(repr=_name, do_not_specialize=["shards", "ranks", "elements", "target"])
def sum_shards_kernel(shards, ranks: tl.int64, elements: tl.int64, target, DTYPE: tl.constexpr):
    """Add up the rows of a matrix.

    Example: the rows [1, 2], [10, 20] and [100, 200] have the sum [111, 222].
    """
    VECTOR: tl.constexpr = _ACCESS_BYTES // _BYTES
    begin = tl.program_id(0).to(tl.int64) * _ELEMENTS
    count = tl.minimum(elements - begin, _ELEMENTS).to(tl.int32)
    row_bytes = elements * _BYTES
    source = shards.to(tl.int64) + begin * _BYTES
    sums = target.to(tl.int64) + begin * _BYTES
    if (source | sums | row_bytes) % _ACCESS_BYTES == 0:
        index = tl.arange(0, _ELEMENTS)
        # The count is a multiple of VECTOR already. Rounding it tells the compiler to mask vectors as a whole.
        _add_up(source, ranks, row_bytes, sums, index, index < count // VECTOR * VECTOR, DTYPE, True)
    else:
        for step in range(0, _ELEMENTS, _SCALAR_STEP):
            index = step + tl.arange(0, _SCALAR_STEP)
            _add_up(source, ranks, row_bytes, sums, index, index < count, DTYPE, False)
