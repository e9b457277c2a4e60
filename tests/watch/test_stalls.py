"""A step that stands still, in real runs: a report to stderr, a call, or an error on all ranks that wait."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fastddp
from fastddp import _C
from fastddp.watch.python_calls import libraries, lines_of_main_thread
from fastddp.watch.stalls import check_stall_options
from ranks import RankPool
from repository import TESTS

SCRIPT = """
import sys, time
import torch, torch.distributed as dist, fastddp
from fastddp import comm_hooks
from torch import nn

def in_python(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

how, exchange = sys.argv[1:]
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
model = fastddp.DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=0, stall_patience=1.5,
    on_stall=how, find_unused_parameters=exchange == "unused",
)
if exchange == "fp16":
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
elif exchange == "python":
    model.register_comm_hook(None, in_python)
elif exchange == "power_sgd":
    state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, comm_hooks.powerSGD_hook)
for step in range(8):
    if step == 6 and dist.get_rank() == 1:
        if how == "raise":
            sys.stdin.read()  # until the others have ended
            sys.exit()
        while not store.check(["fastddp/stall/1/report/6"]):  # somebody has noticed
            time.sleep(0.1)
    model(torch.ones(2, 8)).sum().backward()
print("DONE", flush=True)
"""


def outputs(folder: Path, how: str, exchange: str) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of three ranks, of which rank 1 keeps the others waiting in its seventh step.

    It goes on when the others have ended.
    """
    script = folder / "train.py"
    script.write_text(SCRIPT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), how, exchange],
            env={
                "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin",
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    found = {}
    for rank in (0, 2, 1):
        process = processes[rank]
        try:
            out, err = process.communicate("", timeout=300) if rank == 1 else process.communicate(timeout=300)
        finally:
            process.kill()
        found[rank] = (process.returncode, out, err)
    return [found[rank] for rank in range(3)]


def test_a_report_names_the_rank_that_keeps_others_waiting_and_where_it_is(tmp_path: Path) -> None:
    found = outputs(tmp_path, "report", "plain")
    assert [(status, out) for status, out, _ in found] == [(0, "DONE\n")] * 3
    [report] = [err for _, _, err in found if "fastddp: " in err]  # one rank speaks for all that wait
    assert "step 7 stands still: 2 of 3 ranks are waiting for bucket 0 of 4" in report
    assert ": ranks 0, 2. (20" in report
    assert "rank 1 is past its backward" in report
    assert re.search(r"train.py:\d+ <module>: (while not store.check|time.sleep\(0.1\))", report)
    assert re.search(r"fastddp: step 7 went on after \d+\.\d s \(20", report)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("exchange", ["plain", "fp16", "power_sgd", "python", "unused"])
def test_raise_ends_all_ranks_that_wait_with_the_report(tmp_path: Path, exchange: str) -> None:
    """The one that does not wait is still there when they have ended: nothing of theirs waits for it."""
    first, culprit, last = outputs(tmp_path, "raise", exchange)
    for status, out, err in (first, last):
        assert status == 1
        assert "RuntimeError: fastddp: step 7 stands still" in err
        assert "rank 1 is past its backward" in err.split("RuntimeError")[1]
        assert "DONE" not in out
    assert culprit[0] == 0


def interrupted(rank: int) -> list[str]:
    """Errors of a model whose waits have been interrupted: of the next forward, and of the one after it."""
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2))
    model.reducer.interruption.interrupt("this is why")
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            model(None)
        errors.append(str(error.value).splitlines()[0])
    return errors


def test_an_interrupted_model_is_of_no_use_and_says_why(ranks: RankPool) -> None:
    assert ranks.run(interrupted, 2) == [["this is why"] * 2] * 2


class Chain(nn.Module):
    """Eight layers, behind each of which backward pauses."""

    def __init__(self, pause: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self._pause = pause

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
            inputs.register_hook(self._pause)
        return inputs


def stuck_after_dripping(rank: int) -> list[tuple[bool, str]]:
    """Of each report whether it is soft, and its first cause. Rank 1's last backward is slow, and then stands still."""
    store = dist.distributed_c10d._get_default_store()
    reports: list[fastddp.StallReport] = []
    pauses: list[float] = []

    def note(report: fastddp.StallReport) -> None:
        reports.append(report)
        if not report.is_soft:
            store.set("seen", "")

    def pause(gradient: Tensor) -> None:
        if not pauses:
            return
        time.sleep(pauses.pop())
        while not pauses and not store.check(["seen"]):
            time.sleep(0.1)

    model = fastddp.DistributedDataParallel(Chain(pause), on_stall=note, stall_patience=2.0)
    for step in range(5):
        if step == 4 and rank == 1:
            pauses = [0.8] * 7
        model(torch.ones(1, 4)).sum().backward()
    return [(report.is_soft, report.causes[0].cause) for report in reports]


@pytest.mark.tier("nightly")
def test_a_rank_that_was_slow_and_then_stands_still_is_reported_again(ranks: RankPool) -> None:
    first, second = ranks.run(stuck_after_dripping, 2)
    assert second == []
    assert first == [(True, "slow"), (False, "backward")]


# ------------------------------------------------------------------------------------------ without a run, by one watch


def watch_of(page: _C.Progress, store: dist.Store, patience: float = 0.4) -> _C.StallWatch:
    page.belongs_to(1)
    return _C.StallWatch(page, store, "stall", 1, patience, prints=False, raises=None, libraries=libraries())


def keys(store: dist.Store, ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if store.check([f"stall/{rank}"])]


def test_a_rank_says_where_it_is_before_others_ask(ranks: RankPool) -> None:
    store = dist.HashStore()
    page = _C.Progress(["w"], 0, 2)
    watch = watch_of(page, store)
    deadline = time.monotonic() + 60
    while not keys(store, 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.get("stall/0").startswith(b"fastddp 1\nrank 0\n")
    assert watch.wants_stack()
    # Python may not come to it: then it is read without the GIL.
    while b"stack (the GIL is held" not in store.get("stall/0") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert re.search(
        rb"stack \S*test_stalls.py:\d+ test_a_rank_says_where_it_is_before_others_ask: [a-z]", store.get("stall/0")
    )
    watch.give_stack(["train.py:1 main: f()"])
    while b"stack train.py" not in store.get("stall/0") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b"stack train.py:1 main: f()" in store.get("stall/0")
    assert watch.take_report() is None  # outside of a step nothing stands still


class Late(Dataset[int]):
    """Its items are there when a file is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        (self.folder / "begun").touch()
        while not (self.folder / "there").exists():
            time.sleep(0.01)
        return index


def test_a_data_loader_is_shown_with_its_users_line_and_its_workers(tmp_path: Path) -> None:
    found: list[list[str]] = []

    def look() -> None:
        try:
            while not (tmp_path / "begun").exists():  # nothing else runs here while a process is forked
                time.sleep(0.01)
            while not found or not found[-1][-1].startswith("(workers"):
                found.append(lines_of_main_thread())
        finally:
            (tmp_path / "there").touch()

    looking = threading.Thread(target=look)
    looking.start()
    batches = DataLoader(Late(tmp_path), num_workers=1, multiprocessing_context="fork")
    for _ in batches:
        looking.join()
    *_, users, loader, folded, innermost, workers = found[-1]
    assert re.search(r"test_stalls.py:\d+ test_a_data_loader\w*: for _ in batches:", users)
    assert re.match(r"torch/utils/data/dataloader.py:\d+ __next__: ", loader)
    assert re.match(r"\(\d+ calls in torch/utils/data, ", folded)
    assert re.match(r"\w+.py:\d+ ", innermost)
    assert re.fullmatch(r"\(workers of this data loader: \d+ (sleeps|runs)\)", workers)


def healthy(rank: int) -> tuple[int, list[str]]:
    """Keys that a model adds to the store while its steps end, and those of its construction."""
    store = dist.distributed_c10d._get_default_store()
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2), stall_patience=30.0)
    for _ in range(3):  # buckets are rebuilt
        model(dist.torch.ones(1, 2)).sum().backward()
    before = store.num_keys()
    dist.barrier()
    for _ in range(20):
        model(dist.torch.ones(1, 2)).sum().backward()
    dist.barrier()
    return store.num_keys() - before, [key for key in ("0", "1") if store.check([f"fastddp/stall/1/{key}"])]


def test_healthy_steps_leave_the_store_alone(ranks: RankPool) -> None:
    assert ranks.run(healthy, 2) == [(0, [])] * 2


@pytest.mark.parametrize(
    ("on_stall", "patience"), [("shout", 1.0), (3, 1.0), ("report", 0), ("report", "long"), ("report", True)]
)
def test_bad_options_are_refused(on_stall: object, patience: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"on_stall must be|stall_patience must be"):
        check_stall_options(on_stall, patience)


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
