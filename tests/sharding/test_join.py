"""Ranks with different numbers of inputs: torch's ``Join`` with a model and its sharded optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fastddp
from hooks_by_name import register
from on_ranks import on_ranks


def trained(rank: int, hook: str, options: dict[str, Any], sharded: dict[str, Any] | None) -> list[Tensor]:
    """Parameters in the end; rank 1 has three inputs more."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 57), nn.Tanh(), nn.Linear(57, 40), nn.LayerNorm(40), nn.Linear(40, 10))
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.01, **options)
    register(model, hook)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    if sharded is not None:
        optimizer = fastddp.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, foreach=True, **sharded)
    inputs = torch.Generator().manual_seed(rank)
    with Join([model] if sharded is None else [model, optimizer]):
        for _ in range(4 + 3 * rank):
            optimizer.zero_grad()
            model(torch.randn(16, 30, generator=inputs)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("sharded", [{}, {"gather": "forward"}, {"shard": "parameters"}], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"gradient_average": torch.ones(())}], ids=str
)
@pytest.mark.parametrize("hook", ["none", "bf16, sums in fp32", "int8"])
@pytest.mark.tier("slow", but_one_in=3)
@on_ranks(2)
def test_a_rank_without_inputs_steps_with_its_part(
    rank: int, hook: str, options: dict[str, Any], sharded: dict[str, Any]
) -> None:
    found, expected = (trained(rank, hook, options, how) for how in (sharded, None))
    same = hook != "int8"  # of which other ranks have the errors; those of rank 0 wait while it has no inputs
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if same else 0.03)


@pytest.mark.parametrize("asks", ["clip", "found_inf", "scaler"])
@on_ranks(2)
def test_what_asks_all_ranks_for_their_parts_is_refused_under_join(rank: int, asks: str) -> None:
    """In the first step, while all ranks have inputs."""
    model = fastddp.DistributedDataParallel(nn.Linear(3, 3))
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    ask = {
        "clip": lambda: fastddp.clip_grad_norm_(model, 1.0),
        "found_inf": model.found_inf,
        "scaler": lambda: scaler.unscale_(optimizer),
    }[asks]
    with Join([model, optimizer]):
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        with pytest.raises(RuntimeError, match=r"under Join(.|\n)*FD042"):
            ask()
        optimizer.step()


@on_ranks(2)
def test_joining_without_the_optimizer_is_refused(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(3, 3))
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match=r"Join\(\[model, optimizer\]\)"):
        model.join()
    with Join([model]):
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"has the model alone(.|\n)*FD042"):
            optimizer.step()
