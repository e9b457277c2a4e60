"""A window without all gradients: what the error says about the other ranks; and another process group."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from ranks import RankPool


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, used: str) -> Tensor:
        return sum(getattr(self, name).sum() for name in used)  # type: ignore[return-value]


def each_misses_another(rank: int) -> tuple[str, float]:
    # What rank 1 sends meets nothing, and leaving the group waits for it as long as the group has patience.
    impatient = dist.new_group(timeout=timedelta(seconds=6))
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0, process_group=impatient)
    model("a" if rank == 0 else "b").backward()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        model("ab")
    return str(caught.value), time.monotonic() - began


def test_every_rank_that_raises_says_who_has_what_it_misses(ranks: RankPool) -> None:
    (first, seconds), (second, _) = ranks.run(each_misses_another, 2)
    assert "on rank 0 without a gradient for 1 of 2 parameters" in first
    assert "parameter b (number 1, bucket 0): produced by rank 1" in first
    assert "parameter a (number 0, bucket 1): produced by rank 0" in second
    assert seconds < 4  # nobody waited for the time limit


def one_misses(rank: int) -> str:
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0)
    loss = model("ab" if rank == 0 else "a")
    if rank == 0:
        with pytest.raises(RuntimeError, match="failed on rank 1"):
            loss.backward()  # waits for rank 1
        return ""
    loss.backward()
    with pytest.raises(RuntimeError) as caught:
        model("ab")
    with torch.no_grad():
        model("ab")  # sends what rank 0 waits for
    return str(caught.value)


def test_a_rank_that_waits_in_backward_has_said_that_it_misses_nothing(ranks: RankPool) -> None:
    _, message = ranks.run(one_misses, 2)
    assert "parameter b (number 1, bucket 0): produced by rank 0" in message
    assert "No report" not in message


def alone_with_it(rank: int) -> str:
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0)
    if rank == 0:
        model("a").backward()
        with pytest.raises(RuntimeError) as caught:
            model("ab")
        dist.barrier()
        return str(caught.value)
    dist.barrier()  # does not come to backward
    return ""


def test_ranks_that_do_not_answer_in_time_are_named(ranks: RankPool) -> None:
    message, _ = ranks.run(alone_with_it, 2)
    assert "produced by no rank that reported" in message
    assert "No report within 5 s from rank 1." in message


def another_group(rank: int) -> list[float]:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    seen = []
    pair = dist.new_group([0, 2])
    for group in (None, pair):
        if group is not None:
            model._update_process_group(group)
        for _ in range(2):
            model.zero_grad()
            if group is not None and rank == 1:
                continue
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
        seen.append(-1.0 if model.module.weight.grad is None else model.module.weight.grad.item())
    return seen


def test_the_process_group_can_be_replaced(ranks: RankPool) -> None:
    assert ranks.run(another_group, 3) == [[2.0, 2.0], [2.0, -1.0], [2.0, 2.0]]
