"""A window without all gradients: what the error says about the other ranks; and another process group."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
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


@pytest.mark.tier("nightly")
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


@pytest.mark.tier("nightly")
def test_ranks_that_do_not_answer_in_time_are_named(ranks: RankPool) -> None:
    message, _ = ranks.run(alone_with_it, 2)
    assert "parameter b (number 1, bucket 0): no other rank has said whether it has it" in message
    assert "No report within 5 s from rank 1, which may have them or not." in message
    assert "produced by" not in message


class Four(nn.Module):
    """Four buckets, in the order d, c, b, a."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.ones(2)) for _ in range(4))

    def forward(self, used: str) -> Tensor:
        total = torch.zeros(())
        for name in used:
            total = total + getattr(self, name).sum()
        return total


def python_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


HOOKS = {"none": None, "wide sum": comm_hooks.bf16_compress_hook, "python": python_hook}


def wrapped(hook: str) -> fastddp.DistributedDataParallel:
    model = fastddp.DistributedDataParallel(Four(), bucket_cap_mb=0)
    if HOOKS[hook] is not None:
        model.register_comm_hook(None, HOOKS[hook])
    return model


def two_wait(rank: int, hook: str, used: str) -> str:
    """Ranks 0 and 1 wait; rank 2 comes when they have waited a while, and misses a later bucket's gradient."""
    model = wrapped(hook)
    loss = model("abcd" if rank < 2 else used)
    if rank < 2:
        with pytest.raises(RuntimeError, match="failed on rank 2"):
            loss.backward()
        return ""
    time.sleep(1)
    loss.backward()
    with pytest.raises(RuntimeError) as caught:
        model("abcd")
    with torch.no_grad():
        model("abcd")
    return str(caught.value)


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_that_wait_for_a_later_bucket_have_said_that_they_miss_nothing(ranks: RankPool, hook: str) -> None:
    message = ranks.run(two_wait, 3, hook, "acd")[2]
    assert "parameter b (number 1, bucket 2): produced by rank 0, 1" in message
    assert "No report" not in message


@pytest.mark.tier("nightly")
def test_what_ranks_have_not_come_to_yet_is_neither_produced_nor_missing(ranks: RankPool) -> None:
    # The sums of 16-bit gradients take two collectives: others wait for d's, before all gradients have come.
    message = ranks.run(two_wait, 3, "wide sum", "b")[2]
    assert "parameter d (number 3, bucket 0): produced by rank 0, 1" in message
    assert "parameter a (number 0, bucket 3): not yet by rank 0, 1, which waits in backward" in message


def all_miss(rank: int) -> str:
    model = wrapped("none")
    model("acd").backward()
    with pytest.raises(RuntimeError) as caught:
        model("abcd")
    return str(caught.value)


def test_what_no_rank_has_is_said_so_only_if_all_have_reported(ranks: RankPool) -> None:
    for message in ranks.run(all_miss, 2):
        assert "parameter b (number 1, bucket 2): produced by no rank\n" in message


def reports_left(store: dist.Store) -> list[str]:
    return [
        f"{window}/{part}"
        for window in range(4)
        for part in ("log", "askers", "answer")
        if store.check([f"fastddp/missing/1/{window}/{part}"])
    ]


def healthy_again(rank: int) -> tuple[list[str], list[str], int]:
    """What is at the store when rank 2 has raised, what is there two steps later, and calls to it in further steps."""
    model = wrapped("none")
    store = dist.distributed_c10d._get_process_group_store(model.process_group)
    loss = model("abcd" if rank < 2 else "acd")
    if rank == 2:
        loss.backward()
    with pytest.raises(RuntimeError):
        model("abcd") if rank == 2 else loss.backward()
    written = reports_left(store)
    for _ in range(2):
        model.zero_grad()
        model("abcd").backward()
    model("abcd")
    dist.barrier()
    left = reports_left(store)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_process_group_store", asked.append)
        for _ in range(3):
            model("abcd").backward()
    return written, left, len(asked)


@pytest.mark.tier("nightly")
def test_reports_are_deleted_once_all_is_well_and_healthy_steps_ask_for_nothing(ranks: RankPool) -> None:
    results = ranks.run(healthy_again, 3)
    assert results[2][0] == ["0/log", "0/askers", "0/answer"]
    assert [(left, asked) for _, left, asked in results] == [([], 0)] * 3


def without_a_store(rank: int) -> str:
    model = wrapped("none")
    if rank == 1:
        with pytest.raises(RuntimeError, match="failed on rank 0"):
            model("abcd").backward()
        return ""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    world = dist.distributed_c10d._world
    backend, store = world.pg_map[model.process_group]
    world.pg_map[model.process_group] = (backend, client)
    del server  # as if its process had ended
    model("acd").backward()
    with pytest.raises(RuntimeError) as caught:
        model("abcd")
    world.pg_map[model.process_group] = (backend, store)
    with torch.no_grad():
        model("abcd")
    return str(caught.value)


def test_without_a_store_the_error_is_still_the_missing_gradient(ranks: RankPool) -> None:
    message = ranks.run(without_a_store, 2)[0]
    assert message.startswith("fastddp: backward ended on rank 0 without a gradient for 1 of 4 parameters")
    assert "parameter b (number 1, bucket 2): no other rank has said whether it has it" in message
    assert "Other ranks could not be asked what they have: the store of the process group does not answer" in message
    assert "No report" not in message
    assert "find_unused_parameters=True" in message


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
