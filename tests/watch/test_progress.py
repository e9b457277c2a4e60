"""A rank's page says what the rank is doing: to other threads, to other processes, and when the rank is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C
from ranks import RankPool

needs_shared_memory = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")


@pytest.fixture
def page() -> _C.Progress:
    return _C.Progress(["a", "b", "c"], 3, 8)


def test_a_page_says_whose_it_is(page: _C.Progress) -> None:
    seen = page.read()
    assert (seen.pid, seen.rank, seen.ranks, seen.names) == (os.getpid(), 3, 8, ["a", "b", "c"])
    assert (seen.doing, seen.life, seen.windows, seen.bucket, seen.last_parameter) == ("nothing", "runs", 0, None, None)


@needs_shared_memory
def test_a_page_is_for_its_user_alone_and_goes_with_its_owner() -> None:
    page = _C.Progress(["a"], 0, 1)
    path = Path(page.path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert page.path in _C.shared_pages()
    del page
    assert not path.exists()


@needs_shared_memory
def test_pages_of_one_process_are_found_by_its_number(page: _C.Progress) -> None:
    beside = Path(f"{page.path.rpartition('-')[0]}1-0")  # of a process whose number begins with the same digits
    beside.write_bytes(b"")
    try:
        assert page.path in _C.shared_pages(os.getpid())
        assert str(beside) not in _C.shared_pages(os.getpid())
        assert {page.path, str(beside)} <= set(_C.shared_pages())
    finally:
        beside.unlink()


WITHOUT_FILES = """
import resource
from fastddp import _C
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
pages = [_C.Progress(["a"], 0, 1) for _ in range(2)]
print(*(repr(page.path) for page in pages), *(page.read().names[0] for page in pages))
"""


@pytest.mark.tier("slow")
@needs_shared_memory
def test_where_no_page_can_be_shared_one_line_says_so() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, check=True)
    assert ended.stdout == "'' '' a a\n"  # training goes on with pages of its own
    (line,) = [line for line in ended.stderr.splitlines() if "fastddp" in line]
    assert "no status can be kept in /dev/shm (File too large)" in line
    assert "`fastddp ps`" in line


KEPT_FOR_GOOD = """
import ctypes, sys
from fastddp import _C
page = _C.Progress(["w"], 1, 2)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
print(page.path)
sys.exit(3)
"""


@pytest.mark.tier("slow")
@needs_shared_memory
def test_a_process_that_ends_takes_pages_along_that_nobody_destroys() -> None:
    ended = subprocess.run([sys.executable, "-P", "-c", KEPT_FOR_GOOD], capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    path = Path(ended.stdout.strip())
    assert path.parent == Path("/dev/shm")
    assert not path.exists()


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


@needs_shared_memory
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:40], "too short"),
        (lambda content: content[:-1], "shorter than it says"),
        (lambda content: b"\0" * 8 + content[8:], "no page of a rank"),
        (lambda content: content[:8] + b"\x63" + content[9:], "version 99"),
    ],
    ids=["a part of the beginning", "without its end", "not written yet", "another version"],
)
def test_what_is_no_page_is_refused(
    page: _C.Progress, change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "page"
    file.write_bytes(change(Path(page.path).read_bytes()))
    with pytest.raises(RuntimeError, match=message):
        _C.read_progress(str(file))


def test_a_page_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nowhere: No such file"):
        _C.read_progress(str(tmp_path / "nowhere"))


# ------------------------------------------------------------------------------------------------- what training writes


class Watched(nn.Module):
    """Says in forward, and in backward, what the page says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.page: _C.Progress | None = None
        self.seen: list[_C.Snapshot] = []

    def look(self, *_: Any) -> None:
        if self.page is not None:
            self.seen.append(self.page.read())

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(self.look)
        return self.second(hidden).sum()


def moments(rank: int) -> list[tuple[str, str, int]]:
    """What is done, state and number of windows: before, in and behind each part of two steps."""
    module = Watched()
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(module.look)
    module.page = model.reducer.progress
    for _ in range(2):
        module.look()
        loss = model(torch.ones(2, 4))
        module.look()
        loss.backward()
        module.look()
        optimizer.step()
    module.look()
    with torch.no_grad():
        model(torch.ones(2, 4))
    return [(seen.doing, seen.state, seen.windows) for seen in module.seen]


def test_a_page_tells_what_a_rank_is_doing(ranks: RankPool) -> None:
    for seen in ranks.run(moments, 2):
        step = [
            ("forward", "idle", 0),
            ("after_forward", "armed", 0),
            ("backward", "reducing", 0),
            ("after_backward", "finished", 1),
            ("optimizer", "finished", 1),
        ]
        second = [(doing, state, windows + 1) for doing, state, windows in step]
        assert seen == [
            ("nothing", "idle", 0),
            *step,
            ("after_optimizer", "finished", 1),
            *second,
            ("after_optimizer", "finished", 2),
            ("forward", "finished", 2),
        ]


def gradients(rank: int) -> tuple[list[str], list[str], list[list[int]], list[bool]]:
    """In the middle of backward: what has come, what is missing, and who shares a bucket; and what came in the end."""
    module = Watched()
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0)
    loss = model(torch.ones(2, 4))
    module.page = model.reducer.progress
    loss.backward()
    [seen] = module.seen
    came = [name for name, has in zip(seen.names, seen.came, strict=True) if has]
    missing = [seen.names[i] for bucket in range(len(seen.buckets)) for i in seen.missing(bucket)]
    [second, first] = seen.buckets
    assert second.started is not None
    assert first.ready is first.started is first.arrived is None
    assert second.bytes == 64
    after = module.page.read()
    assert (after.gradients, after.tick, after.finished) == (2, 2, 2)
    return came, missing, [bucket.members for bucket in seen.buckets], after.came


def test_a_page_names_what_is_missing(ranks: RankPool) -> None:
    for came, missing, members, after in ranks.run(gradients, 2):
        assert (came, missing, members) == (["second.weight"], ["first.weight"], [[1], [0]])
        assert after == [False, False]  # of the window that comes next


def waits(rank: int) -> tuple[str, int | None, float] | None:
    """What rank 0's page says while rank 1 sleeps in its forward; and that it says so no more, afterwards."""
    model = fastddp.DistributedDataParallel(nn.Linear(4, 4))
    progress = model.reducer.progress
    found: list[_C.Snapshot] = []

    def look() -> None:
        until(lambda: progress.read().doing == "finish" and progress.read().seconds > 0.2)
        found.append(progress.read())
        store.set("seen", "")

    store = dist.distributed_c10d._get_default_store()
    looks = threading.Thread(target=look)
    loss = model(torch.ones(2, 4)).sum()
    if rank == 1:
        store.wait(["seen"])
        loss.backward()
        return None
    looks.start()
    loss.backward()
    looks.join()
    assert progress.waiting() is None
    [seen] = found
    return seen.doing, seen.bucket, seen.seconds


def test_a_page_tells_what_a_rank_waits_for_and_since_when(ranks: RankPool) -> None:
    (doing, bucket, seconds), _ = ranks.run(waits, 2)
    assert (doing, bucket) == ("finish", 0)
    assert seconds > 0.2


def in_a_hook(rank: int) -> tuple[str, bool]:
    model = fastddp.DistributedDataParallel(nn.Linear(4, 4))
    seen: list[_C.Snapshot] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(model.reducer.progress.read())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    model(torch.ones(2, 4)).sum().backward()
    return seen[0].doing, seen[0].runs_user_code


def test_a_page_tells_that_a_users_hook_runs(ranks: RankPool) -> None:
    assert ranks.run(in_a_hook, 2) == [("tick", True)] * 2


def sequences(rank: int) -> list[int | None]:
    model = fastddp.DistributedDataParallel(nn.Linear(4, 4))
    seen = []
    for step in range(5):  # at the second one ranks agree on buckets
        if step == 4:
            dist.all_reduce(torch.ones(1))
        model(torch.ones(2, 4)).sum().backward()
        seen.append(model.reducer.progress.read().sequence)
    return seen


def test_a_page_counts_the_collectives_of_its_group(ranks: RankPool) -> None:
    """So that ranks can see that one of them has called another one in between."""
    for *_, before, last, one_more in ranks.run(sequences, 2):
        assert one_more - last == last - before + 1


def durations(rank: int) -> int:
    model = fastddp.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(40):
        model(torch.ones(2, 4)).sum().backward()
    steps = model.reducer.progress.read().step_seconds
    assert all(seconds > 0 for seconds in steps)
    return len(steps)


def test_a_page_has_the_times_of_the_last_steps(ranks: RankPool) -> None:
    assert ranks.run(durations, 2) == [15, 15]
