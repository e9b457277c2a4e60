"""Gradients of 8 bits in training: averages within the bound of the format, and nothing lost for good."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState
from ranks import RankPool
from test_block8 import HALF
from test_power_sgd import backward, hooked, network


def summed(tensor: Tensor) -> Tensor:
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total


def largest_in_blocks(values: Tensor, block: int) -> Tensor:
    """For each element the largest magnitude in its block."""
    padded = nn.functional.pad(values.abs(), (0, -values.numel() % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: values.numel()]


@pytest.mark.tier("slow", but_one_in=11)
@pytest.mark.parametrize("number", HALF)
@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_average_is_within_the_bound_of_the_format_and_what_it_lacks_is_in_the_errors(
    ranks: RankPool, number: str, block: int, stochastic: bool, world_size: int
) -> None:
    for worst, miss in ranks.run(off_by, world_size, number, block, stochastic):
        assert 0.1 < worst <= 1.0
        assert miss < 1e-5


def off_by(rank: int, number: Any, block: int, stochastic: bool) -> tuple[float, float]:
    """The largest error of an element, as a part of what it may be; and what is lost, as a part of the largest mean."""
    fp8 = "e5m2" if number == "e5m2" else "e4m3"
    state = BlockState(fp8=fp8, block_size=block, stochastic_rounding=stochastic)
    hook = comm_hooks.int8_compress_hook if number == "int8" else comm_hooks.fp8_compress_hook
    model, count = hooked(network(), state, hook), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    part = HALF[number] * (2 if stochastic else 1)
    worst = miss = 0.0
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
            lost = (found + summed(state.errors[name]) - mean).abs().max() / mean.abs().max()
            miss = max(miss, lost.item())
        optimizer.step()
    return worst, miss


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2**15))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weights * given).sum()


def errors_of_one_rounding(rank: int, is_alike: bool, seed: int = 0) -> Tensor:
    """What one window of stochastic rounding leaves; gradients are this rank's own, or those of rank 0."""
    state = BlockState(stochastic_rounding=True, random_seed=seed)
    model = hooked(Weights(), state, comm_hooks.int8_compress_hook)
    model(torch.randn(2**15, generator=torch.Generator().manual_seed(0 if is_alike else rank))).backward()
    return state.errors["weights"].clone()


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
