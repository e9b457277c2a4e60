"""What ranks tell each other at the end of a window travels with the last bucket, where that has room for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import comm_hooks
from on_ranks import on_ranks

BUCKETS = 3


def wrapped(hook: Any = None, **options: Any) -> fastddp.DistributedDataParallel:
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(BUCKETS)))
    options = {"watch": fastddp.Watch(stall=None), **options}
    model = fastddp.DistributedDataParallel(layers, bucket_cap_mb=0, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def started() -> int:
    """Collectives, so far."""
    group: Any = dist.group.WORLD  # torch does not declare what counts its collectives
    return group._get_sequence_number_for_group()


@pytest.mark.parametrize(
    ("hook", "options", "more"),
    [
        (None, {}, 0),
        (None, {"gradient_as_bucket_view": True}, 0),
        (comm_hooks.allreduce_hook, {}, 0),
        (None, {"watch": fastddp.Watch(corruption="raise")}, 0),  # measuring has none either
        (None, {"find_unused_parameters": True}, 1),  # it also says which parameters were used
    ],
    ids=["plain", "views", "hook", "measured", "unused parameters"],
)
@on_ranks(2)
def test_it_is_no_collective_of_its_own_where_a_sum_carries_the_last_bucket(
    rank: int, hook: Any, options: dict[str, Any], more: int
) -> None:
    model = wrapped(hook, **options)
    for _ in range(3):
        before = started()
        model(torch.ones(1, 16)).sum().backward()
    assert started() - before == BUCKETS + more


@on_ranks(2)
def test_only_the_bucket_that_it_travels_with_waits_for_the_end_of_backward(rank: int) -> None:
    model = wrapped()
    counts = []
    for _ in range(4):
        x = torch.ones(1, 16, requires_grad=True)
        before = started()
        x.register_hook(lambda _, before=before: counts.append(started() - before))
        model(x * 1).sum().backward()
    assert counts[2:] == [BUCKETS - 1] * 2


@on_ranks(2)
def test_it_is_no_gradient(rank: int) -> None:
    model = wrapped(gradient_as_bucket_view=True)
    for step in range(3):
        model(torch.full((1, 16), rank + step + 1.0)).sum().backward()
        true = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        assert float(model.last_grad_norm()) == pytest.approx(float(true), rel=1e-6)
