"""The sum of shards of 16 bits: the Triton kernel in Triton's interpreter, and the CPU's, against the reference."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from fastddp.kernels import sum_shards_reference as reference
from torch import Tensor

from block8_given import around_is_untouched, guarded
from fastddp import _C
from interpreting import interpreted_copies, interpreter  # noqa: F401  a fixture of this module

(kernels,) = interpreted_copies("sum_shards_kernels")
DTYPES = [torch.float16, torch.bfloat16]


def shards_of(ranks: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order, and on what it is added up in; zeros of both signs, infinities."""
    generator = torch.Generator().manual_seed(ranks * elements)
    shards = torch.randn(ranks, elements, generator=generator) * 10.0 ** torch.randint(-3, 3, (ranks, 1))
    shards[:, 0], shards[:, 1], shards[0, 2] = -0.0, 0.1, torch.inf
    return shards.to(dtype)


def by_kernel(shards: Tensor, target: Tensor) -> None:
    ranks, elements = shards.shape
    constants: dict[str, Any] = kernels.dtype_constants(shards.dtype)
    kernels.sum_shards_kernel[(-(-elements // kernels.ELEMENTS),)](shards, ranks, elements, target, **constants)


@pytest.mark.parametrize("add_up", [by_kernel, _C.sum_shards], ids=["kernel", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ranks", "elements", "shift"),
    [(1, 8, 0), (2, 4096 + 8, 0), (5, 2 * 4096, 0), (4, 24, 1), (3, 4096 + 5, 0), (9, 31, 3)],
    ids=str,
)
def test_every_bit_is_the_references(add_up: Any, dtype: torch.dtype, ranks: int, elements: int, shift: int) -> None:
    """Aligned or not, in whole tiles or not, and nothing beside the target is written."""
    shards = shards_of(ranks, elements, dtype)
    buffer, target = guarded(torch.zeros(elements, dtype=dtype), shift)
    add_up(shards, target)
    expected = reference.sum_shards(shards)
    assert torch.equal(target.view(torch.int16), expected.view(torch.int16))
    assert around_is_untouched(buffer, target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_may_be_written_over_a_shard(dtype: torch.dtype) -> None:
    shards = shards_of(3, 40, dtype)
    expected = reference.sum_shards(shards)
    by_kernel(shards, shards[1])
    assert torch.equal(shards[1], expected)


def test_examples() -> None:
    assert doctest.testmod(reference).attempted > 0
    assert doctest.testmod(reference).failed == 0
