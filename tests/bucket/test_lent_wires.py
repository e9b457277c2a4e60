"""lazy_bucket_allocation on the CPU. What it saves is counted on the simulated device: tests/device/test_wires.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranks import RankPool
from square_layers import HOOKS, backward, wrapped


def train(rank: int, hook: str, lazy: bool) -> list[Tensor]:
    model = wrapped(hook, lazy_bucket_allocation=lazy)
    found = []
    for step in range(5):
        model.zero_grad()
        backward(model, rank, step)
        found += [model.last_grad_norm(), *(parameter.grad.clone() for parameter in model.parameters())]
    return found


@pytest.mark.parametrize("hook", ["", *HOOKS])
def test_gradients_and_their_norm_are_the_same(ranks: RankPool, hook: str) -> None:
    kept, lent = (ranks.run(train, 2, hook, lazy) for lazy in (False, True))
    for a, b in zip(kept, lent, strict=True):
        assert all(map(torch.equal, a, b))
