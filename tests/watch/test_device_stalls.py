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
from on_ranks import of_ranks, on_ranks
from waiting import stderr_of_the_process, until


def wrapped(order: str = "lazy", **options: Any) -> fastddp.DistributedDataParallel:
    fake_cuda.schedule(order)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    return fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options)


def step(model: fastddp.DistributedDataParallel) -> None:
    model(torch.ones(2, 4, device=DEVICE)).sum().backward()


@on_ranks(2, pool="simulated_ranks")
def test_a_device_tells_which_bucket_it_waits_for(rank: int) -> None:
    """Asking makes the simulated device go on."""
    model = wrapped(watch=fastddp.Watch(patience=1000.0))
    for _ in range(3):
        step(model)
    fake_cuda.synchronize()
    with fake_cuda.without_waits():
        step(model)
    seen: list[tuple[int, int, bool]] = []
    for _ in range(1000):
        model.reducer.device_progress.look()
        if (wait := model.reducer.progress.read().device_wait) is None:
            break
        if wait[:3] not in seen:
            seen.append(wait[:3])
    # The first to ask makes the other one's device go on too.
    assert any((4, 0, False) in of_rank for of_rank in of_ranks(seen))
    assert seen == sorted(seen)
    assert (4, 0, True) in seen
    assert {window for window, _, _ in seen} == {4}


@pytest.mark.parametrize(
    ("order", "raises"),
    [
        pytest.param("lazy", False, marks=pytest.mark.tier("slow", but_one_in=2)),
        pytest.param("others_first", False, marks=pytest.mark.tier("slow", but_one_in=2)),
        pytest.param("lazy", True, marks=pytest.mark.tier("nightly")),
    ],
)
@on_ranks(2, pool="simulated_ranks")
def test_who_keeps_a_device_waiting_is_named_in_a_report_or_an_error(rank: int, order: str, raises: bool) -> None:
    """Rank 0's host is past its step, and rank 1 does not come before rank 0 has said so."""
    store = dist.distributed_c10d._get_default_store()
    reports: list[fastddp.StallReport] = []
    model = wrapped(order, watch=fastddp.Watch(stall="raise" if raises else reports.append, patience=0.5))
    for _ in range(4):
        step(model)
    fake_cuda.synchronize()
    if rank == 0:
        step(model)
        assert until(lambda: store.check(["fastddp/stall/1/report/5"]) if raises else bool(reports))
        if raises:
            fake_cuda.synchronize()  # as loss.item() does: the group has been aborted, so it ends
            with pytest.raises(RuntimeError, match=r"(?s)step 5 stands still.*rank 1 is"):
                step(model)
        store.set("said", "")
    else:
        assert until(lambda: store.check(["said"]))
        if not raises:
            step(model)
    fake_cuda.synchronize()
    assert bool(reports) == (rank == 0 and not raises)
    for report in reports[:1]:
        assert (report.step, report.causes[0].ranks) == (5, (1,))
        assert report.causes[0].cause in ("outside", "after_backward")
        assert "waiting for bucket 0 of" in report.headline
        assert "on the device" in report.headline


@on_ranks(2, pool="simulated_ranks")
def test_a_device_that_has_failed_says_so_once_and_its_rank_still_tells_what_it_does(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    with stderr_of_the_process() as said:
        model = wrapped(watch=fastddp.Watch(patience=0.5))
        for _ in range(3):
            step(model)
        fake_cuda.break_device()
        assert until(lambda: store.check([f"fastddp/stall/1/{rank}"]))
        fake_cuda.schedule("lazy")
        [line] = [line for line in said().splitlines() if "illegal memory" in line]
    assert f"device of rank {rank}" in line
    assert "cudaErrorIllegalAddress" in line


def twin(group: dist.ProcessGroup, *_: object) -> dist.ProcessGroup:
    """Another group of the same ranks, in place of a lane over gloo."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


@on_ranks(4, pool="simulated_ranks")
def test_all_groups_that_gradients_travel_over_are_aborted(rank: int) -> None:
    """An exchange of two levels, with two lanes between nodes; and a hook that has a group."""
    with nodes_of_two(rank), mock.patch.multiple(lanes, backend_of=lambda *_: dist.Backend.GLOO, make_group=twin):
        model = wrapped(hierarchy="node", watch=fastddp.Watch(stall=None))
        model.engine.use_plan(model.engine.now.setting.plan, several_lanes=True)
    node, between = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    by_ranks = Counter(tuple(dist.get_process_group_ranks(group)) for group in set(model.reducer.interruption.groups))
    assert by_ranks == {(0, 1, 2, 3): 1, node: 1, between: 2}
    model = wrapped(watch=fastddp.Watch(stall=None))
    model.register_comm_hook(dist.new_group(group_desc="a hook's"), allreduce_hook)
    assert "a hook's" in [group.group_desc for group in model.reducer.interruption.groups]
