"""The Triton kernels that pack and unpack: many gradients into one wire, and back, one launch each.

    pack:    wire[offset_i + j] = cast(fp32(gradient_i[j]) * scale)
    unpack:  gradient_i[j] = cast(fp32(wire[offset_i + j]) * scale), and measures the gradients that it writes
    measure: measures a wire in which gradients live
    pack_measuring:    pack, and measures the gradients as they were before the scale
    measure_gradients: measures gradients that are not packed

Launch signatures::

    pack               (wire: T*, table: int64*, chunks: int64*, scale: double)
    pack_measuring     (wire: T*, table: int64*, chunks: int64*, scale: double, partials: double*)
    measure_gradients  (table: int64*, chunks: int64*, partials: double*)
    unpack             (wire: T*, table: int64*, chunks: int64*, scale: double, partials: double*)
    measure            (wire: T*, count: int64, partials: double*)

    grid   = (number of rows in chunks, 1, 1); measure: (programs of CHUNK elements, 1, 1)
    block  = (32 * num_warps, 1, 1)

csrc/pack/ makes the tables and launches; :mod:`.pack_reference` computes the same in plain torch. A launch appends
Triton's two scratch pointers, both null here. No argument is assumed to be aligned beyond its element. Every chunk
looks at its own two addresses, so one binary serves every wire and every gradient.

A wire has each gradient's elements in the order of its parameter's memory, so gradients usually move as flat pieces.

``chunks`` is static. Row c says what program c moves: consecutive elements of one gradient, in the wire's order:

    word 0  gradient   which gradient of the bucket
    word 1  begin      first element, counted within the gradient
    word 2  start      first element, counted within the wire
    word 3  count      how many elements, 1 .. CHUNK

For gradients of 3 and 5 elements, one after the other, and CHUNK = 4 it is::

    [0, 0, 0, 3,  1, 0, 3, 4,  1, 4, 7, 1]

``table`` changes with the gradients' addresses. It begins with one row for each gradient:

    word 2i      address of gradient i; 0 where it is undefined (pack writes zeros, unpack skips it)
    word 2i + 1  0 if gradient i lies in memory as it does in the wire; else the position, within this table, of its
                 shape block: [number of dims, size, stride, size, stride, ...], innermost dim of the wire first,
                 neighbours merged where one stride carries on the other

For two gradients of shape (2, 3), the first contiguous at address 4096, the second transposed (strides (1, 2)) at 8192,
both row-major in the wire, it is::

    [4096, 0,  8192, 4,  2, 3, 2, 2, 1]
     gradient  gradient  |  |     size 2, stride 1
     0: flat   1: shape  |  size 3, stride 2
               block at 4|
                         number of dims

``partials`` are [programs, 2]. To measure, program p writes the sum of the squares of its elements, as they are in the
gradients, and how many of them are not finite. Null: it writes nothing. On the way into the wire, elements are measured
as they were read: before the scale, and before the cast, which may make an infinity of a large number.

Every number that is multiplied by an element's size, and every index into the wire, is int64.
"""

from typing import Any

import torch
import triton
import triton.language as tl

CHUNK_ELEMENTS = 4096
"""Elements that one program moves: four 16-byte loads of fp32 in flight in each of 256 threads."""


def chunk_elements(gradient: torch.dtype, wire: torch.dtype) -> int:
    """Elements that one program of pack and of unpack moves: twice as many of 16 bits, if none is cast.

    Both ways of packing, measuring or not, take the same, since they share the table of chunks.
    """
    return 2 * CHUNK_ELEMENTS if gradient == wire and gradient.itemsize == 2 else CHUNK_ELEMENTS


OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""How Triton compiles these kernels, wherever it is asked to."""

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}

ADDRESS_WORDS = 2
CHUNK_WORDS = 4
ACCESS_BYTES = 16

# The constants above as the kernels see them, and two steps of their own, for rarely taken paths. The steps differ from
# a chunk so that the compiler does not impose the vectorised path's layout on these paths, one of which divides. They
# are so small that 256 threads' registers allow six programs on a multiprocessor.
_ADDRESS_WORDS = tl.constexpr(ADDRESS_WORDS)
_CHUNK_WORDS = tl.constexpr(CHUNK_WORDS)
_ACCESS_BYTES = tl.constexpr(ACCESS_BYTES)
_SCALAR_STEP = tl.constexpr(2048)
_STRIDED_STEP = tl.constexpr(512)


def moves(gradient: torch.dtype, wire: torch.dtype) -> bool:
    """Whether the kernels move gradients of dtype ``gradient`` to and from a wire of dtype ``wire``."""
    return {gradient, wire} <= TRITON_DTYPES.keys() and (gradient == torch.float64) == (wire == torch.float64)


def kernel_constants(gradient: torch.dtype, wire: torch.dtype, chunk_elements: int) -> dict[str, Any]:
    """The compile-time arguments of pack and unpack.

    Raises:
        ValueError: a pair of dtypes that the kernels do not move, or ``chunk_elements`` is not a power of two.
    """
    if chunk_elements < 1 or chunk_elements & (chunk_elements - 1):
        raise ValueError(f"chunk_elements is {chunk_elements}, but must be a power of two: Triton's tiles are")
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


def _name(form: str):
    """The name in profilers and in the binary, such as ``fastddp_pack_fp32_to_bf16``."""

    def name(specialization) -> str:
        types = [str(specialization.constants["GRADIENT"]), specialization.signature["wire"].removeprefix("*")]
        return f"fastddp_{form}_" + "_to_".join(types if form.startswith("pack") else types[::-1])

    return name


@triton.jit
def _scaled(values, factor, TARGET: tl.constexpr):
    """Cast to TARGET, after multiplying in the type of ``factor``.

    Equal types and factor 1 move the bits untouched: even a multiplication by one would rewrite the payload of a NaN.
    """
    if values.dtype == TARGET:
        if factor != 1.0:
            values = (values.to(factor.dtype) * factor).to(TARGET)
    else:
        values = (values.to(factor.dtype) * factor).to(TARGET)
    return values


@triton.jit
def _measured(values, live, COMPUTE: tl.constexpr):
    """The sum of the squares of the live elements, and how many of them are not finite."""
    wide = tl.where(live, values.to(COMPUTE), 0.0)
    odd = tl.where(tl.abs(wide) < float("inf"), 0, 1)
    return tl.sum(wide * wide), tl.sum(odd)


@triton.jit
def _store_measured(partials, squares, odd):
    if partials.to(tl.int64) != 0:
        place = partials + tl.program_id(0).to(tl.int64) * 2
        tl.store(place, squares.to(tl.float64))
        tl.store(place + 1, odd.to(tl.float64))


@triton.jit
def _transfer(source, target, readable, writable, factor, MEASURE: tl.constexpr):
    """Copy one tile of pointers to another. An element that is writable but not readable becomes zero.

    MEASURE says whether to measure and return the elements as "written", as "read", or "nothing".

    The source is not needed again, since the next backward or exchange writes all of it. So it leaves the cache first,
    and makes room for the target, which a collective or an optimizer reads next.
    """
    values = tl.load(source, mask=readable, other=0.0, eviction_policy="evict_first")
    moved = _scaled(values, factor, target.dtype.element_ty)
    tl.store(target, moved, mask=writable)
    if MEASURE == "written":
        return _measured(moved, writable, factor.dtype)
    elif MEASURE == "read":
        return _measured(values, readable, factor.dtype)
    else:
        return factor * 0, 0


@triton.jit
def _address(wire, index):
    """The address of an element of the wire. Not ``(wire + index).to(tl.int64)``.

    Triton 3.9 turns that, cast back, into the former pointer, and drops the cast's alignment hint.
    """
    return wire.to(tl.int64) + index * (wire.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _move_flat(
    source,
    target,
    count,
    present,
    factor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    CHUNK: tl.constexpr,
    MEASURE: tl.constexpr,
):
    """Move ``count`` elements from address ``source`` to address ``target``, both contiguous; returns as _transfer."""
    SOURCE_BYTES: tl.constexpr = SOURCE.primitive_bitwidth // 8
    TARGET_BYTES: tl.constexpr = TARGET.primitive_bitwidth // 8
    SMALLER_BYTES: tl.constexpr = SOURCE_BYTES if SOURCE_BYTES < TARGET_BYTES else TARGET_BYTES
    VECTOR: tl.constexpr = _ACCESS_BYTES // SMALLER_BYTES
    index = tl.arange(0, CHUNK)
    if (source | target) % _ACCESS_BYTES == 0:
        # The hints hold for these two casts, and so in this branch only. The count is rounded down so that a vector is
        # masked as a whole.
        aligned_source = tl.multiple_of(source.to(tl.pointer_type(SOURCE)), _ACCESS_BYTES)
        aligned_target = tl.multiple_of(target.to(tl.pointer_type(TARGET)), _ACCESS_BYTES)
        whole = count // VECTOR * VECTOR
        live = index < whole
        squares, odd = _transfer(aligned_source + index, aligned_target + index, live & present, live, factor, MEASURE)
        if whole < count:
            rest = whole + tl.arange(0, VECTOR)
            live_rest = rest < count
            more_squares, more_odd = _transfer(
                aligned_source + rest, aligned_target + rest, live_rest & present, live_rest, factor, MEASURE
            )
            squares += more_squares
            odd += more_odd
    else:
        source_pointer = source.to(tl.pointer_type(SOURCE))
        target_pointer = target.to(tl.pointer_type(TARGET))
        squares = factor * 0
        odd = 0
        for step in range(0, CHUNK, _SCALAR_STEP):
            single = step + tl.arange(0, _SCALAR_STEP)
            live = single < count
            more_squares, more_odd = _transfer(
                source_pointer + single, target_pointer + single, live & present, live, factor, MEASURE
            )
            squares += more_squares
            odd += more_odd
    return squares, odd


@triton.jit
def _strided_offsets(block, index):
    """The offset, in elements, of element ``index`` (in the wire's order) of a strided gradient."""
    dims = tl.load(block)
    remaining = index
    offsets = index * 0
    for dim in range(dims - 1):
        size = tl.load(block + 1 + 2 * dim)
        stride = tl.load(block + 2 + 2 * dim)
        offsets += remaining % size * stride
        remaining = remaining // size
    return offsets + remaining * tl.load(block + 2 * dims)


@triton.jit
def _chunk_of_this_program(table, chunks):
    """Return begin, start and count of this program's row, and the gradient's address and shape block (0: flat)."""
    row = chunks + tl.program_id(0).to(tl.int64) * _CHUNK_WORDS
    gradient = table + _ADDRESS_WORDS * tl.load(row)
    return tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(gradient), tl.load(gradient + 1)


@triton.jit
def _pack(
    wire,
    table,
    chunks,
    scale,
    GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    MEASURE: tl.constexpr,
):
    WIRE: tl.constexpr = wire.dtype.element_ty
    begin, start, count, address, shape = _chunk_of_this_program(table, chunks)
    if MEASURE == "read":
        # Comparing the indices, of 32 bits, with 64 bits takes registers. Keeping fp64 to measure it leaves none.
        count = count.to(tl.int32)
    factor = tl.full((), scale, COMPUTE)
    squares = factor * 0
    odd = 0
    if shape == 0:
        source = address + begin * (GRADIENT.primitive_bitwidth // 8)
        target = _address(wire, start)
        squares, odd = _move_flat(source, target, count, address != 0, factor, GRADIENT, WIRE, CHUNK, MEASURE)
    else:
        pointer = address.to(tl.pointer_type(GRADIENT))
        for step in range(0, CHUNK, _STRIDED_STEP):
            index = step + tl.arange(0, _STRIDED_STEP)
            live = index < count
            source_pointers = pointer + _strided_offsets(table + shape, begin + index)
            more_squares, more_odd = _transfer(source_pointers, wire + (start + index), live, live, factor, MEASURE)
            squares += more_squares
            odd += more_odd
    return squares, odd


@triton.jit(repr=_name("pack"), do_not_specialize=["wire", "table", "chunks"])
def pack_kernel(
    wire, table, chunks, scale: tl.float64, GRADIENT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr
):
    """Gradients to wire, chunk by chunk. GRADIENT: the gradients' dtype. COMPUTE: the dtype of the scaling.

    A gradient may live in its place in the wire, and is then scaled there. With scale 1 and equal dtypes the bits are
    copied.

    Example: gradients [2, 4], undefined and [6, 8], with places of 2, 1 and 2 elements, and scale 0.5 give the wire
    [1, 2, 0, 3, 4].
    """
    _pack(wire, table, chunks, scale, GRADIENT, COMPUTE, CHUNK, "nothing")


@triton.jit(repr=_name("pack_measuring"), do_not_specialize=["wire", "table", "chunks", "partials"])
def pack_measuring_kernel(
    wire, table, chunks, scale: tl.float64, partials, GRADIENT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr
):
    """:func:`pack_kernel`, which also measures the gradients before they are scaled.

    Example: gradients [2, 4], undefined and [6, inf], with places of 2, 1 and 2 elements, and scale 0.5 give the wire
    [1, 2, 0, 3, inf], and the partials [20, 0], [0, 0] and [inf, 1].
    """
    squares, odd = _pack(wire, table, chunks, scale, GRADIENT, COMPUTE, CHUNK, "read")
    _store_measured(partials, squares, odd)


def _name_of_measure_gradients(specialization) -> str:
    return f"fastddp_measure_gradients_{specialization.constants['GRADIENT']}"


@triton.jit
def _read_flat(source, count, GRADIENT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr):
    """Measure ``count`` contiguous elements from address ``source`` on; aligned as in :func:`_move_flat`."""
    VECTOR: tl.constexpr = _ACCESS_BYTES // (GRADIENT.primitive_bitwidth // 8)
    index = tl.arange(0, CHUNK)
    if source % _ACCESS_BYTES == 0:
        aligned = tl.multiple_of(source.to(tl.pointer_type(GRADIENT)), _ACCESS_BYTES)
        whole = count // VECTOR * VECTOR
        live = index < whole
        squares, odd = _measured(tl.load(aligned + index, mask=live, other=0.0), live, COMPUTE)
        rest = whole + tl.arange(0, VECTOR)
        more_squares, more_odd = _measured(tl.load(aligned + rest, mask=rest < count, other=0.0), rest < count, COMPUTE)
        squares += more_squares
        odd += more_odd
    else:
        live = index < count
        pointer = source.to(tl.pointer_type(GRADIENT))
        squares, odd = _measured(tl.load(pointer + index, mask=live, other=0.0), live, COMPUTE)
    return squares, odd


@triton.jit(repr=_name_of_measure_gradients, do_not_specialize=["table", "chunks", "partials"])
def measure_gradients_kernel(
    table, chunks, partials, GRADIENT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr
):
    """Measure gradients that are not packed, chunk by chunk.

    Example: gradients [2, 4] and [6, inf] have the partials [20, 0] and [inf, 1].
    """
    begin, _, count, address, shape = _chunk_of_this_program(table, chunks)
    squares = tl.full((), 0.0, COMPUTE)
    odd = 0
    if shape == 0:
        source = address + begin * (GRADIENT.primitive_bitwidth // 8)
        squares, odd = _read_flat(source, count, GRADIENT, COMPUTE, CHUNK)
    else:
        pointer = address.to(tl.pointer_type(GRADIENT))
        for step in range(0, CHUNK, _STRIDED_STEP):
            index = step + tl.arange(0, _STRIDED_STEP)
            live = index < count
            values = tl.load(pointer + _strided_offsets(table + shape, begin + index), mask=live, other=0.0)
            more_squares, more_odd = _measured(values, live, COMPUTE)
            squares += more_squares
            odd += more_odd
    _store_measured(partials, squares, odd)


@triton.jit(repr=_name("unpack"), do_not_specialize=["wire", "table", "chunks", "partials"])
def unpack_kernel(
    wire, table, chunks, scale: tl.float64, partials, GRADIENT: tl.constexpr, COMPUTE: tl.constexpr, CHUNK: tl.constexpr
):
    """Wire to gradients, chunk by chunk: :func:`pack_kernel` in the other direction. Measures the gradients.

    Example: the wire [1, 2, 0, 3, 4] and gradients of 2 elements, undefined and of 2 give [1, 2] and [3, 4], and the
    partials [5, 0], [0, 0] and [25, 0].
    """
    WIRE: tl.constexpr = wire.dtype.element_ty
    begin, start, count, address, shape = _chunk_of_this_program(table, chunks)
    factor = tl.full((), scale, COMPUTE)
    squares = factor * 0
    odd = 0
    if shape == 0:
        if address != 0:
            source = _address(wire, start)
            target = address + begin * (GRADIENT.primitive_bitwidth // 8)
            squares, odd = _move_flat(source, target, count, True, factor, WIRE, GRADIENT, CHUNK, "written")
    else:
        pointer = address.to(tl.pointer_type(GRADIENT))
        for step in range(0, CHUNK, _STRIDED_STEP):
            index = step + tl.arange(0, _STRIDED_STEP)
            live = index < count
            target_pointers = pointer + _strided_offsets(table + shape, begin + index)
            more_squares, more_odd = _transfer(wire + (start + index), target_pointers, live, live, factor, "written")
            squares += more_squares
            odd += more_odd
    _store_measured(partials, squares, odd)


def _name_of_measure(specialization) -> str:
    return "fastddp_measure_" + specialization.signature["wire"].removeprefix("*")


@triton.jit(repr=_name_of_measure, do_not_specialize=["wire", "count", "partials"])
def measure_kernel(wire, count: tl.int64, partials, CHUNK: tl.constexpr):
    """Measure the elements of a wire, CHUNK in each program.

    Example: the wire [3, 4, nan] has the partials [nan, 1].
    """
    WIRE: tl.constexpr = wire.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if tl.float64 == WIRE else tl.float32
    VECTOR: tl.constexpr = _ACCESS_BYTES // (WIRE.primitive_bitwidth // 8)
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(count - begin, CHUNK)
    index = tl.arange(0, CHUNK)
    address = _address(wire, begin)
    if address % _ACCESS_BYTES == 0:  # as in _move_flat
        aligned = tl.multiple_of(address.to(tl.pointer_type(WIRE)), _ACCESS_BYTES)
        whole = left // VECTOR * VECTOR
        live = index < whole
        squares, odd = _measured(tl.load(aligned + index, mask=live, other=0.0), live, COMPUTE)
        rest = whole + tl.arange(0, VECTOR)
        more_squares, more_odd = _measured(tl.load(aligned + rest, mask=rest < left, other=0.0), rest < left, COMPUTE)
        squares += more_squares
        odd += more_odd
    else:
        live = index < left
        squares, odd = _measured(tl.load(wire + begin + index, mask=live, other=0.0), live, COMPUTE)
    _store_measured(partials, squares, odd)
