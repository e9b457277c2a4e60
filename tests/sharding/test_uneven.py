"""Ranks with different numbers of inputs: each steps its part to the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join

import fastddp
from on_ranks import on_ranks
from parts import local_input, wrapped

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "several parameters a bucket": {"bucket_cap_mb": 1},
    "weights": {"gradient_average": torch.ones(())},
    "unused parameters": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_parameters_are_those_of_a_replicated_optimizer(rank: int, options: str) -> None:
    found: list[list[Tensor]] = []
    for sharded in (True, False):
        model = wrapped(**OPTIONS[options])
        optimizer: Any = (
            fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.125, momentum=0.5)
            if sharded
            else torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        )
        with Join([model, optimizer] if sharded else [model]):
            for _ in range(2 + 2 * (1 - rank)):
                optimizer.zero_grad()  # first, so that a rank without inputs keeps its last gradients
                model(local_input(rank)).backward()
                optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert not torch.equal(found[0][0], torch.ones(3))
    assert list(map(Tensor.tolist, found[0])) == list(map(Tensor.tolist, found[1]))


@on_ranks(2)
def test_the_model_alone_cannot_be_joined(rank: int) -> None:
    """Ranks with inputs would wait for parts of those without."""
    model = wrapped()
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
    with model.join():
        model(local_input(rank)).backward()
        with pytest.raises(RuntimeError, match=r"Replace model\.join\(\) by Join\(\[model, optimizer\]\)(.|\n)*FD042"):
            optimizer.step()
