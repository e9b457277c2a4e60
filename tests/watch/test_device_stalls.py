"""Where the host runs ahead of its device, what stands still is seen there: simulated, with the order of streams."""

from __future__ import annotations

from collections import Counter
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
from waiting import stderr_of_the_process, until


def wrapped(order: str = "lazy", **options: Any) -> fastddp.DistributedDataParallel:
    fake_cuda.schedule(order)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    return fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options)


def step(model: fastddp.DistributedDataParallel) -> None:
    model(torch.ones(2, 4, device=DEVICE)).sum().backward()


def waits_seen(rank: int, watched: bool) -> list[tuple[int, int, bool]]:
    """Of a step whose host is past it, each time that the device is asked; asking makes the simulated device go on."""
    model = wrapped(stall_patience=1000.0) if watched else wrapped(on_stall=None)
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


def test_a_device_tells_which_bucket_it_waits_for_where_there_is_a_watch(simulated_ranks: RankPool) -> None:
    both = simulated_ranks.run(waits_seen, 2, True)
    # The first to ask makes the other one's device go on too.
    assert (4, 0, False) in both[0] + both[1]
    for seen in both:
        assert seen == sorted(seen)
        assert (4, 0, True) in seen
        assert {window for window, _, _ in seen} == {4}
    assert simulated_ranks.run(waits_seen, 2, False) == [[], []]


def kept_waiting(rank: int, order: str, raises: bool) -> tuple[bool, list[Any], str]:
    """Reports, and the error, of rank 0, whose host is past its step: rank 1 does not come before it has them."""
    store = dist.distributed_c10d._get_default_store()
    reports: list[fastddp.StallReport] = []
    model = wrapped(order, on_stall="raise" if raises else reports.append, stall_patience=0.5)
    for _ in range(4):
        step(model)
    fake_cuda.synchronize()
    error = ""
    if rank == 0:
        step(model)
        found = until(lambda: store.check(["fastddp/stall/1/report/5"]) if raises else bool(reports))
        if raises:
            fake_cuda.synchronize()  # as loss.item() does: the group has been aborted, so it ends
            with pytest.raises(RuntimeError) as raised:
                step(model)
            error = str(raised.value)
        store.set("said", "")
    else:
        found = until(lambda: store.check(["said"]))
        if not raises:
            step(model)
    fake_cuda.synchronize()
    return found, [(of.step, of.causes[0].cause, of.causes[0].ranks, of.headline) for of in reports], error


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("order", ["lazy", "others_first"])
def test_who_keeps_a_device_waiting_is_named(simulated_ranks: RankPool, order: str) -> None:
    (found, [(number, cause, ranks, headline), *_], _), second = simulated_ranks.run(kept_waiting, 2, order, False)
    assert found
    assert second == (True, [], "")
    assert (number, ranks) == (5, (1,))
    assert cause in ("outside", "after_backward")
    assert "waiting for bucket 0 of" in headline
    assert "on the device" in headline


@pytest.mark.tier("nightly")
def test_raise_aborts_the_group_that_a_device_waits_for(simulated_ranks: RankPool) -> None:
    (_, _, error), (found, _, _) = simulated_ranks.run(kept_waiting, 2, "lazy", True)
    assert found
    assert "fastddp: step 5 stands still" in error
    assert "rank 1 is" in error


def broken(rank: int) -> tuple[bool, str]:
    """Whether a rank whose device has failed still tells others what it does, and what it writes to stderr."""
    store = dist.distributed_c10d._get_default_store()
    with stderr_of_the_process() as said:
        model = wrapped(stall_patience=0.5)
        for _ in range(3):
            step(model)
        fake_cuda.break_device()
        tells = until(lambda: store.check([f"fastddp/stall/1/{rank}"]))
        fake_cuda.schedule("lazy")
        return tells, said()


def test_a_device_that_has_failed_says_so_once(simulated_ranks: RankPool) -> None:
    for rank, (tells, said) in enumerate(simulated_ranks.run(broken, 2)):
        assert tells
        [line] = [line for line in said.splitlines() if "illegal memory" in line]
        assert f"device of rank {rank}" in line
        assert "cudaErrorIllegalAddress" in line


def twin(group: dist.ProcessGroup, *_: object) -> dist.ProcessGroup:
    """Another group of the same ranks, in place of a lane over gloo."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def groups_that_are_aborted(rank: int) -> tuple[Counter[tuple[int, ...]], list[str]]:
    """Ranks of those of an exchange of two levels, with two lanes between nodes; names where a hook has a group."""
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
