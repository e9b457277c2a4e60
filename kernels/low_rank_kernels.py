"""Triton kernels of PowerSGD: all gradients of a bucket as products of thin matrices, one launch a step.

    compress:     memory = M = before + gradient, rounded once to the memory's dtype.  P = scale * M Q^T
    project:      partial sums of P^T M, one for each range of rows
    sum_partials: Q = scale * (the sum of the partial sums), in a fixed order
    reconstruct:  gradient = P Q, rounded once.  memory = M - gradient, 0 where that is not finite

Shape letters:

    n, m  rows and columns of one gradient, which lies row by row without gaps
    r     its rank: P is [n, r], Q is [r, m], both fp32 and without gaps. R is the power of two at or above all ranks
    B     programs of one launch

Launch signatures. Every grid is (rows of ``blocks`` or ``sums``, 1, 1), every block (32 * num_warps, 1, 1). A driver
launch appends Triton's two scratch pointers, both null::

    compress      (matrices: int64*, blocks: int64*, scale: double)
    project       (matrices: int64*, blocks: int64*, partials: fp32*)
    sum_partials  (matrices: int64*, sums: int64*, partials: fp32*, scale: double)
    reconstruct   (matrices: int64*, blocks: int64*, partials: fp64*)

``matrices`` has one row for each gradient of the bucket:

    word 0  address of the gradient. 0: there is none, which compress takes as zeros; reconstruct needs one
    word 1  address of the memory, which becomes M, then the new error. 0: no error feedback; M is the gradient.
            Gradient, memory and ``before`` have the launch's DTYPE
    word 2  address of P
    word 3  address of Q
    word 4  n
    word 5  m
    word 6  r, 1 .. R
    word 7  address of ``before``, the error of earlier windows, which may be the memory's. Only compress reads it

``blocks`` differs between kernels. Row b says what program b works on, a rectangle of one gradient:

    word 0  matrix   which row of ``matrices``
    word 1  row      its first row
    word 2  rows     how many. compress: 1 .. compress_rows(R). project and reconstruct: any number
    word 3  column   its first column, a multiple of the most that a program takes
    word 4  columns  how many. compress: all m. project: 1 .. STEP. reconstruct: 1 .. COLUMNS
    word 5  partial  project: position in ``partials`` of this program's first number. Other kernels do not read it

``partials`` of project have, for each gradient, one [r, m] array for each range of rows, one after another. Program b
writes its columns of one array. Element (i, c) of range s is at (begin of the gradient's first array) + s * r * m +
i * m + c, and word 5 is that position for (0, column). ``partials`` of reconstruct are [B, 2]: program b writes the sum
of the squares of the elements that it wrote, and how many of them were not finite.

``sums`` has, for each program of sum_partials, consecutive elements of one Q:

    word 0  matrix  which row of ``matrices``
    word 1  begin   first element, counted within Q; the last is ELEMENTS further, or the end of Q
    word 2  first   position in ``partials`` of the gradient's first array
    word 3  spans   how many arrays there are to add; none gives zeros

No address is assumed to be aligned. If the addresses of gradient, memory and Q and the bytes of a row are multiples of
16, elements move 16 bytes at a time (8 in project for two-byte dtypes and R = 32, whose sums would not fit registers).

A warp has whole rows of a tile. So sums along rows (compress) are kept apart in each lane until the loop ends. A
thread of reconstruct has the same columns in all tiles, and holds Q of these, as long as they fit registers. A
program of project is one warp, which keeps all sums along its columns. If several warps added up theirs, they would
meet in shared memory, four columns a thread, mostly in one bank.
"""

# Triton adds tuples when it compiles.
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

COLUMNS = 64
"""Columns of a tile of compress and of reconstruct."""

RECONSTRUCT_TILE = (256, COLUMNS)
"""Rows and columns of one program of reconstruct."""

STEP = 128
"""Columns of one program of project."""

ELEMENTS = 128
"""Elements of Q that one program of sum_partials adds up."""

PROJECT_WARPS = 1
"""Warps of a program of project."""

TILE_WARPS = 4
"""Warps of a program of compress and of reconstruct, which have more threads than COLUMNS.

If they had not, Triton would bring Q to them through shared memory, with two barriers a vector.
"""

MATRIX_WORDS = 8
BLOCK_WORDS = 6
SUM_WORDS = 4
LARGEST_RANK = 32

_MATRIX_WORDS = tl.constexpr(MATRIX_WORDS)
_BLOCK_WORDS = tl.constexpr(BLOCK_WORDS)
_SUM_WORDS = tl.constexpr(SUM_WORDS)
_STEP = tl.constexpr(STEP)
_COLUMNS = tl.constexpr(COLUMNS)
_ELEMENTS = tl.constexpr(ELEMENTS)
_ACCESS_BYTES = tl.constexpr(16)
_WARP = tl.constexpr(32)
_PROJECT_THREADS = tl.constexpr(32 * PROJECT_WARPS)
_SUMS_A_THREAD = tl.constexpr(128)
_SPANS_IN_FLIGHT = tl.constexpr(32)


def padded_rank(rank: int) -> int:
    """R: the power of two at or above the rank.

    >>> padded_rank(1), padded_rank(3)
    (1, 4)
    """
    return 1 << (rank - 1).bit_length()


@triton.constexpr_function
def compress_rows(rank):
    """Rows of one program of compress, for a padded rank: several a thread, which reads Q once, if sums fit."""
    return 32 if rank <= 4 else 16


@triton.constexpr_function
def holds_q(rank, element_bits):
    """Whether a thread of reconstruct holds Q of its columns, for a padded rank: in at most 32 registers."""
    return rank * 128 // element_bits <= 32


def _name(form: str):
    """The name in profilers and in the binary, such as ``fastddp_compress_fp32_r4``."""

    def name(specialization) -> str:
        constants = specialization.constants
        parts = ["fastddp", form]
        if "DTYPE" in constants:
            parts.append(str(constants["DTYPE"]))
        if "R" in constants:
            parts.append(f"r{constants['R']}")
        return "_".join(parts)

    return name


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, BYTES: tl.constexpr):
    """The address as a pointer to DTYPE, with the hint, for this cast only, that it is a multiple of BYTES."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if BYTES > 1:
        pointer = tl.multiple_of(pointer, BYTES)
    return pointer


@triton.jit
def _compress_block(
    gradient,
    before,
    memory,
    p,
    q,
    row,
    rows,
    columns,
    rank,
    factor,
    DTYPE: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    # The tiles of the two paths differ in shape so that each gets its own layout. If a thread has neighbours of a row,
    # it adds them up at once. Each lane keeps the sums of its columns.
    VECTOR: tl.constexpr = _ACCESS_BYTES // (DTYPE.primitive_bitwidth // 8) if ALIGNED else 1
    COLUMNS: tl.constexpr = _COLUMNS if ALIGNED else _WARP
    ROWS: tl.constexpr = compress_rows(R)
    LANES: tl.constexpr = COLUMNS // VECTOR
    BYTES: tl.constexpr = _ACCESS_BYTES if ALIGNED else 1
    width = columns // VECTOR * VECTOR
    gradient_pointer = _pointer(gradient, DTYPE, BYTES)
    before_pointer = _pointer(before, DTYPE, BYTES)
    memory_pointer = _pointer(memory, DTYPE, BYTES)
    q_pointer = _pointer(q, tl.float32, BYTES)
    line = tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    offsets = (row + line)[:, None] * width + lane[None, :]
    is_line = line < rows
    vectors = rank.to(tl.int32)
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros((ROWS, LANES), tl.float32),)
    for column in range(0, width, COLUMNS):
        live_columns = lane < tl.minimum(width - column, COLUMNS).to(tl.int32)
        live = is_line[:, None] & live_columns[None, :]
        # The gradient is not needed again, since reconstruct writes all of it. The memory is read next, by project.
        values = tl.load(
            gradient_pointer + offsets + column, mask=live & (gradient != 0), other=0.0, eviction_policy="evict_first"
        )
        error = tl.load(before_pointer + offsets + column, mask=live & (before != 0), other=0.0)
        rounded = (error.to(tl.float32) + values.to(tl.float32)).to(DTYPE)
        tl.store(memory_pointer + offsets + column, rounded, mask=live & (memory != 0))
        matrix = rounded.to(tl.float32)
        longer = ()
        for i in tl.static_range(R):
            vector = tl.load(q_pointer + i * width + column + lane, mask=live_columns & (i < vectors), other=0.0)
            if VECTOR > 1:
                products = tl.sum(tl.reshape(matrix * vector[None, :], (ROWS, LANES, VECTOR)), axis=2)
                longer = longer + (sums[i] + products,)
            else:
                longer = longer + (tl.fma(matrix, tl.broadcast_to(vector[None, :], (ROWS, LANES)), sums[i]),)
        sums = longer
    target = p.to(tl.pointer_type(tl.float32)) + (row + line) * rank
    for i in tl.static_range(R):
        tl.store(target + i, tl.sum(sums[i], axis=1) * factor, mask=(line < rows) & (i < rank))


@triton.jit(repr=_name("compress"), do_not_specialize=["matrices", "blocks"])
def compress_kernel(matrices, blocks, scale: tl.float64, DTYPE: tl.constexpr, R: tl.constexpr):
    """Add the gradient to ``before``, which gives M, and multiply M with Q^T. A program has whole rows.

    Example: gradient [[1, 2], [3, 4]], before [[1, 0], [0, 1]], Q [[1, 1]] and scale 0.5 give the memory
    [[2, 2], [3, 5]] and P [[2], [4]].
    """
    block = blocks + tl.program_id(0).to(tl.int64) * _BLOCK_WORDS
    matrix = matrices + tl.load(block) * _MATRIX_WORDS
    row = tl.load(block + 1)
    rows = tl.load(block + 2)
    gradient = tl.load(matrix)
    memory = tl.load(matrix + 1)
    p = tl.load(matrix + 2)
    q = tl.load(matrix + 3)
    columns = tl.load(matrix + 5)
    rank = tl.load(matrix + 6)
    before = tl.load(matrix + 7)
    factor = tl.full((), scale, tl.float32)
    if (gradient | before | memory | q | (columns * (DTYPE.primitive_bitwidth // 8))) % _ACCESS_BYTES == 0:
        _compress_block(gradient, before, memory, p, q, row, rows, columns, rank, factor, DTYPE, R, True)
    else:
        _compress_block(gradient, before, memory, p, q, row, rows, columns, rank, factor, DTYPE, R, False)


@triton.jit
def _project_block(
    source, p, row, rows, width_of_row, column, rank, target, DTYPE: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr
):
    # BYTES: of one access. Several tiles of LINES rows are in flight; a thread adds up its elements of a column.
    VECTOR: tl.constexpr = BYTES // (DTYPE.primitive_bitwidth // 8) if BYTES > 1 else 1
    LINES: tl.constexpr = _PROJECT_THREADS * VECTOR // _STEP if BYTES > 1 else 1
    IN_FLIGHT: tl.constexpr = 8 if R < 16 else 4 if R < 32 else 1
    width = width_of_row // VECTOR * VECTOR
    source_pointer = _pointer(source, DTYPE, BYTES)
    p_pointer = p.to(tl.pointer_type(tl.float32))
    line = tl.arange(0, LINES)
    columns = column // VECTOR * VECTOR + tl.arange(0, _STEP)
    live_columns = columns < width
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros((LINES, _STEP), tl.float32),)
    for step in range(0, rows, LINES * IN_FLIGHT):
        tiles = ()
        for part in tl.static_range(IN_FLIGHT):
            lines = step + part * LINES + line
            live = (lines < rows)[:, None] & live_columns[None, :]
            offsets = (row + lines)[:, None] * width + columns[None, :]
            tiles = tiles + (tl.load(source_pointer + offsets, mask=live & (source != 0), other=0.0).to(tl.float32),)
        for part in tl.static_range(IN_FLIGHT):
            lines = step + part * LINES + line
            longer = ()
            for i in tl.static_range(R):
                vector = tl.load(p_pointer + (row + lines) * rank + i, mask=(lines < rows) & (i < rank), other=0.0)
                longer = longer + (tl.fma(tiles[part], tl.broadcast_to(vector[:, None], (LINES, _STEP)), sums[i]),)
            sums = longer
    for i in tl.static_range(R):
        at = target + i * width_of_row + tl.arange(0, _STEP)
        tl.store(at, tl.sum(sums[i], axis=0), mask=(column + tl.arange(0, _STEP) < width_of_row) & (i < rank))


@triton.jit(repr=_name("project"), do_not_specialize=["matrices", "blocks", "partials"])
def project_kernel(matrices, blocks, partials, DTYPE: tl.constexpr, R: tl.constexpr):
    """Multiply P^T with M, for a range of rows and STEP columns, into this program's place in ``partials``.

    Example: P [[1], [2]] and M [[1, 2], [3, 4]] in one range give the partials [7, 10]; in two, [1, 2, 6, 8].
    """
    block = blocks + tl.program_id(0).to(tl.int64) * _BLOCK_WORDS
    matrix = matrices + tl.load(block) * _MATRIX_WORDS
    row = tl.load(block + 1)
    rows = tl.load(block + 2)
    column = tl.load(block + 3)
    target = partials + tl.load(block + 5)
    gradient = tl.load(matrix)
    memory = tl.load(matrix + 1)
    p = tl.load(matrix + 2)
    width = tl.load(matrix + 5)
    rank = tl.load(matrix + 6)
    source = tl.where(memory != 0, memory, gradient)
    WIDEST: tl.constexpr = _SUMS_A_THREAD // R * (DTYPE.primitive_bitwidth // 8)
    WIDE: tl.constexpr = WIDEST if WIDEST < _ACCESS_BYTES else _ACCESS_BYTES
    if (source | (width * (DTYPE.primitive_bitwidth // 8))) % WIDE == 0:
        _project_block(source, p, row, rows, width, column, rank, target, DTYPE, R, WIDE)
    else:
        _project_block(source, p, row, rows, width, column, rank, target, DTYPE, R, 1)


@triton.jit(repr=_name("sum_partials"), do_not_specialize=["matrices", "sums", "partials"])
def sum_partials_kernel(matrices, sums, partials, scale: tl.float64):
    """Add up project's partials for ELEMENTS elements of one Q, always in the same order.

    Example: the partials [1, 2] and [6, 8] of two ranges of rows, and scale 0.5, give Q [[3.5, 5]].
    """
    run = sums + tl.program_id(0).to(tl.int64) * _SUM_WORDS
    matrix = matrices + tl.load(run) * _MATRIX_WORDS
    element = tl.load(run + 1) + tl.arange(0, _ELEMENTS)
    source = partials + tl.load(run + 2)
    spans = tl.load(run + 3)
    numel = tl.load(matrix + 5) * tl.load(matrix + 6)
    live = element < numel
    span = tl.arange(0, _SPANS_IN_FLIGHT)
    totals = tl.zeros((_SPANS_IN_FLIGHT, _ELEMENTS), tl.float32)
    for step in range(0, spans, _SPANS_IN_FLIGHT):
        offsets = (step + span).to(tl.int64)[:, None] * numel + element[None, :]
        totals += tl.load(source + offsets, mask=(step + span < spans)[:, None] & live[None, :], other=0.0)
    q = tl.load(matrix + 3).to(tl.pointer_type(tl.float32))
    tl.store(q + element, tl.sum(totals, axis=0) * tl.full((), scale, tl.float32), mask=live)


@triton.jit
def _reconstruct_block(
    gradient,
    memory,
    p,
    q,
    row,
    rows,
    column,
    columns,
    width_of_row,
    rank,
    target,
    DTYPE: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    # The tiles of the two paths differ in shape, as in compress.
    VECTOR: tl.constexpr = _ACCESS_BYTES // (DTYPE.primitive_bitwidth // 8) if ALIGNED else 1
    ROWS: tl.constexpr = 16 if ALIGNED else 8
    BYTES: tl.constexpr = _ACCESS_BYTES if ALIGNED else 1
    IS_HELD: tl.constexpr = holds_q(R, DTYPE.primitive_bitwidth)
    PART: tl.constexpr = R if IS_HELD else 2
    width = width_of_row // VECTOR * VECTOR
    line = tl.arange(0, ROWS)
    lane = tl.arange(0, _COLUMNS)
    count = rows.to(tl.int32)
    vectors = rank.to(tl.int32)
    is_column = lane < columns.to(tl.int32) // VECTOR * VECTOR
    is_read = is_column & (memory != 0)
    offsets = (row + line)[:, None] * width + (column // VECTOR * VECTOR + lane)[None, :]
    gradients = _pointer(gradient, DTYPE, BYTES) + offsets
    memories = _pointer(memory, DTYPE, BYTES) + offsets
    left_pointer = p.to(tl.pointer_type(tl.float32)) + (row + line) * rank
    right_pointer = _pointer(q, tl.float32, BYTES) + (column // VECTOR * VECTOR + lane)
    held = ()
    for i in tl.static_range(R if IS_HELD else 0):
        held = held + (tl.load(right_pointer + i * width, mask=is_column & (i < vectors), other=0.0),)
    squares = tl.zeros((ROWS, _COLUMNS), tl.float32)
    is_line = line < count
    following = tl.load(memories, mask=is_line[:, None] & is_read[None, :], eviction_policy="evict_first")
    for step in range(0, count, ROWS):
        # The next tile is on its way while this one is computed.
        matrix = following
        is_next = step + ROWS + line < count
        following = tl.load(
            memories + ROWS * width, mask=is_next[:, None] & is_read[None, :], eviction_policy="evict_first"
        )
        # Zeros made from the loaded tile, so that products have its layout and are computed in no other.
        product = tl.where(line[:, None] >= 0, 0.0, matrix.to(tl.float32))
        for begin in range(0, R, PART):
            for part in tl.static_range(PART):
                vector = begin + part
                left = tl.load(left_pointer + vector, mask=is_line & (vector < vectors), other=0.0)
                there = is_column & (vector < vectors)
                right = held[part] if IS_HELD else tl.load(right_pointer + vector * width, mask=there, other=0.0)
                left, right = tl.broadcast(left[:, None], right[None, :])
                product = tl.fma(left, right, product)
        rounded = product.to(DTYPE)
        value = rounded.to(tl.float32)
        tl.store(gradients, rounded, mask=is_line[:, None] & is_column[None, :])
        error = matrix.to(tl.float32) - value
        error = tl.where(tl.abs(error) < float("inf"), error, 0.0).to(DTYPE)
        tl.store(memories, error, mask=is_line[:, None] & is_read[None, :])
        squares = tl.fma(value, value, squares)
        gradients += ROWS * width
        memories += ROWS * width
        left_pointer += ROWS * rank
        is_line = is_next
    total = tl.sum(squares)
    odd = tl.full((), 0, tl.int32)
    if not tl.abs(total) < float("inf"):
        # Seldom. Beside the rectangle, infinity times 0 gets into the sum only if an element inside is infinite too.
        tl.debug_barrier()  # threads read what others wrote
        for step in range(0, count, ROWS):
            written = (step + line < count)[:, None] & is_column[None, :]
            place = _pointer(gradient, DTYPE, BYTES) + offsets + step * width
            value = tl.load(place, mask=written, other=0.0).to(tl.float32)
            odd += tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1))
    tl.store(target, total.to(tl.float64))
    tl.store(target + 1, odd.to(tl.float64))


@triton.jit(repr=_name("reconstruct"), do_not_specialize=["matrices", "blocks", "partials"])
def reconstruct_kernel(matrices, blocks, partials, DTYPE: tl.constexpr, R: tl.constexpr):
    """Write P Q into the gradient, M minus that into the memory, and a share of the norm into ``partials``.

    Example: P [[1], [2]], Q [[1, 2]] and the memory [[2, 2], [2, 5]] give the gradient [[1, 2], [2, 4]], the memory
    [[1, 0], [0, 1]] and the partials [25, 0].
    """
    program = tl.program_id(0).to(tl.int64)
    block = blocks + program * _BLOCK_WORDS
    target = partials + program * 2
    matrix = matrices + tl.load(block) * _MATRIX_WORDS
    row = tl.load(block + 1)
    rows = tl.load(block + 2)
    column = tl.load(block + 3)
    columns = tl.load(block + 4)
    gradient = tl.load(matrix)
    memory = tl.load(matrix + 1)
    p = tl.load(matrix + 2)
    q = tl.load(matrix + 3)
    width = tl.load(matrix + 5)
    rank = tl.load(matrix + 6)
    if (gradient | memory | q | (width * (DTYPE.primitive_bitwidth // 8))) % _ACCESS_BYTES == 0:
        _reconstruct_block(gradient, memory, p, q, row, rows, column, columns, width, rank, target, DTYPE, R, True)
    else:
        _reconstruct_block(gradient, memory, p, q, row, rows, column, columns, width, rank, target, DTYPE, R, False)
