"""PowerSGD's Triton kernels in detail: roundings, alignment, tables. What they compute: test_low_rank.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fastddp import _C
from interpreting import interpreter  # noqa: F401  a fixture of this module
from low_rank_interpreted import Interpreted, basis, low_rank, table, tables
from test_low_rank import Matrix


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
                matrices = [Matrix(2, columns, 1, torch.bfloat16, shift).parts]
                blocks = len(table(tables(matrices)["project"], low_rank.BLOCK_WORDS))
                hints.clear()
                kernels = Interpreted()
                kernels.compress(matrices)
                kernels.project(matrices)
                kernels.reconstruct(matrices)
                aligned = columns % 8 == 0 and shift % 8 == 0
                # Gradient, memory and Q twice; project reads one of them.
                assert hints == [True] * ((3 + blocks + 3) if aligned else 0)


@pytest.mark.parametrize("shape", [(50257, 768, 4), (768, 3072, 4), (35, 2500, 2), (1, 1, 1), (64, 147, 32)])
def test_programs_cover_every_element_once_and_large_matrices_fill_a_large_gpu(shape: tuple[int, int, int]) -> None:
    rows, columns, rank = shape
    found = tables([(torch.empty(0), None, torch.empty(rows, rank), torch.empty(rank, columns))])
    for name in ("compress", "project", "reconstruct"):
        blocks = table(found[name], low_rank.BLOCK_WORDS)
        row, height, column, width = blocks[:, 1:5].T
        assert int((height * width).sum()) == rows * columns
        assert len(torch.unique(row * columns + column)) == len(blocks)
        assert bool((row + height <= rows).all() and (column + width <= columns).all())
    partials = table(found["project"], low_rank.BLOCK_WORDS)[:, 5]
    assert len(torch.unique(partials)) == len(partials)
    assert int(table(found["sums"], low_rank.SUM_WORDS)[0, 3]) * rank * columns == found["partials"][0]
    if rows * columns > 2**20:
        assert len(partials) >= 2 * 132
        assert found["partials"][0] <= rows * columns / 15  # partial sums weigh little beside the matrix


@pytest.mark.parametrize("rank", [1, 4, 32])
@pytest.mark.parametrize("length", [1, 63, 65, 768, 50257])
def test_blocks_cover_each_vector_once(length: int, rank: int) -> None:
    words = _C.basis_tables([torch.empty(length, rank), torch.empty(5, 1)], basis.lines(rank))
    blocks = table(words["blocks"], basis.BLOCK_WORDS)
    (_, first, count), (_, second_first, second_count) = table(words["bases"], basis.BASIS_WORDS)[:, 5:].tolist()
    assert (first, second_first, second_count) == (0, count, 1)
    assert count <= 128
    own = blocks[:count]
    assert torch.equal(own[:, 1], torch.cat([torch.zeros(1, dtype=torch.int64), own[:, 2].cumsum(0)[:-1]]))
    assert int(own[:, 2].sum()) == length
