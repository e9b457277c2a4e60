"""`fastddp ps`: what it shows of ranks that train, wait, are stopped or gone; and what it refuses."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fastddp import _C, _pages
from fastddp.tools.commands import app
from fastddp.tools.ps import command, live, printing
from repository import ROOT

needs_shared_memory = pytest.mark.skipif(not live.FOLDER.is_dir(), reason="this machine has no /dev/shm")


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Status, output and errors."""
    result = CliRunner().invoke(app, ["ps", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def snapshot(doing: str = "backward", state: str = "reducing", **changes: Any) -> Any:
    """Of six parameters in three buckets; the first two have come."""
    sent = [SimpleNamespace(lane=0, first=7, last=8)]
    buckets = [SimpleNamespace(members=[2 * i, 2 * i + 1], collectives=sent) for i in range(3)]
    of_whom = {"host": "node", "ranks": 8, "rank": 3, "pid": 4711, "number": 0, "life": "runs"}
    of_whom |= {"job": 77, "script": "/home/anna/train.py", "start": 100, "generation": 0}
    what = {"windows": 11, "state": state, "doing": doing, "seconds": 4.2, "bucket": 0, "tick": 1}
    names = {"names": list("abcdef"), "came": [True] * 2 + [False] * 4, "buckets": buckets, "last_parameter": 1}
    rest = {"runs_user_code": False, "step_seconds": [0.5, 0.25, 4.0]}
    made = SimpleNamespace(**of_whom | what | names | rest | changes)
    made.missing = lambda bucket: [i for i in made.buckets[bucket].members if not made.came[i]]
    return made


OPEN, ENDED, NOTHING = {"step": 12}, {"step": 11}, {"bucket": None, "missing": (), "collectives": ()}
C_AND_D, ONLY_F = {"bucket": 1, "missing": ("c", "d")}, {"bucket": 2, "missing": ("f",)}
ALL_BUT_F = [True] * 5 + [False]
SENT = (live.Collectives(0, 7, 8),)


@pytest.mark.parametrize(
    ("doing", "state", "changes", "facts", "words"),
    [
        # The step is the window that is open, or ended last.
        ("forward", "idle", {}, OPEN | NOTHING, "in forward"),
        ("forward", "finished", {}, ENDED, "in forward, without gradients"),  # of an evaluation
        ("after_forward", "idle", {}, OPEN, "between forward and backward"),
        ("after_forward", "finished", {}, ENDED, "after a forward without gradients"),
        ("backward", "accumulating", {}, OPEN | NOTHING, "in a backward without synchronisation"),
        ("after_backward", "accumulating", {}, OPEN, "after a backward without synchronisation"),
        ("after_backward", "failed", {}, ENDED, "after a step that failed"),
        ("after_backward", "finished", {}, ENDED | NOTHING, "between backward and the optimizer"),
        ("optimizer", "finished", {}, ENDED, "in the optimizer"),
        ("after_optimizer", "finished", {}, ENDED, "outside: data loading, evaluation or other code"),
        # What is missing is of the first bucket that lacks something.
        ("after_backward", "partial", {}, {"missing": tuple("cdef")}, "after a backward without 4 gradients (c, ...)"),
        ("backward", "reducing", {}, OPEN | C_AND_D, "in backward: 2 gradients of bucket 1 are missing (c, ...)"),
        ("backward", "reducing", {"came": ALL_BUT_F}, ONLY_F, "in backward: 1 gradient of bucket 2 is missing (f)"),
        ("backward", "reducing", {"came": [True] * 6}, NOTHING, "in backward: all gradients have come"),
        ("tick", "reducing", {"bucket": 2}, {"bucket": 2, "missing": ()}, "sends bucket 2 of 3"),
        ("tick", "reducing", {"runs_user_code": True}, {"bucket": 0}, "in a communication hook, bucket 0"),
        # Collectives are told of a bucket that is waited for.
        ("finish", "reducing", {}, {"bucket": 0, "collectives": SENT}, "waits for bucket 0 of 3"),
        ("closing", "reducing", {}, OPEN, "waits for the end of the step"),
        # Parameters are waited for after a step, or in the next forward.
        ("gather", "finished", {}, ENDED | {"bucket": 0, "collectives": ()}, "waits for parameters of bucket 0 of 3"),
        ("gather", "idle", {"bucket": 2}, OPEN | {"bucket": 2}, "waits for parameters of bucket 2 of 3"),
        # The last gradient has its bucket.
        ("forward", "idle", {"last_parameter": None}, {"last_parameter": None, "last_bucket": None}, "in forward"),
        ("forward", "idle", {"last_parameter": 5}, {"last_parameter": "f", "last_bucket": 2}, "in forward"),
    ],
)
def test_what_a_snapshot_comes_to(
    doing: str, state: str, changes: dict[str, Any], facts: dict[str, Any], words: str
) -> None:
    rank = live.live_rank(snapshot(doing=doing, state=state, **changes), "")
    assert {name: getattr(rank, name) for name in facts} == facts
    assert printing.in_words(rank) == words


AT_REST = live.live_rank(snapshot(tick=3), "/dev/shm/fastddp-0-4711-0")


@pytest.mark.parametrize(
    ("changes", "concern"),
    [
        ({}, None),
        ({"process": "stopped"}, "stopped"),
        ({"process": "gone", "seconds": 1e6}, "gone"),
        ({"seconds": 19.9}, None),
        ({"seconds": 20.1}, "long"),  # its longest step took 4 s
        ({"seconds": 9.9, "step_seconds": (0.1,)}, None),
        ({"seconds": 1e6, "step_seconds": ()}, None),  # nothing to compare with: a first step may take any time
    ],
)
def test_who_stands_out_is_coloured(changes: dict[str, Any], concern: str | None) -> None:
    rank = replace(AT_REST, **changes)
    assert rank.concern == concern
    out = rendered(rank, color=True)
    colour = {"stopped": 31, "gone": 31, "long": 33}
    assert [number for number in (31, 33) if f"\x1b[{number}m" in out] == ([colour[concern]] if concern else [])
    assert ("--remove-gone" in out) == (concern == "gone")


def rendered(*ranks: live.LiveRank, width: int = 200, color: bool = False, unreadable: Any = (), **how: Any) -> str:
    console = Console(width=width, force_terminal=color, color_system="standard" if color else None)
    with console.capture() as capture:
        console.print(printing.page(live.Node(ranks, unreadable), **how))
    return capture.get()


def test_processes_that_share_a_model_are_a_job() -> None:
    """Job, rank, process and wrapper of each; rank 0 of the first job has two models."""
    first = [(1, 0, 5, 0), (2, 0, 5, 1), (1, 1, 6, 0), (2, 1, 6, 1)]
    later, unsaid = [(3, 0, 7, 0), (3, 1, 8, 0)], [(0, 0, 9, 0)]
    ranks = [
        replace(AT_REST, job=job, rank=rank, pid=pid, wrapper=wrapper, started=float(pid), ranks=2, step=pid)
        for job, rank, pid, wrapper in [*unsaid, *later, *first]
    ]
    jobs = live.in_jobs(ranks)
    found = [sorted((of.job, of.rank, of.pid, of.wrapper) for of in job) for job in jobs]
    assert found == [sorted(first), later, unsaid]
    said = printing.heading(jobs[0])
    for part in ("train.py", "2 of 2 ranks on node", "step 5 to 6"):
        assert part in said
    assert "1 of 2 ranks" in printing.heading(jobs[2])


def test_what_is_left_of_processes_that_are_gone_shares_a_line() -> None:
    gone = replace(AT_REST, process="gone", started=1.0)
    ranks = (gone, replace(gone, job=78, pid=1, started=2.0), replace(AT_REST, job=79, pid=2, started=3.0))
    spoilt = (live.Unreadable(1, "gone", "of version 5", "a"), live.Unreadable(2, "runs", "of version 4", "b"))
    for with_gone in (False, True):
        out = rendered(*ranks, unreadable=spoilt, with_gone=with_gone)
        assert "of version 4" in out
        assert (out.count("steps/s"), "of version 5" in out) == ((3, True) if with_gone else (1, False))
        for folded in ("2 jobs that ended in haste (train.py)", "1 status file"):
            assert (folded in out) == (not with_gone)


def test_a_table_fits_80_columns_and_shows_names_as_they_are() -> None:
    long = "encoder.layer.11.attention.output.dense.weight"
    rank = replace(AT_REST, pid=3048211, step=101204, last_parameter=long, bucket=2, missing=(long,), seconds=11100)
    out = rendered(rank, width=80)
    assert max(map(len, out.splitlines())) <= 80
    for whole in ("3 of 8", "3048211", "101,204", "3 h 5 min", "steps/s", "2.00"):
        assert whole in out
    name = "a[red]\x1b[2Jb"
    out = rendered(replace(AT_REST, last_parameter=name, bucket=2, missing=(name,)))
    assert out.count("a[red]\ufffd[2Jb") == 2


def test_json_has_all_that_is_known_of_a_rank_and_its_page_names_every_field() -> None:
    of_bucket = replace(AT_REST, bucket=2, missing=("a", "b"), collectives=SENT)
    document = json.loads(printing.as_json(live.Node((of_bucket,))))
    assert (document["format"], document["version"], document["unreadable"]) == ("fastddp ps", printing.VERSION, [])
    [rank] = document["ranks"]
    known = json.loads(json.dumps(asdict(of_bucket)))
    assert {name: rank[name] for name in known.keys() & rank.keys()}.items() <= known.items()
    assert known.keys() - rank.keys() == {"all_came", "runs_user_code"}  # in_words has them
    assert (rank["steps_per_second"], rank["concern"]) == (2.0, None)  # by the median of its steps
    assert replace(AT_REST, step_seconds=()).steps_per_second is None
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in rank if f"`{name}`" not in text] == []


@pytest.fixture
def page() -> _C.Progress:
    """The only one of this process."""
    gc.collect()  # errors of earlier tests keep frames, and those keep pages
    return _C.Progress(["a[red]", "b"], 3, 8)


def test_no_pages_at_all_is_a_sentence_that_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_pages, "shared_pages", list)
    monkeypatch.setattr(printing, "FOLDER", tmp_path)
    assert invoke() == (0, f"{printing.NOTHING}\n", "")
    assert json.loads(invoke("--json")[1])["ranks"] == []
    monkeypatch.setattr(printing, "FOLDER", tmp_path / "none")
    assert invoke() == (0, f"{printing.NO_SHARED_MEMORY}\n", "")
    # A page that goes while it is read is left out.
    monkeypatch.setattr(_pages, "shared_pages", lambda: [str(tmp_path / "fastddp-0-12-0")])
    assert live.look() == live.Node(())


@needs_shared_memory
def test_numbers_choose_processes_and_several_wrappers_are_rows(
    page: _C.Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, errors = invoke(os.getpid())
    assert (status, errors, out.count("3 of 8"), out.count("no forward yet")) == (0, "", 1, 1)
    assert "\x1b" not in out
    assert "wrapper" not in out
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in CI, where colours are wanted in a log: rich takes it for a terminal
    other = _C.Progress(["c"], 0, 2)
    chosen = live.look([os.getpid()]).ranks
    assert [(of.rank, of.ranks, of.pid) for of in chosen] == [(0, 2, os.getpid()), (3, 8, os.getpid())]
    status, out, _ = invoke(os.getpid())
    assert status == 0
    assert "wrapper" in out
    assert (out.count("3 of 8"), out.count("0 of 2")) == (1, 1)
    assert {other.path, page.path} <= {of.path for of in live.look().ranks}


@needs_shared_memory
def test_a_process_without_a_page_is_an_error_with_a_remedy(page: _C.Progress) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for earlier in live.FOLDER.glob(f"fastddp-*-{gone.pid}-*"):  # of a killed process that had this number
        earlier.unlink()
    status, out, errors = invoke(os.getpid(), gone.pid)
    assert (status, out) == (1, "")
    assert f"There is no process {gone.pid}" in errors
    assert "Name ranks' own processes, not torchrun's" in errors
    assert str(os.getpid()) not in errors
    status, out, errors = invoke("--json", 1)
    assert (status, out) == (1, "")
    assert "Process 1 has no status file" in errors


@needs_shared_memory
def test_a_page_that_cannot_be_read_is_a_line(page: _C.Progress) -> None:
    spoilt = Path(f"{page.path}9999")  # what looks like another page of this process
    content = Path(page.path).read_bytes()
    spoilt.write_bytes(content[:8] + bytes([99]) + content[9:])
    try:
        node = live.look([os.getpid()])
        assert [of.path for of in node.ranks] == [page.path]
        [unreadable] = node.unreadable
        assert (unreadable.pid, unreadable.path) == (os.getpid(), str(spoilt))
        assert "version 99" in unreadable.problem
        status, out, errors = invoke(os.getpid())
        assert (status, errors) == (0, "")
        assert "version 99" in " ".join(out.split())
        assert json.loads(invoke("--json", os.getpid())[1])["unreadable"] == [asdict(unreadable)]
    finally:
        spoilt.unlink()


@needs_shared_memory
def test_a_link_in_place_of_a_page_is_a_line_and_is_not_followed(page: _C.Progress) -> None:
    """Whoever made it may have no right to go where it leads, or lead where this user has none."""
    link = Path(f"{page.path}9999")
    link.symlink_to("nothing")
    try:
        assert [of.path for of in live.look([os.getpid()]).unreadable] == [str(link)]
    finally:
        link.unlink()


@needs_shared_memory
def test_a_page_is_removed_only_if_its_owner_is_still_gone(page: _C.Progress) -> None:
    """The number of a process may have been given to a new one since it was shown."""
    status, out, errors = invoke("--json", "--remove-gone", os.getpid())
    assert (status, errors, len(json.loads(out)["ranks"])) == (0, "Removed: nothing\n", 1)
    [rank] = live.look([os.getpid()]).ranks
    assert live.remove_gone(live.Node((replace(rank, process="gone"),))) == []
    assert Path(page.path).exists()


@needs_shared_memory
def test_the_next_process_removes_what_killed_ones_have_left_but_of_jobs_that_go_on(page: _C.Progress) -> None:
    page.belongs_to(41, "train.py")
    left = {}
    for job in (0, 41, 42):
        code = f"page = _C.Progress(['w'], 1, 2); page.belongs_to({job}); print(page.path, flush=True)"
        code = f"from fastddp import _C; {code}; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        left[job] = Path(subprocess.run([sys.executable, "-P", "-c", code], stdout=-1, text=True).stdout.strip())
    _pages.remove_left_pages()
    assert {job: path.exists() for job, path in left.items()} == {0: False, 41: True, 42: False}
    assert Path(page.path).exists()
    left[41].unlink()


@needs_shared_memory
def test_a_rank_that_was_stopped_and_killed_is_shown_and_its_page_removed(page: _C.Progress) -> None:
    page.belongs_to(43)  # a job that goes on, else any process that starts now would remove the page
    owner = "page = _C.Progress(['w'], 1, 2); page.belongs_to(43); print(page.path, flush=True); input()"
    owner = f"from fastddp import _C; {owner}"
    process = subprocess.Popen([sys.executable, "-P", "-c", owner], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    os.kill(process.pid, signal.SIGSTOP)
    while _pages.read_page(path).life != "stopped":
        time.sleep(0.01)
    process.kill()
    process.wait()
    left = _pages.read_page(path)
    assert (left.life, left.rank, left.names) == ("gone", 1, ["w"])
    status, out, errors = invoke("--remove-gone", process.pid)
    assert (status, errors) == (0, "")
    assert "gone" in out
    assert f"Removed: {path}" in out
    assert live.look([process.pid]).ranks == ()
    assert invoke(process.pid)[0] == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@needs_shared_memory
def test_on_a_terminal_it_is_renewed_until_ctrl_c(page: _C.Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    seen: list[str] = []
    pages: list[_C.Progress] = []

    def pause(seconds: float) -> None:
        seen.append(screen.getvalue())
        screen.truncate(screen.seek(0))
        if len(seen) == 3:
            raise KeyboardInterrupt
        pages.clear() if pages else pages.append(_C.Progress(["c"], 5, 6))

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=pause))
    command.ps([os.getpid()], watch=True)
    assert [("3 of 8" in shown, "5 of 6" in shown) for shown in seen] == [(True, False), (True, True), (True, False)]
    seen.clear()
    for remove_gone in (False, True):
        command.ps([os.getpid()], remove_gone=remove_gone)
    assert not seen
    assert screen.getvalue().count("3 of 8") >= 2
