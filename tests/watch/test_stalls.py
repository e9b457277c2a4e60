"""A step that stands still, in real runs: a report to stderr, a call, or an error on all ranks that wait."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

import fake_cuda
import fastddp
from fake_cuda import DEVICE
from fastddp import _C, _pages
from fastddp.ranks import lanes
from fastddp.watch.python_calls import libraries, lines_of_main_thread
from nodes import nodes_of_two
from on_ranks import of_ranks, on_ranks
from ranks import RankPool
from repository import TESTS
from waiting import DEADLINE, stderr_of_the_process, until


def two_buckets(device: str = DEVICE, **options: Any) -> fastddp.DistributedDataParallel:
    """Two a layer; the host runs ahead of the simulated device."""
    if device == DEVICE:
        fake_cuda.schedule("lazy")
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    return fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options)


def step(model: fastddp.DistributedDataParallel) -> None:
    model(torch.ones(2, 4, device=model.device)).sum().backward()


@on_ranks(3)
def test_a_report_names_the_rank_that_keeps_others_waiting_and_where_it_is(rank: int) -> None:
    """Rank 1 does not come to its seventh step before somebody has noticed."""
    store = dist.distributed_c10d._get_default_store()
    model = two_buckets("cpu", watch=fastddp.Watch(patience=1.0))
    with stderr_of_the_process() as said:
        for number in range(8):
            if number == 6 and rank == 1:
                while not store.check(["fastddp/stall/1/report/6"]):
                    time.sleep(0.1)
            step(model)
        assert not said() or until(lambda: "went on" in said())
        [report] = filter(None, of_ranks(said()))  # one rank speaks for all that wait
    assert "step 7 stands still: 2 of 3 ranks are waiting for bucket 0 of 4" in report
    assert ": ranks 0, 2. (20" in report
    assert "rank 1 is past its backward" in report
    assert re.search(r"test_stalls.py:\d+ test_a_report_\w+: (while not store.check|time.sleep\(0.1\))", report)
    assert re.search(r"step 7 went on after \d+\.\d s \(20", report)


class Held(torch.optim.SGD):
    """Its step does not begin, where ``holds`` is set, before somebody has noticed."""

    holds = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        store = dist.distributed_c10d._get_default_store()
        while self.holds and not store.check(["fastddp/stall/1/report/4"]):
            time.sleep(0.1)
        super().step()


def who_has_not_stepped(rank: int, gather: Any, device: str) -> None:
    """On a device, rank 0's host is past its step, and either rank may be the first to report."""
    store = dist.distributed_c10d._get_default_store()
    reports: list[fastddp.StallReport] = []

    def note(report: fastddp.StallReport) -> None:
        if report.step == 5:  # a busy machine may stand still in the first one
            reports.append(report)
            store.set("said", "")

    model = two_buckets(device, watch=fastddp.Watch(note, patience=0.5))
    optimizer = fastddp.ShardedOptimizer(model, Held, gather=gather, lr=0.1)
    for number in range(5 if device == "cpu" else 4):
        Held.holds = number == 3 and rank == 1
        step(model)
        if device != "cpu":
            fake_cuda.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    assert until(lambda: store.check(["said"]))
    if device != "cpu":
        fake_cuda.synchronize()
    for report in reports:
        assert [(cause.cause, cause.ranks) for cause in report.causes] == [("optimizer", (1,))]
        where = "of bucket 3 of 4" if device == "cpu" else "of bucket 3 of 4 on the device"
        assert f"waiting for the parameters {where}" in report.headline
        assert device != "cpu" or any("test_stalls.py" in line for line in report.stack)


@pytest.mark.parametrize(
    ("gather", "device"),
    [("step", "cpu"), pytest.param("forward", "cpu", marks=pytest.mark.tier("slow")), ("step", DEVICE)],
)
def test_who_waits_for_parameters_names_the_rank_that_has_not_stepped(
    ranks: RankPool, simulated_ranks: RankPool, gather: str, device: str
) -> None:
    (ranks if device == "cpu" else simulated_ranks).run(who_has_not_stepped, 2, gather, device)


@on_ranks(2)
def test_raise_does_not_end_the_step_of_a_rank_in_its_own_code(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2), watch=fastddp.Watch("raise", patience=0.5))
    for number in range(5):
        if number == 4 and rank == 1:
            assert until(lambda: store.check(["fastddp/stall/1/report/4"]))
            time.sleep(0.8)
        model(torch.ones(1, 2)).sum().backward()
    assert store.check(["fastddp/stall/1/report/4"])


@on_ranks(2)
def test_raise_ends_a_step_where_a_rank_waits_in_another_collective(rank: int) -> None:
    beside = dist.new_group()
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2), watch=fastddp.Watch("raise", patience=0.5))
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?s)step 5 stands still.*a collective of all ranks.*FD016\]$"):
            model(torch.ones(1, 2)).sum().backward()
    dist.all_reduce(torch.ones(1), group=beside)


@pytest.mark.parametrize("is_stopped", [True, pytest.param(False, marks=pytest.mark.tier("slow"))])
@on_ranks(2)
def test_a_rank_in_its_own_code_that_is_stopped_there_or_stays_too_long_ends_the_others(
    rank: int, is_stopped: bool
) -> None:
    store = dist.distributed_c10d._get_default_store()
    watch = fastddp.Watch("raise", patience=0.5, idle_patience=None if is_stopped else 2.0)
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2), watch=watch)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        assert until(lambda: store.check(["fastddp/stall/1/report/4"]))
        store.set("pid", str(os.getpid()))
        if is_stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        assert until(lambda: store.check(["raised"]))
        return
    why = "is stopped" if is_stopped else "is past its backward"
    with stderr_of_the_process() as said:
        with pytest.raises(RuntimeError, match=rf"(?s)step 5 stands still.*{why}.*FD016"):
            model(torch.ones(1, 2)).sum().backward()
        store.set("raised", "")
        os.kill(int(store.get("pid")), signal.SIGCONT)
        assert said().count("stands still") == 1  # before; then the error says it


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("stall", "shout"), ("stall", 3), ("patience", 0), ("patience", "long"), ("idle_patience", True)],
        *[("audit_every", value) for value in (0, -1, 1.5, True, "10")],
    ],
)
def test_bad_options_are_refused(option: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"Watch\({option}=...\) is .*{value}"):
        fastddp.Watch(**{option: value})


def test_a_rank_says_where_it_is_before_others_ask() -> None:
    store = dist.HashStore()
    page = _C.Progress(["w"], 0, 2)
    page.belongs_to(1)
    watch = _C.StallWatch(page, store, "stall", 1, 0.4, prints=False, raises=None, libraries=libraries())
    assert until(lambda: store.check(["stall/0"]))
    assert store.get("stall/0").startswith(b"fastddp 1\nrank 0\n")
    assert watch.wants_stack()
    # Python may not come to it: then it is read without the GIL.
    assert until(lambda: b"stack (the GIL is held" in store.get("stall/0"))
    assert re.search(rb"stack \S*waiting.py:\d+ until: [a-z]", store.get("stall/0"))
    watch.give_stack(["train.py:1 main: f()"])
    assert until(lambda: b"stack train.py:1 main: f()" in store.get("stall/0"))
    assert watch.take_report() is None  # outside of a step nothing stands still


def test_other_threads_may_ask_while_it_looks_and_end_it_together() -> None:
    """As threads that train do where a rank is lost in an outage. ThreadSanitizer sees who reads what."""
    page, job = _C.Progress(["w"], 0, 2), 2**40 + os.getpid()
    page.belongs_to(job)
    code = f"page = _C.Progress(['w'], 1, 2); page.belongs_to({job}); os.kill(os.getpid(), 9)"
    lost = subprocess.Popen([sys.executable, "-P", "-c", f"import os; from fastddp import _C; {code}"])
    lost.wait()
    watch = _C.StallWatch(page, dist.HashStore(), "stall", job, 0.1, prints=False, waits=_C.Interruption([]))
    with ThreadPoolExecutor(4) as threads:
        said = [*threads.map(lambda _: watch.who_has_ended(), range(100))]
        assert all("because rank 1 is gone" in text for text in said)
        reports = [*threads.map(lambda _: watch.report_of_open_step(), range(8))]
        assert all("because rank 1 is gone" in report for report in reports)
    for left in _pages.shared_pages(lost.pid):
        _pages.remove_page(left)


BEGUN, THERE = (multiprocessing.get_context("fork").Event() for _ in range(2))


class Late(list[int]):
    """Its items are there when somebody says so."""

    def __getitem__(self, index: Any) -> Any:
        BEGUN.set()
        THERE.wait(DEADLINE)
        return index


def test_a_data_loader_is_shown_with_its_users_line_and_its_workers() -> None:
    lines: list[str] = []

    def waits_for_workers() -> bool:
        lines[:] = lines_of_main_thread()
        return any(line.startswith("(workers") for line in lines[-1:])

    def look() -> None:
        BEGUN.wait(DEADLINE)  # nothing else runs here while a process is forked
        until(waits_for_workers)
        THERE.set()

    looking = threading.Thread(target=look)
    looking.start()
    for _ in DataLoader(Late([0]), num_workers=1, multiprocessing_context="fork"):  # type: ignore[arg-type]
        looking.join()
    *_, users, loader, folded, innermost, workers = lines
    assert re.search(r"test_stalls.py:\d+ test_a_data_loader\w*: for _ in DataLoader", users)
    assert re.match(r"torch/utils/data/dataloader.py:\d+ __next__: ", loader)
    assert re.match(r"\(\d+ calls in torch/utils/data, ", folded)
    assert re.match(r"\w+.py:\d+ ", innermost)
    assert re.fullmatch(r"\(workers of this data loader: \d+ (sleeps|runs)\)", workers)


FRAMES_THAT_CHANGE = """
import threading
from fastddp import _C

def deep(n):
    return sum(deep(n - 1) for _ in range(2)) if n else 1

def read():
    for _ in range(3000):
        _C.calls_without_gil()
    ended.set()

ended = threading.Event()
threading.Thread(target=read).start()
while not ended.is_set():
    exec("def fresh(n): return deep(n)")
    fresh(6)
print("lives")
"""


@pytest.mark.tier("slow")
def test_calls_of_a_thread_that_runs_after_all_can_be_read() -> None:
    command = [sys.executable, "-c", FRAMES_THAT_CHANGE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=TESTS)
    assert (result.returncode, result.stdout) == (0, "lives\n"), result.stderr[-2000:]


@pytest.mark.parametrize("raises", [False, pytest.param(True, marks=pytest.mark.tier("nightly"))])
@on_ranks(2, pool="simulated_ranks")
def test_who_keeps_a_device_waiting_is_named_in_a_report_or_an_error(rank: int, raises: bool) -> None:
    """Rank 0's host is past its step, and rank 1 does not come before rank 0 has said so."""
    store = dist.distributed_c10d._get_default_store()
    reports: list[fastddp.StallReport] = []

    def note(report: fastddp.StallReport) -> None:
        reports.extend([report] if report.step == 5 else [])  # in the first one, kernels may be compiled

    model = two_buckets(watch=fastddp.Watch("raise" if raises else note, 0.5, idle_patience=0.5))
    for _ in range(4):
        step(model)
    fake_cuda.synchronize()
    if rank == 0:
        step(model)
        assert until(lambda: store.check(["fastddp/stall/1/report/5"]) if raises else bool(reports))
        if raises:
            fake_cuda.synchronize()  # as loss.item() does: the group has been aborted, so it ends
            with pytest.raises(RuntimeError, match=r"(?s)step 5 stands still.*rank 1 is.*FD016\]$"):
                step(model)
        store.set("said", "")
    else:
        assert until(lambda: store.check(["said"]))
        if not raises:
            step(model)
    fake_cuda.synchronize()
    assert bool(reports) == (rank == 0 and not raises)
    for report in reports[:1]:
        assert report.causes[0].ranks == (1,)
        assert report.causes[0].cause in ("outside", "after_backward")
        assert "waiting for bucket 0 of" in report.headline
        assert "on the device" in report.headline


@on_ranks(2, pool="simulated_ranks")
def test_a_device_that_has_failed_says_so_once_and_its_rank_still_tells_what_it_does(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    with stderr_of_the_process() as said:
        model = two_buckets(watch=fastddp.Watch(patience=0.5))
        for _ in range(3):
            step(model)
        fake_cuda.break_device()
        assert until(lambda: store.check([f"fastddp/stall/1/{rank}"]))
        fake_cuda.schedule("lazy")
        [line] = [line for line in said().splitlines() if "illegal memory" in line]
    assert f"device of rank {rank}" in line
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in line


def twin(group: dist.ProcessGroup, *_: object) -> dist.ProcessGroup:
    """Another group of the same ranks, in place of a lane over gloo."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


@on_ranks(4, pool="simulated_ranks")
def test_all_groups_that_gradients_travel_over_are_aborted(rank: int) -> None:
    """An exchange of two levels, with two lanes between nodes; and a hook that has a group."""
    with nodes_of_two(rank), mock.patch.multiple(lanes, backend_of=lambda *_: dist.Backend.GLOO, make_group=twin):
        model = two_buckets(hierarchy="node", watch=fastddp.Watch(stall=None))
        model.engine.use_plan(model.engine.now.setting.plan, several_lanes=True)
    node, between = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    by_ranks = Counter(tuple(dist.get_process_group_ranks(group)) for group in set(model.reducer.interruption.groups))
    assert by_ranks == {(0, 1, 2, 3): 1, node: 1, between: 2}
    model = two_buckets(watch=fastddp.Watch(stall=None))
    model.register_comm_hook(dist.new_group(group_desc="a hook's"), allreduce_hook)
    assert "a hook's" in [group.group_desc for group in model.reducer.interruption.groups]
