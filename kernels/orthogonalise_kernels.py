"""Triton kernels of PowerSGD: they make all bases of a bucket orthonormal in three launches.

This is CholeskyQR, done twice. With V the vectors as columns and G = V^T V = L L^T, the columns of V L^-T are
orthonormal up to the rounding of G, which grows with the square of V's condition. These columns are well conditioned,
so the second time is as exact as fp32 can be. G, L and every product are fp64.

    gram              G of V, one partial sum for each block of rows
    orthonormalise    V becomes V L^-T, and its new G is written, again one partial sum for each block of rows
    reorthonormalise  the same with the new G; only V is written

A vector is *dependent* if no more of it than a limit is orthogonal to the vectors before it. The limit is 2e-7 of its
length; in orthonormalise it is at least epsilon. A dependent vector becomes zero. But where bases are refilled,
orthonormalise makes it pseudo-random instead, and reorthonormalise treats it as any vector. A vector that is not finite
counts as dependent where bases are refilled; elsewhere it spreads into the vectors after it.

Shape letters:

    n  elements of each vector
    r  vectors of a basis. R is the power of two at or above the r of all bases
    B  blocks of rows, one program each
    L  rows that are in flight, TILE / R^2

Launch signatures. Every grid is (rows of ``blocks``, 1, 1), every block (32 * num_warps, 1, 1). A driver launch appends
Triton's two scratch pointers, both null::

    gram              (bases: int64*, blocks: int64*, grams: fp64*)
    orthonormalise    (bases: int64*, blocks: int64*, grams: fp64*, next_grams: fp64*, epsilon: double,
                       refill: int64, seed: int64)
    reorthonormalise  the same

reorthonormalise gets the second Gram matrices as ``grams``, does not touch ``next_grams``, and wants epsilon = 0.
``refill`` is 1 if dependent vectors are refilled, else 0.

``bases`` has one row for each basis:

    word 0  address of element 0 of vector 0, fp32
    word 1  n
    word 2  r, 1 .. R
    word 3  elements from one element of a vector to the next
    word 4  elements from one vector to the next
    word 5  number: pseudo-random vectors depend on it, so that they differ between bases
    word 6  the basis' first row of ``blocks``; its other rows follow
    word 7  how many rows of ``blocks`` the basis has

``blocks`` has a row for each program:

    word 0  basis  which row of ``bases``
    word 1  row    its first row; row e has element e of each vector
    word 2  rows   how many, at least 1

``grams`` and ``next_grams`` are [B, R, R]: program b writes its partial sum to b, and reads those of its basis.

Refill: element e of vector i is hashed from seed and number by 64-bit arithmetic that wraps around, as on the CPU::

    z = 1000003 * seed + number + 0x9E3779B97F4A7C15 * ((2^40 + 435) * i + e + 1)
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    value = ((z ^ z >> 31) >> 11) * 2^-52 - 1
"""

import triton
import triton.language as tl

TILE = 4096
"""Products in flight: a tile of the sums has lines(R) rows of R x R products."""

BASIS_WORDS = 8
BLOCK_WORDS = 3
LARGEST_RANK = 32
DEPENDENT = 2e-7

_BASIS_WORDS = tl.constexpr(BASIS_WORDS)
_BLOCK_WORDS = tl.constexpr(BLOCK_WORDS)
_TILE = tl.constexpr(TILE)
_DEPENDENT = tl.constexpr(DEPENDENT)


def lines(padded_rank: int) -> int:
    """Rows that one program has in flight."""
    return TILE // padded_rank**2


def _name(specialization) -> str:
    form = {None: "gram", False: "orthonormalise", True: "reorthonormalise"}[specialization.constants.get("LAST")]
    return f"fastddp_{form}_r{specialization.constants['R']}"


@triton.jit
def _block(bases, blocks):
    """Return this program's number, its row of ``blocks``, and its basis."""
    program = tl.program_id(0).to(tl.int64)
    block = blocks + program * _BLOCK_WORDS
    return program, block, bases + tl.load(block) * _BASIS_WORDS


@triton.jit
def _place(basis, R: tl.constexpr):
    """Return pointers to row 0 of a basis' vectors, [1, R], the distance of rows, and which of the R vectors exist."""
    vector = tl.arange(0, R)[None, :]
    pointers = tl.load(basis).to(tl.pointer_type(tl.float32)) + vector * tl.load(basis + 4)
    return pointers, tl.load(basis + 3), vector < tl.load(basis + 2)


@triton.jit
def _add_products(sums, values):
    """Add the products of all pairs of vectors, [L, R, R], row by row."""
    left, right = tl.broadcast(values[:, :, None], values[:, None, :])
    return tl.fma(left, right, sums)


@triton.jit
def _gram_offsets(R: tl.constexpr):
    return tl.arange(0, R)[:, None] * R + tl.arange(0, R)[None, :]


@triton.jit(repr=_name, do_not_specialize=["bases", "blocks", "grams"])
def gram_kernel(bases, blocks, grams, R: tl.constexpr):
    """Multiply the rows of one block with themselves.

    Example: the vectors (3, 4) and (1, 2) in one block give [[25, 11], [11, 5]].
    """
    LINES: tl.constexpr = _TILE // (R * R)
    program, block, basis = _block(bases, blocks)
    row, rows = tl.load(block + 1), tl.load(block + 2)
    place, stride, exists = _place(basis, R)
    line = tl.arange(0, LINES)[:, None]
    sums = tl.zeros((LINES, R, R), tl.float64)
    for step in range(0, rows, LINES):
        live = (step + line < rows) & exists
        values = tl.load(place + (row + step + line) * stride, mask=live, other=0.0).to(tl.float64)
        sums = _add_products(sums, values)
    tl.store(grams + program * R * R + _gram_offsets(R), tl.sum(sums, axis=0))


@triton.jit
def _sum_of_grams(grams, first, count, R: tl.constexpr):
    LINES: tl.constexpr = _TILE // (R * R)
    index = tl.arange(0, LINES)
    sums = tl.zeros((LINES, R, R), tl.float64)
    for step in range(0, count, LINES):
        offsets = (first + step + index)[:, None, None] * (R * R) + _gram_offsets(R)[None, :, :]
        sums += tl.load(grams + offsets, mask=(step + index < count)[:, None, None], other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _inverse_factor(gram, epsilon, refill, R: tl.constexpr):
    """Return L^-T for gram = L L^T, with zero columns for dependent vectors; and which are dependent, int32 [1, R].

    One after another, the columns of the identity are made orthogonal to those before, in the inner product of
    ``gram``. ``rest`` is what is left of ``gram`` after that.
    """
    i = tl.arange(0, R)[:, None]
    j = tl.arange(0, R)[None, :]
    rest = gram
    factor = (i == j).to(tl.float64)
    dependent = tl.zeros((1, R), tl.int32)
    for pivot in range(R):
        at_pivot = (i == pivot) & (j == pivot)
        norm = tl.sum(tl.sum(tl.where(at_pivot, gram, 0.0), axis=1), axis=0)
        left = tl.sum(tl.sum(tl.where(at_pivot, rest, 0.0), axis=1), axis=0)
        limit = tl.maximum(tl.sqrt(norm) * _DEPENDENT, epsilon)
        drop = tl.where(tl.abs(left) < float("inf"), left <= limit * limit, refill != 0)
        row = tl.sum(tl.where(i == pivot, rest, 0.0), axis=0)[None, :]
        column = tl.sum(tl.where(j == pivot, rest, 0.0), axis=1)[:, None]
        own = tl.sum(tl.where(j == pivot, factor, 0.0), axis=1)[:, None]
        # A dropped vector may not be finite, so its column is not subtracted at all, not even times zero.
        after = (j > pivot) & (drop == 0)
        rest = tl.where(after, rest - column * (row / left), rest)
        factor = tl.where(after, factor - own * (row / left), factor)
        factor = tl.where(j == pivot, tl.where(drop, 0.0, factor / tl.sqrt(left)), factor)
        dependent = tl.where((j == pivot) & drop, 1, dependent)
    return factor, dependent


@triton.jit
def _pseudo_random(seed, vector, element):
    index = (vector.to(tl.int64) * 0x100000001B3 + element + 1).to(tl.uint64)
    z = seed.to(tl.uint64) + index * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) >> 11
    return z.to(tl.int64).to(tl.float64) * (2.0**-52) - 1.0


@triton.jit(repr=_name, do_not_specialize=["bases", "blocks", "grams", "next_grams", "refill", "seed"])
def orthonormalise_kernel(
    bases,
    blocks,
    grams,
    next_grams,
    epsilon: tl.float64,
    refill: tl.int64,
    seed: tl.int64,
    R: tl.constexpr,
    LAST: tl.constexpr,
):
    """Multiply the rows of a block with L^-T. Unless LAST, refill dependent vectors, and write the new Gram matrix.

    Example: the vectors (3, 4) and (1, 2), whose Gram matrix is [[25, 11], [11, 5]], become (0.6, 0.8) and (-0.8, 0.6).
    """
    LINES: tl.constexpr = _TILE // (R * R)
    program, block, basis = _block(bases, blocks)
    if not LAST:
        row, rows = tl.load(block + 1), tl.load(block + 2)
    own_seed = seed * 1000003 + tl.load(basis + 5)
    gram = _sum_of_grams(grams, tl.load(basis + 6), tl.load(basis + 7), R)
    factor, dependent = _inverse_factor(gram, epsilon, refill, R)
    # Read here, they take no registers of the factorisation. Without LAST the compiler spills if they are.
    if LAST:
        row, rows = tl.load(block + 1), tl.load(block + 2)
    place, stride, exists = _place(basis, R)
    line = tl.arange(0, LINES)[:, None]
    sums = tl.zeros((LINES, R, R), tl.float64)
    for step in range(0, rows, LINES):
        live = (step + line < rows) & exists
        pointers = place + (row + step + line) * stride
        values = tl.load(pointers, mask=live, other=0.0).to(tl.float64)
        # A dropped vector may not be finite, and its rows of the factor are zero.
        kept = tl.where(dependent != 0, 0.0, values)
        left, right = tl.broadcast(kept[:, :, None], factor[None, :, :])
        products = tl.sum(left * right, axis=1)
        products = tl.where(dependent != 0, 0.0, products)
        if not LAST:
            fresh = _pseudo_random(own_seed, tl.arange(0, R)[None, :], row + step + line)
            products = tl.where(live & (dependent != 0) & (refill != 0), fresh, products)
        rounded = products.to(tl.float32)
        tl.store(pointers, rounded, mask=live)
        if not LAST:
            sums = _add_products(sums, rounded.to(tl.float64))
    if not LAST:
        tl.store(next_grams + program * R * R + _gram_offsets(R), tl.sum(sums, axis=0))
