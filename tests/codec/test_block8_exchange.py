"""Stochastic rounding in an exchange of 8 bits. What its averages lack is in the errors: random programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState
from ranks import RankPool
from test_power_sgd import hooked


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
