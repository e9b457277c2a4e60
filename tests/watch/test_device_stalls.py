"""Where the host runs ahead of its device, what stands still is seen there: simulated, with the order of streams."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fake_cuda
import fastddp
from fake_cuda import DEVICE
from fastddp.exchange import lanes
from nodes import nodes_of_two
from ranks import RankPool

DEADLINE = 50.0  # seconds; for a machine that has much to do


def wrapped(**options: Any) -> fastddp.DistributedDataParallel:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    return fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options)


def step(model: fastddp.DistributedDataParallel) -> None:
    model(torch.ones(2, 4, device=DEVICE)).sum().backward()


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def waits_seen(rank: int) -> list[tuple[int, int, bool]]:
    """Of a step whose host is past it, each time that the device is asked; asking makes the simulated device go on."""
    fake_cuda.schedule("lazy")
    model = wrapped(stall_patience=1000.0)
    for _ in range(3):
        step(model)
    fake_cuda.synchronize()
    with fake_cuda.without_waits():
        step(model)
    seen: list[tuple[int, int, bool]] = []
    for _ in range(1000):
        model.reducer.device_progress.look()
        wait = model.reducer.progress.read().device_wait
        if wait is None:
            break
        if wait[:3] not in seen:
            seen.append(wait[:3])
    dist.barrier()
    return seen


def test_a_device_tells_which_bucket_it_waits_for(simulated_ranks: RankPool) -> None:
    both = simulated_ranks.run(waits_seen, 2)
    # The first to ask makes the other one's device go on too.
    assert (4, 0, False) in both[0] + both[1]
    for seen in both:
        assert seen == sorted(seen)
        assert (4, 0, True) in seen
        assert {window for window, _, _ in seen} == {4}


def unwatched(rank: int) -> object:
    fake_cuda.schedule("lazy")
    model = wrapped(on_stall=None)
    step(model)
    model.reducer.device_progress.look()
    return model.reducer.progress.read().device_wait


def test_without_a_watch_no_moments_are_kept(simulated_ranks: RankPool) -> None:
    assert simulated_ranks.run(unwatched, 2) == [None] * 2


def kept_waiting(rank: int, order: str) -> list[Any]:
    """Reports of rank 0, whose host is past its step: rank 1 does not come to it until there is one."""
    fake_cuda.schedule(order)
    store = dist.distributed_c10d._get_default_store()
    reports: list[Any] = []
    model = wrapped(on_stall=reports.append, stall_patience=0.5)
    for _ in range(4):
        step(model)
    fake_cuda.synchronize()
    if rank == 0:
        step(model)
        found = until(lambda: bool(reports))
        store.set("said", "")
    else:
        found = until(lambda: store.check(["said"]))
        step(model)
    fake_cuda.synchronize()
    return [
        found,
        *((report.step, report.causes[0].cause, report.causes[0].ranks, report.headline) for report in reports),
    ]


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("order", ["lazy", "others_first"])
def test_who_keeps_a_device_waiting_is_named(simulated_ranks: RankPool, order: str) -> None:
    first, second = simulated_ranks.run(kept_waiting, 2, order)
    assert first[0]
    assert second == [True]
    number, cause, ranks, headline = first[1]
    assert (number, cause, ranks) == (5, "outside", (1,)) or (number, cause, ranks) == (5, "after_backward", (1,))
    assert "waiting for bucket 0 of" in headline
    assert "on the device" in headline


def broken(rank: int, folder: Path) -> tuple[bool, str]:
    """Whether a rank whose device has failed still tells others what it does, and what it writes to stderr."""
    fake_cuda.schedule("lazy")
    with (folder / str(rank)).open("w+") as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            store = dist.distributed_c10d._get_default_store()
            model = wrapped(stall_patience=0.5)
            for _ in range(3):
                step(model)
            fake_cuda.break_device()
            tells = until(lambda: store.check([f"fastddp/stall/1/{rank}"]))
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            fake_cuda.schedule("lazy")
        file.seek(0)
        return tells, file.read()


def test_a_device_that_has_failed_says_so_once(simulated_ranks: RankPool, tmp_path: Path) -> None:
    for rank, (tells, said) in enumerate(simulated_ranks.run(broken, 2, tmp_path)):
        assert tells
        [line] = [line for line in said.splitlines() if "illegal memory" in line]
        assert line == (
            f"fastddp: the device of rank {rank} does not say how far it is: "
            "cudaErrorIllegalAddress: an illegal memory access was encountered"
        )


def twin(group: dist.ProcessGroup, *_: object) -> dist.ProcessGroup:
    """Another group of the same ranks, in place of a lane over gloo."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def groups_that_are_aborted(rank: int) -> tuple[Counter[tuple[int, ...]], list[str]]:
    """Ranks of those of an exchange of two levels, with two lanes between nodes; names where a hook has a group."""
    fake_cuda.schedule("lazy")
    with (
        nodes_of_two(rank),
        mock.patch.multiple(lanes, backend_of=lambda *_: dist.Backend.GLOO, make_group=twin),
    ):
        model = wrapped(hierarchy="node", on_stall=None)
        model._use_plan(model._setting.plan, several_lanes=True)
    ranks = Counter(tuple(dist.get_process_group_ranks(group)) for group in set(model.reducer.interruption.groups))
    model = wrapped(on_stall=None)
    model.register_comm_hook(dist.new_group(group_desc="a hook's"), allreduce_hook)
    return ranks, [group.group_desc for group in model.reducer.interruption.groups]


def test_all_groups_that_gradients_travel_over_are_aborted(simulated_ranks: RankPool) -> None:
    for rank, (by_ranks, names) in enumerate(simulated_ranks.run(groups_that_are_aborted, 4)):
        node, between = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert by_ranks == {(0, 1, 2, 3): 1, node: 1, between: 2}
        assert "a hook's" in names


def aborted(rank: int) -> str | bool:
    """The error of rank 0's next step, whose device waits for rank 1: it does not come any more."""
    fake_cuda.schedule("lazy")
    store = dist.distributed_c10d._get_default_store()
    model = wrapped(on_stall="raise", stall_patience=0.5)
    for _ in range(4):
        step(model)
    fake_cuda.synchronize()
    if rank == 1:
        return until(lambda: store.check(["raised"]))
    step(model)
    until(lambda: store.check(["fastddp/stall/1/report/5"]))
    fake_cuda.synchronize()  # as loss.item() does: the group has been aborted, so it ends
    with pytest.raises(RuntimeError) as error:
        step(model)
    store.set("raised", "")
    return str(error.value)


@pytest.mark.tier("nightly")
def test_raise_aborts_the_group_that_a_device_waits_for(simulated_ranks: RankPool) -> None:
    error, culprit = simulated_ranks.run(aborted, 2)
    assert culprit
    assert "fastddp: step 5 stands still" in error
    assert "rank 1 is" in error
