"""Digests of bits: every bit counts, places count, and every device has the same ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import fake_cuda
from fastddp import _C
from on_ranks import on_ranks

CPU = torch.device("cpu")
LARGE = 2**20  # words that have factors of their own


def digest(tensor: Tensor, begin: int = 0, end: int | None = None) -> int:
    end = tensor.numel() if end is None else end
    return int(_C.Digests().of([(tensor, begin, end)], CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.zeros(13, dtype=dtype)
    raw = tensor.view(torch.uint8)
    seen = {digest(tensor)}
    for byte, bit in itertools.product(range(len(raw)), range(8)):
        raw[byte] ^= 1 << bit
        seen.add(digest(tensor))
        raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(raw)


def test_every_bit_of_a_large_tensor_counts() -> None:
    tensor = torch.arange(LARGE + 10_001, dtype=torch.float32)
    before = digest(tensor)
    for place, bit in itertools.product([0, 4095, 4096, LARGE - 1, LARGE, LARGE + 5000], [0, 22, 23, 31]):
        flipped = tensor.view(torch.int32)[place : place + 1]
        flipped ^= torch.tensor(1 << bit).to(torch.int32)
        assert digest(tensor) != before, (place, bit)
        flipped ^= torch.tensor(1 << bit).to(torch.int32)


def test_places_signs_and_lengths_count() -> None:
    """Changes that would cancel in a plain sum."""
    tensor = torch.arange(1.0, 10_001.0)
    swapped, negative = tensor.clone(), tensor.clone()
    swapped[[3, 5000]] = swapped[[5000, 3]]
    negative[:2].neg_()  # an even number of signs
    zeros = [torch.zeros(count) for count in (1, 2, 3, 4096, 8192)]
    digests = {digest(one) for one in [tensor, swapped, negative, -tensor, tensor.flip(0), *zeros]}
    assert len({*digests, int(_C.Digests().of([(None, 0, 1)], CPU))}) == 11


def test_a_slice_is_what_it_would_be_alone() -> None:
    tensor = torch.randn(7, 11)
    assert digest(tensor, 5, 30) == digest(tensor.flatten()[5:30].clone())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 1).expand(4, 3),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(10)[::2],
    ],
    ids=["transposed", "channels_last", "expanded", "conjugated", "strided"],
)
def test_elements_count_in_logical_order(tensor: Tensor) -> None:
    assert digest(tensor) == digest(tensor.resolve_conj().contiguous())


@on_ranks(1, pool="simulated_ranks")
def test_a_device_has_the_digests_of_the_cpu(rank: int) -> None:
    device = torch.device(fake_cuda.DEVICE)
    digests = _C.Digests()
    for batch in [
        [torch.randn(5), torch.randn(4096), torch.randn(3, dtype=torch.bfloat16), torch.ones((), dtype=torch.int64)],
        [torch.randn(LARGE - 100), torch.randn(200), torch.randn(2 * LARGE + 10_007), torch.randn(9, 9).t()],
        [torch.arange(11, dtype=torch.uint8), torch.arange(11, dtype=torch.uint8)[1:]],
    ]:
        there: list[tuple[Tensor | None, int, int]] = [(tensor.to(device), 0, tensor.numel()) for tensor in batch]
        there[1:1] = [(None, 0, 4), (torch.ones(3), 0, 3)]  # nothing, and what is on the CPU
        expected = [digest(batch[0]), int(_C.Digests().of([(None, 0, 4)], CPU)), digest(torch.ones(3))]
        expected += [digest(tensor) for tensor in batch[1:]]
        assert digests.of(there, device).cpu().tolist() == expected
