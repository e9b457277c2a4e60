"""Triton kernels of block8: gradients as numbers of 8 bits with a scale for each block, all of a bucket in one launch.

    encode: y = gradient * scale + before.  wire = y's bytes and scales.  error = y - value
    add:    y = the values of n shards, added to 0 in order.  target = y's bytes and scales.  error += y - value
    decode: gradient = value, rounded to its dtype

with, for y, a block of B = 128 or 256 numbers, m its largest magnitude and L the format's largest number, in fp32 and
each operation rounded once::

    scale = m / L,  x = y * (L / m),  number = x rounded to the format,  value = number * scale

If m < 2^-100, the block's scale and bytes are 0. If a number of the block is not finite, or m > 2^127, the scale is NaN
and the bytes are 0. The error is then 0 after encode, and unchanged after add. csrc/block8/kernels.h is the
contract, and :mod:`.block8_reference` computes the same in plain torch, bit for bit.

Launch signatures::

    encode  (wire: u8*, before: fp32*, error: fp32*, gradients: int64*, runs: int64*, scale: double, key: int64)
    add     (shards: int64*, count: int64, target: u8*, error: fp32*, blocks: int64, first_element: int64, key: int64)
    decode  (wire: u8*, gradients: int64*, runs: int64*, partials: double*)

    grid  = (rows of runs, 1, 1); add: (programs of ELEMENTS elements, 1, 1)
    block = (32 * num_warps, 1, 1)

A launch appends Triton's two scratch pointers, both null here. ``before``, the errors so far, and ``error`` may be the
same, and are null without error feedback. Stochastic rounding draws from ``key``; kernels that round to nearest do not
read it.

A wire is a row of groups of 4 (B + 4) bytes: four scales, then four blocks of B bytes. So block b has its scale at byte
b // 4 * 4 (B + 4) + b % 4 * 4, and its bytes at b // 4 * 4 (B + 4) + 16 + b % 4 * B. Its errors begin at element b * B.

``gradients`` has the address of each gradient. ``runs`` is static. Row r says what program r works on: consecutive
blocks of one gradient. A group may have blocks of several gradients, which several programs then write:

    word 0  gradient  which gradient of the call
    word 1  begin     first element, counted within the gradient, a multiple of ELEMENTS
    word 2  block     first block, counted within the wire
    word 3  count     how many elements, 1 .. ELEMENTS; the last block is filled up with zeros

For gradients of 5000 and 3 elements at the blocks 0 and 40 of a wire, B = 128 and ELEMENTS = 4096, it is::

    [0, 0, 0, 4096,  0, 4096, 32, 904,  1, 0, 40, 3]

Block 40 is the first of group 10: its scale is at byte 5280, its bytes are at 5296, its errors at element 5120.

``shards`` has the addresses of ``count`` parts of wires. Each begins with a group and has ``blocks`` blocks. So does
``target``, which may be one of them. ``first_element`` is where they begin in the wire; draws depend on it.

``partials`` are [programs, 2], as unpack's: program p writes the sum of the squares of the elements that it wrote, as
they are in the gradients, and how many of them are not finite.

Wires and shards begin at multiples of 16 bytes, and so do all their blocks. Gradients and errors may not. Where they
do, and a run ends with a whole access, everything moves 16 bytes at a time. Otherwise a program takes its blocks in
smaller tiles, and gradient and error element by element.

Bytes moved per element of fp32 gradients, with B = 128, scales included: 13.03 by encode (gradient and error read;
error and byte written), 9.03 + 1.03 n by add (n bytes and the error read; error and byte written), 5.03 by
decode. Nothing is read or written twice.
"""

# Triton adds tuples when it compiles.
# mypy: disable-error-code="assignment"

from typing import Any

import torch
import triton
import triton.language as tl

from .block8_numbers import encoded, values
from .pack_kernels import TRITON_DTYPES

ELEMENTS = 4096
"""The elements of one program: 16 in each of 256 threads, so that a thread's bytes are one access of 16."""

RUN_WORDS = 4
NUMBERS = ("int8", "e4m3", "e5m2")
BLOCKS = (128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of gradients."""

_ELEMENTS = tl.constexpr(ELEMENTS)
_RUN_WORDS = tl.constexpr(RUN_WORDS)
_ACCESS_BYTES = tl.constexpr(16)
_SCALES_BYTES = tl.constexpr(16)  # of a group
# The number of tiles in which a program takes unaligned memory, one after another, each with its own layout.
_STEPS = tl.constexpr(4)
# How many shards' bytes a program of add reads at a time.
_IN_FLIGHT = tl.constexpr(4)


def format_constants(number: str, block: int) -> dict[str, Any]:
    """The compile-time arguments of all these kernels.

    Raises:
        ValueError: a format that the kernels do not have.
    """
    if number not in NUMBERS or block not in BLOCKS:
        raise ValueError(
            f"the format is {number} in blocks of {block}; supported are {', '.join(NUMBERS)} in blocks of "
            f"{' or '.join(map(str, BLOCKS))}"
        )
    return {"NUMBER": number, "BLOCK": block}


def gradient_constants(number: str, block: int, gradient: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of kernels that also have gradients, of this dtype.

    Raises:
        ValueError: a format or a dtype that the kernels do not have.
    """
    if gradient not in DTYPES:
        raise ValueError(f"the gradients have dtype {gradient}; supported are {', '.join(map(str, DTYPES))}")
    return {"DTYPE": TRITON_DTYPES[gradient]} | format_constants(number, block)


def _name(form: str):
    """The name in profilers and in the binary, such as ``fastddp_block8_encode_fp32_e4m3_128_drawn``."""

    def name(specialization) -> str:
        constants = specialization.constants
        dtype = [str(constants["DTYPE"])] if "DTYPE" in constants else []
        drawn = ["drawn"] if constants.get("STOCHASTIC") else []
        return "_".join(["fastddp_block8", form, *dtype, constants["NUMBER"], str(constants["BLOCK"]), *drawn])

    return name


# ------------------------------------------------------------------------------------------------- where things are


@triton.jit
def _group_of(wire, block, BLOCK: tl.constexpr):
    """Address of the group with this block, in a wire at this address; a multiple of 16."""
    return wire + (block >> 2) * (4 * (BLOCK + 4))


@triton.jit
def _offset(block, BLOCK: tl.constexpr):
    """Offset in bytes of a block's group, for blocks counted from the first one of a group."""
    return (block >> 2) * (4 * (BLOCK + 4))


@triton.jit
def _scales_at(group, block, BLOCK: tl.constexpr):
    """Pointers to the scales of blocks, counted from the first one of the group at this address."""
    return group.to(tl.pointer_type(tl.float32)) + (_offset(block, BLOCK) // 4 + (block & 3))


@triton.jit
def _bytes_at(group, block, BLOCK: tl.constexpr, ACCESS: tl.constexpr = _ACCESS_BYTES):
    """Pointers to the bytes of blocks, [rows, BLOCK]; counted as in :func:`_scales_at`. ACCESS: bytes of a thread's."""
    first = tl.multiple_of(group.to(tl.pointer_type(tl.uint8)), ACCESS)
    offset = _offset(block, BLOCK) + _SCALES_BYTES + (block & 3) * BLOCK
    return first + (offset[:, None] + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _rows_at(address, row, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to BLOCK neighbours for each row; ALIGNED: the address is a multiple of 16."""
    first = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        first = tl.multiple_of(first, _ACCESS_BYTES)
    return first + (row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _within(row, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Which elements of rows are among the first ``count``; ALIGNED: these fill whole accesses."""
    VECTOR: tl.constexpr = _ACCESS_BYTES // (DTYPE.primitive_bitwidth // 8) if ALIGNED else 1
    return row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] < count // VECTOR * VECTOR


@triton.jit
def _run_of_this_program(gradients, runs, DTYPE: tl.constexpr):
    """Return the address of the run's first element, its first block and its number of elements."""
    run = runs + tl.program_id(0).to(tl.int64) * _RUN_WORDS
    address = tl.load(gradients + tl.load(run)) + tl.load(run + 1) * (DTYPE.primitive_bitwidth // 8)
    return address, tl.load(run + 2), tl.load(run + 3).to(tl.int32)


@triton.jit
def _moves_16_bytes(addresses, count, DTYPE: tl.constexpr):
    """Whether all of a run moves 16 bytes at a time. ``addresses``: joined by |."""
    return (addresses | (count * (DTYPE.primitive_bitwidth // 8))) % _ACCESS_BYTES == 0


# ------------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _encode_rows(
    source,
    count,
    before,
    error,
    group,
    block,
    first_element,
    row,
    factor,
    key,
    DTYPE: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    within = _within(row, count, DTYPE, BLOCK, ALIGNED)
    there = row * BLOCK < count
    earlier = _rows_at(before, row, tl.float32, BLOCK, ALIGNED)
    carried = tl.load(earlier, mask=there[:, None] & (before != 0), other=0.0)
    # The gradient is not needed again, since decode writes all of it.
    gradient = tl.load(
        _rows_at(source, row, DTYPE, BLOCK, ALIGNED), mask=within, other=0.0, eviction_policy="evict_first"
    )
    y = gradient.to(tl.float32) * factor
    # Without an error, y + 0 would make 0 of -0.
    y = tl.where(before != 0, y + carried, y)
    element = first_element + (row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.uint32)
    scale, byte, value, is_finite = encoded(y, element, key, NUMBER, STOCHASTIC)
    tl.store(_scales_at(group, block + row, BLOCK), scale, mask=there)
    tl.store(_bytes_at(group, block + row, BLOCK), byte, mask=there[:, None])
    errors = _rows_at(error, row, tl.float32, BLOCK, ALIGNED)
    tl.store(errors, tl.where(is_finite[:, None], y - value, 0.0), mask=there[:, None] & (error != 0))


@triton.jit(repr=_name("encode"), do_not_specialize=["wire", "before", "error", "gradients", "runs", "key"])
def block8_encode_kernel(
    wire,
    before,
    error,
    gradients,
    runs,
    scale: tl.float64,
    key: tl.int64,
    DTYPE: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Gradients to bytes, run by run. DTYPE: of the gradients. STOCHASTIC: round by draws from ``key``.

    Example: int8, blocks of 128, gradients [2, -4] and [127, 0.75] at blocks 0 and 1, scale 0.5, no error: the scales
    are 2/127 and 0.5; the blocks begin with [64, -127] and [127, 1], and zeros follow.
    """
    ROWS: tl.constexpr = _ELEMENTS // BLOCK
    TILE: tl.constexpr = ROWS // _STEPS
    source, block, count = _run_of_this_program(gradients, runs, DTYPE)
    group = _group_of(wire.to(tl.int64), block, BLOCK)
    earlier = before.to(tl.int64)
    if earlier != 0:
        earlier += block * (4 * BLOCK)
    errors = error.to(tl.int64)
    if errors != 0:
        errors += block * (4 * BLOCK)
    first = (block * BLOCK).to(tl.uint32)
    factor = tl.full((), scale, tl.float32)
    local = (block & 3).to(tl.int32)
    if _moves_16_bytes(source | earlier | errors, count, DTYPE):
        row = tl.arange(0, ROWS)
        _encode_rows(
            source,
            count,
            earlier,
            errors,
            group,
            local,
            first,
            row,
            factor,
            key,
            DTYPE,
            NUMBER,
            BLOCK,
            STOCHASTIC,
            True,
        )
    else:
        for step in range(0, ROWS, TILE):
            row = step + tl.arange(0, TILE)
            _encode_rows(
                source,
                count,
                earlier,
                errors,
                group,
                local,
                first,
                row,
                factor,
                key,
                DTYPE,
                NUMBER,
                BLOCK,
                STOCHASTIC,
                False,
            )


@triton.jit
def _add_rows(
    shards,
    shard_count,
    group,
    offset,
    blocks,
    error,
    first_element,
    row,
    key,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    there = row < blocks
    errors = _rows_at(error, row, tl.float32, BLOCK, ALIGNED)
    kept = there[:, None] & (error != 0)
    before = tl.load(errors, mask=kept, other=0.0)
    y = tl.zeros(before.shape, tl.float32)
    for step in range(0, shard_count, _IN_FLIGHT):
        tiles = ()
        scales = ()
        for part in tl.static_range(_IN_FLIGHT):
            read = there & (step + part < shard_count)
            shard = tl.load(shards + (step + part), mask=step + part < shard_count, other=0) + offset
            tiles = tiles + (tl.load(_bytes_at(shard, row, BLOCK), mask=read[:, None], other=0),)
            scales = scales + (tl.load(_scales_at(shard, row, BLOCK), mask=read, other=0.0),)
        for part in tl.static_range(_IN_FLIGHT):
            # A missing shard adds 0, which changes nothing, since a sum that began with 0 is never -0.
            y += values(tiles[part], scales[part], NUMBER)
    element = first_element + (row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]).to(tl.uint32)
    scale, byte, value, is_finite = encoded(y, element, key, NUMBER, STOCHASTIC)
    tl.store(_scales_at(group, row, BLOCK), scale, mask=there)
    tl.store(_bytes_at(group, row, BLOCK), byte, mask=there[:, None])
    tl.store(errors, before + (y - value), mask=kept & is_finite[:, None])


@triton.jit(
    repr=_name("add"),
    do_not_specialize=["shards", "count", "target", "error", "blocks", "first_element", "key"],
)
def block8_add_kernel(
    shards,
    count: tl.int64,
    target,
    error,
    blocks: tl.int64,
    first_element: tl.int64,
    key: tl.int64,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Add up shards, ELEMENTS in each program, and encode the sum.

    Example: int8, blocks of 128, two shards whose first blocks begin with [127, 2] and [127, -1] and have the scales 1
    and 0.5: y is [190.5, 1.5], the scale of the target is 1.5, and its first block begins with [127, 1].
    """
    ROWS: tl.constexpr = _ELEMENTS // BLOCK
    TILE: tl.constexpr = ROWS // _STEPS
    block = tl.program_id(0).to(tl.int64) * ROWS
    left = tl.minimum(blocks - block, ROWS).to(tl.int32)
    offset = _group_of(block * 0, block, BLOCK)
    group = target.to(tl.int64) + offset
    errors = error.to(tl.int64)
    if errors != 0:
        errors += block * (4 * BLOCK)
    first = (first_element + block * BLOCK).to(tl.uint32)
    if errors % _ACCESS_BYTES == 0:
        row = tl.arange(0, ROWS)
        _add_rows(shards, count, group, offset, left, errors, first, row, key, NUMBER, BLOCK, STOCHASTIC, True)
    else:
        for step in range(0, ROWS, TILE):
            row = step + tl.arange(0, TILE)
            _add_rows(shards, count, group, offset, left, errors, first, row, key, NUMBER, BLOCK, STOCHASTIC, False)


@triton.jit
def _decode_rows(
    target,
    count,
    group,
    block,
    row,
    DTYPE: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the sum of squares of the written elements, and how many are not finite."""
    # A thread reads as many bytes as it writes numbers at once. If it read 16, numbers would go through shared memory.
    ACCESS: tl.constexpr = _ACCESS_BYTES // (DTYPE.primitive_bitwidth // 8) if ALIGNED else _ACCESS_BYTES
    within = _within(row, count, DTYPE, BLOCK, ALIGNED)
    there = row * BLOCK < count
    byte = tl.load(_bytes_at(group, block + row, BLOCK, ACCESS), mask=there[:, None], other=0)
    scale = tl.load(_scales_at(group, block + row, BLOCK), mask=there, other=0.0)
    gradient = values(byte, scale, NUMBER).to(DTYPE)
    tl.store(_rows_at(target, row, DTYPE, BLOCK, ALIGNED), gradient, mask=within)
    written = tl.where(within, gradient.to(tl.float32), 0.0)
    odd = tl.where(tl.abs(written) < float("inf"), 0, 1)
    return tl.sum(written * written), tl.sum(odd)


@triton.jit(repr=_name("decode"), do_not_specialize=["wire", "gradients", "runs", "partials"])
def block8_decode_kernel(
    wire, gradients, runs, partials, DTYPE: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr
):
    """Bytes to gradients, run by run, and measure the gradients.

    Example: int8, blocks of 128: a block that begins with [127, 1] and has the scale 0.5 gives the gradient
    [63.5, 0.5], and the partials [4032.5, 0].
    """
    ROWS: tl.constexpr = _ELEMENTS // BLOCK
    TILE: tl.constexpr = ROWS // _STEPS
    target, block, count = _run_of_this_program(gradients, runs, DTYPE)
    group = _group_of(wire.to(tl.int64), block, BLOCK)
    local = (block & 3).to(tl.int32)
    squares = tl.full((), 0.0, tl.float32)
    odd = tl.full((), 0, tl.int32)
    if _moves_16_bytes(target, count, DTYPE):
        squares, odd = _decode_rows(target, count, group, local, tl.arange(0, ROWS), DTYPE, NUMBER, BLOCK, True)
    else:
        for step in range(0, ROWS, TILE):
            row = step + tl.arange(0, TILE)
            more_squares, more_odd = _decode_rows(target, count, group, local, row, DTYPE, NUMBER, BLOCK, False)
            squares += more_squares
            odd += more_odd
    place = partials + tl.program_id(0).to(tl.int64) * 2
    tl.store(place, squares.to(tl.float64))
    tl.store(place + 1, odd.to(tl.float64))
