"""What ranks tell each other at the end of a window travels with the last bucket, where that has room for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import comm_hooks
from ranks import RankPool

BUCKETS = 3


def wrapped(hook: Any = None, **options: Any) -> fastddp.DistributedDataParallel:
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(BUCKETS)))
    model = fastddp.DistributedDataParallel(layers, bucket_cap_mb=0, watch=fastddp.Watch(stall=None), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def collectives(rank: int, hook: Any, options: dict[str, Any]) -> int:
    """Of a step."""
    model = wrapped(hook, **options)
    group: Any = dist.group.WORLD  # torch does not declare what counts its collectives
    for _ in range(3):
        before = group._get_sequence_number_for_group()
        model(torch.ones(1, 16)).sum().backward()
    return group._get_sequence_number_for_group() - before


@pytest.mark.parametrize(
    ("hook", "options", "more"),
    [
        (None, {}, 0),
        (None, {"gradient_as_bucket_view": True}, 0),
        (comm_hooks.allreduce_hook, {}, 0),
        (None, {"find_unused_parameters": True}, 1),  # it also says which parameters were used
    ],
    ids=["plain", "views", "hook", "unused parameters"],
)
def test_it_is_no_collective_of_its_own_where_a_sum_carries_the_last_bucket(
    ranks: RankPool, hook: Any, options: dict[str, Any], more: int
) -> None:
    assert ranks.run(collectives, 2, hook, options) == [BUCKETS + more] * 2


def started_before_the_end(rank: int) -> list[int]:
    """How many collectives a backward has started when all gradients of the model have come, of two windows."""
    model = wrapped()
    group: Any = dist.group.WORLD
    counts = []
    for _ in range(4):
        x = torch.ones(1, 16, requires_grad=True)
        counts.append(-group._get_sequence_number_for_group())
        x.register_hook(lambda _: counts.append(counts.pop() + group._get_sequence_number_for_group()))
        model(x * 1).sum().backward()
    return counts[2:]


def test_only_the_bucket_that_it_travels_with_waits_for_the_end_of_backward(ranks: RankPool) -> None:
    assert ranks.run(started_before_the_end, 2) == [[BUCKETS - 1] * 2] * 2


def wires_and_norms(rank: int) -> list[tuple[float, float]]:
    """The norm that was measured while gradients were averaged, and the true one, of two windows."""
    model = wrapped(gradient_as_bucket_view=True)
    pairs = []
    for step in range(3):
        model(torch.full((1, 16), rank + step + 1.0)).sum().backward()
        true = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        pairs.append((float(model.last_grad_norm()), float(true)))
    return pairs


def test_it_is_no_gradient(ranks: RankPool) -> None:
    for pairs in ranks.run(wires_and_norms, 2):
        for measured, true in pairs:
            assert measured == pytest.approx(true, rel=1e-6)
