"""Parameters that are read while they are on their way (``gather="forward"``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastddp
from on_ranks import differences, on_ranks


class Two(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(8, 300), nn.Linear(300, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Holding(Two):
    """It holds a parameter of another module in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"weights": [[self.first.weight]]}

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ self.held["weights"][0][0].T).tanh() + self.first.bias)


class Recurrent(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(8, 300)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[0])


class Unpacking(Two):
    """It takes parameters out of the dictionary that has them."""

    def forward(self, x: Tensor) -> Tensor:
        first = {**self.first._parameters}
        return self.last((x @ first["weight"].T).tanh() + dict(self.first._parameters)["bias"])


def traced() -> nn.Module:
    module = Two()
    module.first = torch.jit.trace(module.first, torch.ones(3, 8))
    return module


def scripted() -> nn.Module:
    module = Two()
    module.first = torch.jit.script(module.first)
    return module


def compiled() -> nn.Module:
    module = Two()
    module.first.compile(backend="eager")
    return module


def trained(module: nn.Module, gather: Any, rank: int) -> list[Tensor]:
    """Rank 1 is late at each step, so rank 0 is in its next forward before parameters are here."""
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0)
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, gather=gather)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model(torch.randn(3, 8, generator=generator)).square().mean().backward()
        if rank == 1 and gather == "forward":
            time.sleep(0.05)
        optimizer.step()
        optimizer.zero_grad()
    found = [model.module(torch.ones(3, 8)).detach()]
    model.parameters_ready()
    assert all(type(part._parameters) is dict for part in (model.module, model.module.last))
    return found + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("make", [traced, Two, Recurrent, Holding, Unpacking, compiled, scripted])
@on_ranks(2)
def test_whoever_reads_them_waits(rank: int, make: Callable[[], nn.Module]) -> None:
    assert differences(trained(make(), "step", rank), trained(make(), "forward", rank)) == []


@pytest.mark.parametrize("change", ["replaced", "added"])
@pytest.mark.parametrize("arrived", [False, True])
@on_ranks(2)
def test_parameters_that_change_after_wrapping_are_noticed(rank: int, arrived: bool, change: str) -> None:
    model = fastddp.DistributedDataParallel(Two(), bucket_cap_mb=0)
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, gather="forward")
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    if arrived:
        model.parameters_ready()
    setattr(model.module.last, "bias" if change == "replaced" else "more", nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match=rf"last\.{'bias' if change == 'replaced' else 'more'}(.|\n)*FD012"):
        model(torch.ones(3, 8))


@on_ranks(2)
def test_optimizers_of_two_models_may_step_in_another_order_on_each_rank(rank: int) -> None:
    """The models have the same sizes, and messages of one would fit the other."""
    found = []
    for turned in (False, True):
        models = [fastddp.DistributedDataParallel(Two(seed), bucket_cap_mb=0) for seed in (1, 2)]
        steps = [fastddp.ShardedOptimizer(one, torch.optim.SGD, lr=0.1, gather="forward") for one in models]
        for _ in range(3):
            for model in models:
                model.zero_grad()
                model(torch.ones(3, 8)).square().mean().backward()
            for optimizer in steps[::-1] if turned and rank == 1 else steps:
                optimizer.step()
        for model in models:
            model.parameters_ready()
        found.append([parameter.detach().clone() for model in models for parameter in model.parameters()])
    assert differences(*found) == []
