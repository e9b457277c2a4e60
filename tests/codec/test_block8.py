"""Numbers of 8 bits with a scale a block: the format and its exchanges, on the CPU. More: test_block8_kernels.py."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastddp import _C, comm_hooks
from fastddp.comm_hooks import BlockState
from on_ranks import on_ranks
from ranks import RankPool
from test_power_sgd import backward, hooked, network

CPU = torch.device("cpu")
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
TORCHS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Half the distance of two neighbours below the largest number, as a part of that: what rounding to nearest takes.
HALF = {"int8": 1 / 254, "e4m3": 16 / 448, "e5m2": 4096 / 57344}
KEY = 0x0123456789ABCDEF
NUMBERS = pytest.mark.parametrize("number", LARGEST)


def empty_wire() -> Tensor:
    return torch.zeros(16 + 4 * 128, dtype=torch.uint8)


def travelled(values: Tensor, number: str, key: int | None = None) -> tuple[Tensor, Tensor]:
    """A wire of one block, and what its values are there."""
    wire, result = empty_wire(), torch.full_like(values, 7.0)
    kernels = _C.Block8Kernels(number, 128, CPU)
    kernels.encode([(values, 0)], None, wire, 1.0, key)
    kernels.decode([(result, 0)], wire)
    return wire, result


@NUMBERS
def test_bytes_are_those_of_torchs_cast_and_travel_as_they_are(number: str) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(127 * 50, generator=generator) * 30 - 22
    values = torch.exp2(exponents).clamp(max=LARGEST[number]) * torch.randn(len(exponents), generator=generator).sign()
    ties = torch.arange(-8, 8.5, 0.5) * (1.0 if number == "int8" else 2.0**-10)
    numbers = torch.arange(256, dtype=torch.uint8).view(TORCHS[number]).float()
    numbers = numbers[numbers.abs() <= LARGEST[number]]
    for block in torch.cat([values, ties, numbers]).split(127):
        block = torch.cat([block, torch.tensor([LARGEST[number]])])  # which makes the scale 1
        wire, found = travelled(block, number)
        expected = (block.round() if number == "int8" else block).to(TORCHS[number])
        assert wire[:4].view(torch.float32) == 1.0
        assert torch.equal(wire[16 : 16 + len(block)], expected.view(torch.uint8))
        assert torch.equal(found, expected.float())


@NUMBERS
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_the_average(number: str) -> None:
    block = torch.cat([torch.randn(127, generator=torch.Generator().manual_seed(2)), torch.tensor([5.0])]).double()
    rounds = torch.stack([travelled(block.float(), number, KEY + 977 * draw)[1] for draw in range(2000)]).double()
    assert ((rounds - block).abs() <= 2 * HALF[number] * 5.0 * (1 + 1e-5)).all()
    # A rounding is off by a distance at most, so its deviation is half of one at most; a mean of 2000: a 45th of that.
    deviation = HALF[number] * 5.0 / math.sqrt(2000)
    assert ((rounds.mean(0) - block).abs() <= 5 * deviation + 2.0**-16 * 5.0).all()
    nearest = travelled(block.float(), number)[1].double()
    assert (nearest - block).abs().max() > 5 * deviation  # which is what it is for


def summed(tensor: Tensor) -> Tensor:
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total


def largest_in_blocks(values: Tensor, block: int) -> Tensor:
    """For each element the largest magnitude in its block."""
    padded = nn.functional.pad(values.abs(), (0, -values.numel() % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: values.numel()]


@pytest.mark.tier("slow", but_one_in=7)
@NUMBERS
@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("stochastic", [False, True])
@on_ranks(3)
def test_an_average_is_within_the_bound_of_the_format_and_what_it_lacks_is_in_the_errors(
    rank: int, number: Any, block: int, stochastic: bool
) -> None:
    fp8 = "e5m2" if number == "e5m2" else "e4m3"
    state = BlockState(fp8=fp8, block_size=block, stochastic_rounding=stochastic)
    hook = comm_hooks.int8_compress_hook if number == "int8" else comm_hooks.fp8_compress_hook
    model, count = hooked(network(), state, hook), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    part = HALF[number] * (2 if stochastic else 1)
    worst = 0.0
    for step in range(8):
        alone = copy.deepcopy(model.module)
        backward(alone, rank, step)
        before = {name: error.double() for name, error in state.errors.items()}
        backward(model, rank, step)
        for (name, parameter), own in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            mine = own.grad.flatten().double() / count + before.get(name, 0.0)
            mean, found = summed(mine), parameter.grad.flatten().double()
            # Each rank's rounding, and that of the sum, whose block is at most as large as all of these together.
            bound = part * (2 + part) * summed(largest_in_blocks(mine, block)) * (1 + 1e-5)
            worst = max(worst, ((found - mean).abs() / bound.clamp(min=1e-30)).max().item())
            assert (found + summed(state.errors[name]) - mean).abs().max() < 1e-5 * mean.abs().max()
        optimizer.step()
    assert 0.1 < worst <= 1.0


def errors_of_one_rounding(rank: int, is_alike: bool, seed: int = 0) -> Tensor:
    """What one window of stochastic rounding leaves; gradients are this rank's own, or those of rank 0."""
    state = BlockState(stochastic_rounding=True, random_seed=seed)
    model = hooked(nn.Linear(2**15, 1, bias=False), state, comm_hooks.int8_compress_hook)
    model(torch.randn(2**15, generator=torch.Generator().manual_seed(0 if is_alike else rank))).backward()
    return state.errors["weight"].clone()


def test_ranks_draw_for_themselves_by_the_seed(ranks: RankPool) -> None:
    first, second = ranks.run(errors_of_one_rounding, 2, True)
    # Where both round up, or both down, they have the same error.
    assert 0.2 < (first != second).double().mean() < 0.9
    again, other = (ranks.run(errors_of_one_rounding, 2, True, seed)[0] for seed in (0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_two_roundings_draw_for_themselves(ranks: RankPool) -> None:
    first, _ = ranks.run(errors_of_one_rounding, 2, False)
    # Rank 0 adds up the first half. Two gradients' sum has twice the square of one, and so has its rounding: 1 + 2.
    # Had both roundings drawn the same, errors of one sign would meet: about 4.4.
    own, other = first.double().square().view(2, -1).mean(1)
    assert 2.6 < own / other < 3.4
