"""PowerSGD's kernels on the CPU, and those made of torch's operators, against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from fastddp.kernels import low_rank_reference as reference
from torch import Tensor

from fastddp import _C
from interpreting import interpreter  # noqa: F401  a fixture of this module
from low_rank_interpreted import Interpreted

Kernels = _C.LowRankKernels | Interpreted
ON_CPU, OF_OPERATORS, TRITON = _C.LowRankKernels(torch.device("cpu")), _C.LowRankKernels.of_operators(), Interpreted()
KINDS = pytest.mark.parametrize("kernels", [ON_CPU, OF_OPERATORS, TRITON], ids=["cpu", "operators", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
SHAPES = [(1, 1), (1, 40), (40, 1), (3, 15), (7, 33), (64, 147), (130, 16), (9, 5000), (0, 8), (8, 0)]
LARGE = [(64, 147), (9, 5000)]  # for Triton's interpreter
SLOW = pytest.mark.tier("nightly")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def compute(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Matrix:
    """A gradient with its memory and factors, filled at random."""

    def __init__(self, rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(rows * 1009 + columns * 31 + rank)
        self.gradient = torch.randn(rows, columns, generator=generator).to(dtype)
        self.memory = torch.randn(rows, columns, generator=generator).to(dtype)
        self.p = torch.randn(rows, rank, generator=generator).to(compute(dtype))
        self.q = torch.randn(rank, columns, generator=generator).to(compute(dtype))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gradient, self.memory, self.p, self.q


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Within what sums of this length make of roundings."""
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    return torch.allclose(actual.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype] * max(largest, 1e-6))


def check(kernels: Kernels, matrix: Matrix, dtype: torch.dtype, gradient: bool, memory: bool) -> None:
    """One window of it."""
    if kernels is TRITON and dtype == torch.float64:
        pytest.skip("on a GPU, fp64 gradients go to torch's operators")
    given = matrix.gradient.clone() if gradient else None
    kept = matrix.memory.clone() if memory else None
    expected_matrix, expected_p = reference.compress(given, kept, matrix.q, 0.5)
    handed = (given, kept, matrix.p, matrix.q)
    kernels.compress([handed], 0.5)
    actual_matrix = given if kept is None else kept
    assert actual_matrix is not None
    assert torch.equal(actual_matrix, expected_matrix) or close(actual_matrix, expected_matrix, dtype)
    precise = compute(dtype)
    assert close(matrix.p, expected_p, precise)
    expected_q = reference.project(actual_matrix, matrix.p, 0.25)
    kernels.project([handed], 0.25)
    assert close(matrix.q, expected_q, precise)
    matrix.q /= matrix.q.abs().max().clamp(min=1) if matrix.q.numel() else 1
    matrix.p /= matrix.p.abs().max().clamp(min=1) if matrix.p.numel() else 1
    target = torch.empty_like(matrix.gradient) if given is None else given
    expected, left, squares, bad = reference.reconstruct(actual_matrix.clone(), matrix.p, matrix.q)
    norm = kernels.reconstruct([(target, kept, matrix.p, matrix.q)])
    assert close(target, expected, dtype)
    if kept is not None:
        assert close(kept, left, dtype)
    assert norm.tolist() == [pytest.approx(squares, rel=10 * TOLERANCE[dtype]), bad]


@pytest.mark.tier("slow", but_one_in=5)
@KINDS
@DTYPES
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=SLOW if shape in LARGE else ()) for shape in SHAPES],
    ids=str,
)
def test_a_window_is_that_of_the_reference(kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for rank in (1, 2, 3, 4, 7, 8, 16, 32):
        if rank <= max(1, min(shape)):
            check(kernels, Matrix(*shape, rank, dtype), dtype, gradient=True, memory=True)


@KINDS
@DTYPES
def test_without_a_gradient_or_without_memory_too(kernels: Kernels, dtype: torch.dtype) -> None:
    check(kernels, Matrix(21, 50, 5, dtype), dtype, gradient=False, memory=True)
    check(kernels, Matrix(21, 50, 5, dtype), dtype, gradient=True, memory=False)


def test_several_matrices_and_threads_give_the_same_bits() -> None:
    kernels = _C.LowRankKernels(torch.device("cpu"))
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            matrices = [Matrix(rows, 600, 3, torch.float32) for rows in (1, 400, 37)]
            kernels.compress([matrix.parts for matrix in matrices])
            kernels.project([matrix.parts for matrix in matrices])
            norm = kernels.reconstruct([matrix.parts for matrix in matrices])
            tensors = [tensor.flatten() for matrix in matrices for tensor in matrix.parts]
            results.append(torch.cat([*tensors, norm]))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.tier("slow", but_one_in=3)
@KINDS
def test_large_gradients_are_written_past_the_caches_and_addresses_may_be_odd(kernels: Kernels) -> None:
    for offset in (0, 1):
        matrix = Matrix(500, 640, 4, torch.float32)
        memory = torch.empty(500 * 640 + 1)
        matrix.gradient = memory[offset:][: 500 * 640].view(500, 640).normal_()
        check(kernels, matrix, torch.float32, gradient=True, memory=True)


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


@KINDS
def test_the_documented_numbers(kernels: Kernels) -> None:
    gradient, memory = torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1.0, 0], [0, 0]])
    p, q = torch.empty(2, 1), torch.ones(1, 2)
    kernels.compress([(gradient, memory, p, q)])
    assert memory.tolist() == [[2, 2], [3, 4]]
    assert p.tolist() == [[4], [7]]
    p.copy_(torch.tensor([[1.0], [2]]))
    kernels.project([(gradient, memory, p, q)])
    assert q.tolist() == [[8, 10]]
    q.fill_(2)
    norm = kernels.reconstruct([(gradient, memory, p, q)])
    assert gradient.tolist() == [[2, 2], [4, 4]]
    assert memory.tolist() == [[0, 0], [-1, 0]]
    assert norm.tolist() == [pytest.approx(40), 0]
    vectors = torch.tensor([[3.0, 6, 0], [4, 8, 2]])
    kernels.orthogonalise([vectors])
    assert torch.allclose(vectors, torch.tensor([[0.6, 0, -0.8], [0.8, 0, 0.6]]))


# -------------------------------------------------------------------------------------------- orthogonalisation


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
@pytest.mark.parametrize("rank", [1, 2, 4, *(pytest.param(rank, marks=SLOW) for rank in [8, 16, 32])])
@pytest.mark.parametrize("length", [32, 1000, pytest.param(50257, marks=SLOW)])
def test_vectors_become_orthonormal(kernels: Kernels, length: int, rank: int) -> None:
    if kernels is TRITON and length * rank > 250_000:
        length = 2000  # more takes minutes
    quick = length == 50257 or kernels is TRITON  # the interpreter takes seconds
    for condition in (1e6,) if quick else (1.0, 1e3, 1e6):
        for scale in (1e-15,) if quick else (1.0, 1e-15, 1e12):
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


@KINDS
def test_below_epsilon_a_vector_counts_as_zero(kernels: Kernels) -> None:
    small = torch.full((10, 1), 1e-6)
    kernels.orthogonalise([small], 1e-3)
    assert torch.equal(small, torch.zeros(10, 1))
