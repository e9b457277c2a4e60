"""PowerSGD's Triton kernels in detail: tiles, alignment, memory around, tables. What they compute: test_low_rank.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastddp import _C
from interpreting import BITS, interpreter  # noqa: F401  a fixture of this module
from low_rank_interpreted import Interpreted, Matrix, basis, low_rank, table, tables

GUARD = 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


class Guarded:
    """Random tensors with memory around them that nobody may touch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.made: list[tuple[Tensor, Tensor, int]] = []

    def __call__(self, rows: int, columns: int, dtype: torch.dtype, shift: int) -> Tensor:
        begin = GUARD + shift
        buffer = torch.randn(rows * columns + begin + GUARD, generator=self.generator).to(dtype)
        assert buffer.data_ptr() % 64 == 0
        self.made.append((buffer, buffer.clone(), begin))
        return buffer[begin : begin + rows * columns].view(rows, columns)

    def matrix(self, rows: int, columns: int, rank: int, dtype: torch.dtype, shift: int = 0) -> Matrix:
        wide = [self(rows, columns, dtype, shift) for _ in range(2)]
        return wide[0], wide[1], self(rows, rank, torch.float32, shift), self(rank, columns, torch.float32, shift)

    def untouched(self) -> bool:
        around = [
            torch.equal(part(buffer), part(before))
            for buffer, before, begin in self.made
            for part in (lambda tensor, begin=begin: tensor[:begin], lambda tensor: tensor[-GUARD:])
        ]
        return all(around)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(BITS[left.element_size()]), right.view(BITS[right.element_size()]))


def assert_product(got: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Within a few roundings of fp32 of each term, and one of what it is stored as."""
    left, right = left.double(), right.double()
    terms = abs(scale) * (left.abs() @ right.abs())
    want = scale * (left @ right)
    limit = 2.0**-21 * terms + torch.finfo(got.dtype).eps * want.abs() + torch.finfo(got.dtype).tiny
    assert bool(((got.double() - want).abs() <= limit).all())


def check(shapes: list[tuple[int, int, int]], dtype: torch.dtype, shift: int = 0) -> None:
    """Each step writes what it should, and nothing else."""
    make, kernels = Guarded(), Interpreted()
    matrices = [make.matrix(*shape, dtype, shift) for shape in shapes]
    before = [tuple(tensor.clone() for tensor in matrix) for matrix in matrices]
    kernels.compress(matrices, 0.5)
    for (gradient, memory, p, q), old in zip(matrices, before, strict=True):
        assert same_bits(gradient, old[0])
        assert same_bits(memory, (old[1].float() + old[0].float()).to(dtype))
        assert same_bits(q, old[3])
        assert_product(p, memory, q.T, 0.5)
    before = [tuple(tensor.clone() for tensor in matrix) for matrix in matrices]
    kernels.project(matrices, 2.0)
    for (gradient, memory, p, q), old in zip(matrices, before, strict=True):
        assert all(same_bits(*pair) for pair in zip((gradient, memory, p), old[:3], strict=True))
        assert_product(q, p.T, memory, 2.0)
    before = [tuple(tensor.clone() for tensor in matrix) for matrix in matrices]
    kernels.reconstruct(matrices)
    for (gradient, memory, p, q), old in zip(matrices, before, strict=True):
        assert all(same_bits(*pair) for pair in zip((p, q), old[2:], strict=True))
        assert_product(gradient, p, q)
        assert same_bits(memory, (old[1].float() - gradient.float()).to(dtype))
    assert make.untouched()


@pytest.mark.tier("slow", but_one_in=3)
@DTYPES
def test_matrices_of_many_sizes(dtype: torch.dtype) -> None:
    check([(1, 1, 1), (5, 1, 1), (1, 37, 1), (33, 136, 3), (17, 130, 4), (70, 24, 2), (200, 8, 3)], dtype)


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("rows", [15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("columns", [4, 127, 128, 129, 1032])
def test_sizes_around_the_tiles(rows: int, columns: int) -> None:
    check([(rows, columns, 2)], torch.float32)


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("shift", range(1, 8))
@DTYPES
def test_every_misalignment(shift: int, dtype: torch.dtype) -> None:
    check([(17, 136, 2)], dtype, shift)


def test_the_product_is_rounded_before_it_is_taken_from_the_memory() -> None:
    # Fused, M - p q would be 2^-24: what the product loses when it is rounded to fp32.
    p = torch.tensor([[1 + 2.0**-12]])
    memory = p * p
    assert memory.double() != p.double() * p.double()
    Interpreted().reconstruct([(torch.zeros(1, 1), memory, p, p.clone())])
    assert memory.item() == 0


@pytest.mark.tier("nightly")
def test_alignment_hints_are_given_when_true_and_only_then() -> None:
    hints: list[bool] = []

    def record(handle: Any, name: str, values: list[int]) -> None:
        assert name == "tt.divisibility"
        hints.append(bool((handle.data % values[0] == 0).all()))

    with mock.patch("triton.runtime.interpreter.TensorHandle.set_attr", record):
        for shift in range(9):
            for columns in (127, 128, 130, 132, 136):
                matrices = [Guarded().matrix(2, columns, 1, torch.bfloat16, shift)]
                blocks = len(table(tables(matrices)["project"], low_rank.BLOCK_WORDS))
                hints.clear()
                kernels = Interpreted()
                kernels.compress(matrices)
                kernels.project(matrices)
                kernels.reconstruct(matrices)
                aligned = columns % 8 == 0 and shift % 8 == 0
                # Gradient, memory and Q twice; project reads one of them.
                assert hints == [True] * ((3 + blocks + 3) if aligned else 0)


# ------------------------------------------------------------------------------------------------------ the tables


@pytest.mark.parametrize("shape", [(50257, 768, 4), (768, 3072, 4), (35, 2500, 2), (1, 1, 1), (64, 147, 32)])
def test_programs_cover_every_element_once(shape: tuple[int, int, int]) -> None:
    rows, columns, rank = shape
    matrix = (torch.empty(0), None, torch.empty(rows, rank), torch.empty(rank, columns))
    found = tables([matrix])
    for name in ("compress", "project", "reconstruct"):
        blocks = table(found[name], low_rank.BLOCK_WORDS)
        row, height, column, width = blocks[:, 1:5].T
        assert int((height * width).sum()) == rows * columns
        assert len(torch.unique(row * columns + column)) == len(blocks)
        assert bool((row + height <= rows).all() and (column + width <= columns).all())
    partials = table(found["project"], low_rank.BLOCK_WORDS)[:, 5]
    assert len(torch.unique(partials)) == len(partials)
    assert int(table(found["sums"], low_rank.SUM_WORDS)[0, 3]) * rank * columns == found["partials"][0]


def test_both_shapes_of_a_transformer_fill_a_large_gpu() -> None:
    for rows, columns in ((50257, 768), (768, 3072)):
        found = tables([(torch.empty(0), None, torch.empty(rows, 4), torch.empty(4, columns))])
        assert len(table(found["project"], low_rank.BLOCK_WORDS)) >= 2 * 132
        # The partial sums weigh little beside the matrix.
        assert found["partials"][0] <= rows * columns / 15


@pytest.mark.parametrize("rank", [1, 4, 32])
@pytest.mark.parametrize("length", [1, 63, 65, 768, 50257])
def test_blocks_cover_each_vector_once(length: int, rank: int) -> None:
    bases = [torch.empty(length, rank), torch.empty(5, 1)]
    words = _C.basis_tables(bases, basis.lines(rank))
    blocks = table(words["blocks"], basis.BLOCK_WORDS)
    (_, first, count), (_, second_first, second_count) = table(words["bases"], basis.BASIS_WORDS)[:, 5:].tolist()
    assert (first, second_first, second_count) == (0, count, 1)
    assert count <= 128
    own = blocks[:count]
    assert torch.equal(own[:, 1], torch.cat([torch.zeros(1, dtype=torch.int64), own[:, 2].cumsum(0)[:-1]]))
    assert int(own[:, 2].sum()) == length
