"""A rank's page says what the rank is doing: to other threads, to other processes, and when the rank is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C, _pages
from fastddp.ranks import lanes
from file_kinds import FILE_KINDS
from hooks_by_name import register
from on_ranks import on_ranks

needs_shared_memory = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")


@needs_shared_memory
def test_a_page_is_for_its_user_alone_is_found_by_its_process_and_goes_with_its_owner() -> None:
    page = _C.Progress(["a"], 0, 1)
    path = Path(page.path)
    assert path.stat().st_mode & 0o777 == 0o600
    beside = Path(f"{page.path.rpartition('-')[0]}1-0")  # of a process whose number begins with the same digits
    beside.write_bytes(b"")
    try:
        assert {str(path), str(beside)} <= set(_pages.shared_pages())
        assert str(path) in _pages.shared_pages(os.getpid())
        assert str(beside) not in _pages.shared_pages(os.getpid())
    finally:
        beside.unlink()
    del page
    assert not path.exists()


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
    process = subprocess.run([sys.executable, "-P", "-c", WITHOUT_FILES], capture_output=True, text=True, check=False)
    assert process.stdout == "'' '' a a\n"  # training goes on with pages of its own
    (line,) = [line for line in process.stderr.splitlines() if "fastddp" in line]
    assert "no status can be kept in /dev/shm (File too large)" in line


@needs_shared_memory
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:40], "too short"),
        (lambda content: content[:-1], "shorter than it says"),
        (lambda content: b"\0" * 8 + content[8:], "no page of a rank"),  # not written yet
        (None, "page: No such file"),
    ],
)
def test_what_is_no_page_is_refused(change: Callable[[bytes], bytes] | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "page"
    if change is not None:
        page = _C.Progress(["a", "b", "c"], 3, 8)
        file.write_bytes(change(Path(page.path).read_bytes()))
    with pytest.raises(RuntimeError, match=message):
        _pages.read_page(str(file))


# What opens a page from /dev/shm opens it so; there a pipe would stop whoever does not know.
@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_file_of_any_kind_in_place_of_a_page_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "fastddp-0-1-0"
    FILE_KINDS[kind](path)
    with pytest.raises(RuntimeError, match=f"^fastddp: (cannot read )?{path}"):
        _pages.read_page(str(path))
    assert _pages.life_of_owner(str(path)) == "unknown"


@needs_shared_memory
def test_a_page_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    page = _C.Progress([f"a parameter with a long name, number {i}" for i in range(1000)], 0, 1)
    content, file = Path(page.path).read_bytes(), tmp_path / "page"
    file.write_bytes(content)
    found = set()
    ended = threading.Event()

    def cut() -> None:
        while not ended.is_set():
            for size in (0, 40, len(content) // 2):
                os.truncate(file, size)
                with file.open("r+b") as whole:
                    whole.write(content)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        while not {"read", "cut"} <= found:
            try:
                found.add("read" if len(_pages.read_page(str(file)).names) == 1000 else "spoilt")
            except RuntimeError:
                found.add("cut")
    finally:
        ended.set()
        thread.join()
    assert found == {"read", "cut"}


@needs_shared_memory
def test_a_name_that_no_page_has_is_passed_over() -> None:
    page = _C.Progress(["a"], 0, 1).path
    odd = Path(page.rpartition("-")[0] + os.fsdecode(b"-\xff\x1b[31m"))  # no text, and what colours a terminal
    odd.touch()
    try:
        assert {path for path in _pages.shared_pages() if path.startswith(page[:-1])} <= {page}
    finally:
        odd.unlink()


@on_ranks(2)
def test_a_page_tells_what_a_rank_is_doing_and_which_gradients_are_missing(rank: int) -> None:
    seen: list[_pages.Snapshot] = []
    first, second = (nn.Linear(4, 4, bias=False) for _ in range(2))
    model = fastddp.DistributedDataParallel(nn.Sequential(first, second), bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def look(*_: Any) -> None:
        seen.append(model.reducer.progress.read())

    def look_in_backward(module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(look)

    model.module.register_forward_pre_hook(look)
    first.register_forward_hook(look_in_backward)
    optimizer.register_step_pre_hook(look)
    for _ in range(2):
        look()
        loss = model(torch.ones(2, 4)).sum()
        look()
        loss.backward()
        look()
        optimizer.step()
    look()
    with torch.no_grad():
        model(torch.ones(2, 4))

    step = ["forward idle", "after_forward armed", "backward reducing"]
    ended = ["after_backward finished", "optimizer finished", "after_optimizer finished"]
    found = [f"{of.doing} {of.state}" for of in seen]
    assert found == ["nothing idle", *step, *ended, *step, *ended, "forward finished"]
    assert [of.windows for of in seen] == [0] * 4 + [1] * 6 + [2] * 4
    within, after = seen[3:5]
    last, other = within.buckets
    assert [within.names[i] for i in last.members] == ["1.weight"]
    assert [within.missing(bucket) for bucket in range(2)] == [[], other.members]
    assert within.came == [False, True]
    assert last.started is not None
    assert other.started is None
    assert last.bytes == 64
    assert (after.gradients, after.tick, after.finished) == (2, 2, 2)
    assert after.came == [False, False]  # of the window that comes next
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    assert [of.doing for of in seen[-2:]] == ["forward", "backward"]


@on_ranks(2)
def test_a_page_has_the_times_of_steps_and_tells_that_a_hook_runs(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(4, 4))
    page = model.reducer.progress
    in_hook = set()

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen = page.read()
        in_hook.add((seen.doing, seen.runs_user_code))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
    assert len(page.read().step_seconds) == 15
    assert min(page.read().step_seconds) > 0
    assert in_hook == {("tick", True)}


# Of a collective: lane, and the flight recorder's group and number of elements.
MAIN, SECOND = (0, "default_pg"), (1, "fastddp lane 2 of 2")


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        ("none", [(*MAIN, 99), (*SECOND, 63), (*MAIN, 35)]),
        ("python", [(*MAIN, 99), (*MAIN, 63), (*MAIN, 35)]),
        ("fp16, sums in fp32", []),  # messages between pairs of ranks
    ],
)
@on_ranks(2)
def test_a_buckets_numbers_are_those_of_the_recorder(
    rank: int, exchange: str, expected: list[tuple[int, str, int]]
) -> None:
    """Layers are a bucket each, and all but the first one have been sent."""
    seen: list[_pages.Snapshot] = []

    def look(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.append(model.reducer.progress.read()))

    net = nn.Sequential(*(nn.Linear(size, size + 2, bias=False) for size in (3, 5, 7, 9)))
    net[0].register_forward_hook(look)
    with mock.patch.multiple(lanes, _ENOUGH_BYTES=1, _LARGE_BUCKET_BYTES=1):
        model = fastddp.DistributedDataParallel(net, bucket_cap_mb=0)
        register(model, exchange)
        for _ in range(4):
            model(torch.ones(1, 3)).sum().backward()
    groups = lanes.lanes_for(model.process_group, torch.device("cpu"))
    recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]  # type: ignore[attr-defined]
    entries = {(entry["process_group"][0], entry["collective_seq_id"]): entry for entry in recorded}
    found = []
    for bucket in seen[-1].buckets:
        for of in bucket.collectives:
            for number in range(of.first, of.last + 1):
                entry = entries[groups[of.lane].group_name, number]
                found.append((of.lane, entry["process_group"][1], entry["input_sizes"][0][0]))
    assert found == expected
