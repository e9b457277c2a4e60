"""PowerSGD's kernels (of the CPU, of torch's operators, Triton's in its interpreter) against plain torch in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fastddp.kernels import low_rank_reference as reference
from torch import Tensor

from block8_given import around_is_untouched, guarded
from fastddp import _C
from interpreting import BITS, alignment_hints, interpreter  # noqa: F401  a fixture of this module
from low_rank_interpreted import Interpreted

Kernels = _C.LowRankKernels | Interpreted
ON_CPU, OF_OPERATORS, TRITON = _C.LowRankKernels(torch.device("cpu")), _C.LowRankKernels.of_operators(), Interpreted()
ALL = {"cpu": ON_CPU, "operators": OF_OPERATORS, "triton": TRITON}
KINDS = pytest.mark.parametrize("kernels", ALL.values(), ids=list(ALL))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
NIGHTLY = pytest.mark.tier("nightly")
SHAPES = [(1, 1), (1, 40), (40, 1), (3, 15), (7, 33), (130, 16), (0, 8), (8, 0)]
LARGE = [(64, 147), (9, 5000)]  # for Triton's interpreter
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of norms


def compute(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Matrix:
    """A gradient with its memory and factors, filled at random, and memory around them that nobody may touch.

    Each begins ``shift`` elements after a multiple of 64 bytes.
    """

    def __init__(self, rows: int, columns: int, rank: int, dtype: torch.dtype, shift: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(rows * 1009 + columns * 31 + rank)
        self._guarded_parts: list[tuple[Tensor, Tensor]] = []
        self.gradient, self.memory = (self._guarded(rows, columns, dtype, shift) for _ in range(2))
        self.p = self._guarded(rows, rank, compute(dtype), shift)
        self.q = self._guarded(rank, columns, compute(dtype), shift)

    def _guarded(self, rows: int, columns: int, dtype: torch.dtype, shift: int) -> Tensor:
        self._guarded_parts.append(guarded(torch.randn(rows * columns, generator=self._generator).to(dtype), shift))
        return self._guarded_parts[-1][1].view(rows, columns)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gradient, self.memory, self.p, self.q

    def is_alone(self) -> bool:
        return all(around_is_untouched(*pair) for pair in self._guarded_parts)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(BITS[left.element_size()]), right.view(BITS[right.element_size()]))


def assert_product(got: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Within a few roundings of each term, and one of what it is stored as."""
    terms = abs(scale) * (left.abs().double() @ right.abs().double())
    want = scale * (left.double() @ right.double())
    rounding, of_result = torch.finfo(compute(got.dtype)).eps, torch.finfo(got.dtype)
    assert bool(
        ((got.double() - want).abs() <= 4 * rounding * terms + of_result.eps * want.abs() + of_result.tiny).all()
    )


def check(
    kernels: Kernels,
    shapes: list[tuple[int, int, int]],
    dtype: torch.dtype,
    shift: int = 0,
    gradient: bool = True,
    memory: bool = True,
) -> None:
    """A window of matrices with these rows, columns and ranks: each step writes what it should, and nothing else."""
    if kernels is TRITON and dtype == torch.float64:
        pytest.skip("on a GPU, fp64 gradients go to torch's operators")
    matrices = [Matrix(*shape, dtype, shift) for shape in shapes]
    given = [(m.gradient if gradient else None, m.memory if memory else None, m.p, m.q) for m in matrices]
    wholes = [m.memory if memory else m.gradient for m in matrices]

    for in_place in (False, True):
        before = [tuple(part.clone() for part in m.parts) for m in matrices]
        errors = [m.memory.flip(0) if memory and not in_place else None for m in matrices]
        kernels.compress(given, 0.5, () if in_place else errors)
        for m, whole, error, (old_gradient, old_memory, _, old_q) in zip(matrices, wholes, errors, before, strict=True):
            assert same_bits(m.gradient, old_gradient)
            assert same_bits(m.q, old_q)
            if memory:
                earlier = (old_memory if error is None else error).to(compute(dtype))
                assert same_bits(whole, (earlier + old_gradient.to(compute(dtype)) if gradient else earlier).to(dtype))
                assert error is None or same_bits(error, old_memory.flip(0))
            assert_product(m.p, whole, m.q.T, 0.5)

    before = [tuple(part.clone() for part in m.parts) for m in matrices]
    kernels.project(given, 0.25)
    for m, whole, old in zip(matrices, wholes, before, strict=True):
        assert all(same_bits(*pair) for pair in zip(m.parts[:3], old[:3], strict=True))
        assert_product(m.q, m.p.T, whole, 0.25)

    for factor in (factor for m in matrices for factor in (m.p, m.q) if factor.numel()):
        factor /= factor.abs().max().clamp(min=1)
    before = [tuple(part.clone() for part in m.parts) for m in matrices]
    norm = kernels.reconstruct([(m.gradient, m.memory if memory else None, m.p, m.q) for m in matrices])
    for m, old in zip(matrices, before, strict=True):
        assert all(same_bits(*pair) for pair in zip(m.parts[2:], old[2:], strict=True))
        assert_product(m.gradient, m.p, m.q)
        if memory:
            assert same_bits(m.memory, (old[1].to(compute(dtype)) - m.gradient.to(compute(dtype))).to(dtype))
    squares = sum(float(m.gradient.double().square().sum()) for m in matrices)
    assert norm.tolist() == [pytest.approx(squares, rel=10 * TOLERANCE[dtype]), 0]
    assert all(m.is_alone() for m in matrices)


RANKS = (1, 3, 4, 7, 16, 32)
WINDOWS: list[Any] = [  # shapes of matrices with their ranks, and where they begin
    *([(*shape, rank) for rank in RANKS if rank <= max(1, min(shape))] for shape in SHAPES),
    *(pytest.param([(*shape, rank) for rank in RANKS if rank <= min(shape)], marks=NIGHTLY) for shape in LARGE),
    *([(rows, columns, 2)] for rows in (15, 17, 63, 65) for columns in (4, 127, 129, 1032)),
]


@pytest.mark.tier("slow", but_one_in=13)
@KINDS
@DTYPES
@pytest.mark.parametrize("shapes", WINDOWS, ids=str)
def test_a_window_is_that_of_the_reference(
    kernels: Kernels, dtype: torch.dtype, shapes: list[tuple[int, int, int]]
) -> None:
    for shape in shapes:
        check(kernels, [shape], dtype)


@pytest.mark.tier("slow", but_one_in=5)
@KINDS
@DTYPES
def test_so_is_one_of_many_matrices_or_without_a_gradient_or_without_memory_or_anywhere(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    check(kernels, [(1, 1, 1), (5, 1, 1), (1, 37, 1), (33, 136, 3), (17, 130, 4), (70, 24, 2), (200, 8, 3)], dtype)
    check(kernels, [(21, 50, 5)], dtype, gradient=False)
    check(kernels, [(21, 50, 5)], dtype, memory=False)
    for shift in (1, 4):
        check(kernels, [(17, 136, 2)], dtype, shift)


@pytest.mark.tier("slow", but_one_in=3)
@KINDS
@pytest.mark.parametrize("shift", [0, 1])
def test_large_gradients_are_written_past_the_caches(kernels: Kernels, shift: int) -> None:
    check(kernels, [(500, 640, 4)], torch.float32, shift)


@DTYPES
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 9])
def test_what_all_ranks_compute_has_the_same_bits_on_every_processor(dtype: torch.dtype, rank: int) -> None:
    """From equal P and Q. A rank's vectors may be another one's."""
    shapes = [(9, 9), (17, 136), (30, 1027)]

    def found(kernels: _C.LowRankKernels) -> list[Tensor]:
        matrices = [Matrix(*shape, rank, dtype) for shape in shapes]
        kernels.orthogonalise([m.p for m in matrices])
        kernels.orthogonalise([m.q.T for m in matrices], refill=3)
        kernels.reconstruct([m.parts for m in matrices])
        return [part for m in matrices for part in m.parts]

    widest = found(ON_CPU)
    for bits in (0, 256):
        assert all(same_bits(*pair) for pair in zip(found(_C.LowRankKernels.of_vectors(bits)), widest, strict=True))


def test_several_matrices_and_threads_give_the_same_bits() -> None:
    def window(threads: int) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(threads)
        given = [Matrix(rows, 600, 3, torch.float32).parts for rows in (1, 400, 37)]
        ON_CPU.compress(given)
        ON_CPU.project(given)
        norm = ON_CPU.reconstruct(given)
        return norm, torch.cat([tensor.flatten() for parts in given for tensor in parts])

    before = torch.get_num_threads()
    try:
        (norm, bits), (other_norm, other_bits) = window(1), window(2)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits, other_bits)
    torch.testing.assert_close(norm, other_norm, rtol=1e-14, atol=0)  # the last bit of fp64 depends on addresses


@KINDS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_finite_is_counted_and_not_remembered(kernels: Kernels, bad: float, dtype: torch.dtype) -> None:
    matrix = Matrix(5, 37, 1, dtype)
    matrix.p[2] = bad
    norm = kernels.reconstruct([matrix.parts])
    assert norm[1] == 37
    assert not matrix.gradient[2].isfinite().any()
    assert torch.equal(matrix.memory[2], torch.zeros(37, dtype=dtype))
    assert matrix.memory.isfinite().all()


def conditioned(length: int, rank: int, condition: float) -> Tensor:
    """Random vectors whose singular values fall from 1 to 1/condition."""
    generator = torch.Generator().manual_seed(length + rank)
    left = torch.linalg.qr(torch.randn(length, rank, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).Q
    return (left * torch.logspace(0, -torch.log10(torch.tensor(condition)), rank)) @ right.T


def orthogonality(vectors: Tensor) -> float:
    """The largest element of VᵀV - I."""
    gram = vectors.double().T @ vectors.double()
    return float((gram - torch.eye(len(gram))).abs().max())


@KINDS
@pytest.mark.parametrize("rank", [1, 2, 4, *(pytest.param(rank, marks=NIGHTLY) for rank in [8, 16, 32])])
@pytest.mark.parametrize("length", [32, 65, 1000, pytest.param(50257, marks=NIGHTLY)])
def test_vectors_become_orthonormal(kernels: Kernels, length: int, rank: int) -> None:
    if kernels is TRITON and length * rank > 250_000:
        length = 2000  # more takes minutes
    is_slow = length == 50257 or kernels is TRITON
    ways = [(1e6, 1e-15)] if is_slow else itertools.product((1.0, 1e3, 1e6), (1.0, 1e-15, 1e12))
    for condition, scale in ways:
        vectors = (scale * conditioned(length, rank, condition)).float()
        kernels.orthogonalise([vectors])
        assert orthogonality(vectors) < 1e-5


@KINDS
@pytest.mark.parametrize("transposed", [False, True])
def test_the_span_is_kept_and_the_basis_that_of_gram_schmidt(kernels: Kernels, transposed: bool) -> None:
    vectors = torch.randn(200, 6)
    given = vectors.T.contiguous().T if transposed else vectors.clone()
    kernels.orthogonalise([given])
    assert torch.allclose(given.double(), reference.orthogonalise(vectors), atol=1e-6)


@pytest.mark.tier("slow", but_one_in=3)
@KINDS
def test_zero_and_dependent_vectors_are_zeroed_or_replaced(kernels: Kernels) -> None:
    vectors = torch.randn(300, 6)
    vectors[:, 1] = 0
    vectors[:, 3] = 2 * vectors[:, 0]
    vectors[:, 5] = vectors[:, 2] - vectors[:, 4]
    zeroed, refilled, again, second, other = (vectors.clone() for _ in range(5))
    kernels.orthogonalise([zeroed])
    kernels.orthogonalise([refilled, second], refill=7)
    kernels.orthogonalise([again], refill=7)
    kernels.orthogonalise([other], refill=8)
    assert torch.equal(zeroed[:, [1, 3, 5]], torch.zeros(300, 3))
    assert orthogonality(zeroed[:, [0, 2, 4]]) < 1e-5
    assert orthogonality(refilled) < 1e-5
    assert torch.equal(refilled, again)
    assert not torch.allclose(refilled, other)
    assert not torch.allclose(refilled, second)


@KINDS
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_basis_of_nothing_starts_anew_where_asked(kernels: Kernels, value: float) -> None:
    vectors, kept = torch.full((40, 4), value), torch.full((40, 4), value)
    kernels.orthogonalise([vectors], refill=1)
    kernels.orthogonalise([kept])
    assert orthogonality(vectors) < 1e-5
    assert torch.equal(kept, torch.zeros(40, 4)) if value == 0 else not kept.isfinite().any()


def test_the_product_is_rounded_before_it_is_taken_from_the_memory() -> None:
    # Fused, M - p q would be 2^-24: what the product loses when it is rounded to fp32.
    p = torch.tensor([[1 + 2.0**-12]])
    memory = p * p
    assert memory.double() != p.double() * p.double()
    TRITON.reconstruct([(torch.zeros(1, 1), memory, p, p.clone())])
    assert memory.item() == 0


@pytest.mark.tier("nightly")
def test_alignment_hints_are_given_when_true_and_only_then() -> None:
    for shift, columns in itertools.product(range(9), (127, 128, 130, 132, 136)):
        matrices = [Matrix(2, columns, 1, torch.bfloat16, shift).parts]
        with alignment_hints() as hints:
            TRITON.compress(matrices)
            TRITON.project(matrices)
            TRITON.reconstruct(matrices)
        assert all(hints)
        assert bool(hints) == (columns % 8 == 0 and shift % 8 == 0)
