"""`fastddp ps`: what it shows of ranks that train, wait, are stopped or gone; and what it refuses."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fastddp import _C
from fastddp.cli.commands import app
from fastddp.watch import live, ps
from repository import ROOT

needs_shared_memory = pytest.mark.skipif(not live.FOLDER.is_dir(), reason="this machine has no /dev/shm")
PATIENCE = 120.0  # seconds, for processes that import torch on a machine that has much else to do
COMMAND = [sys.executable, "-P", "-c", "from fastddp_command import main; main()", "ps"]


def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """Status, output and errors of the command in a process of its own, as behind a pipe."""
    ended = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env={**os.environ, **environment},
    )
    return ended.returncode, ended.stdout, ended.stderr


def invoke(*arguments: object) -> tuple[int, str, str]:
    """The same in this process."""
    result = CliRunner().invoke(app, ["ps", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------- words

AT_REST = live.LiveRank(
    host="node",
    ranks=8,
    rank=3,
    pid=4711,
    wrapper=0,
    process="runs",
    step=12,
    window="reducing",
    doing="backward",
    seconds=4.2,
    bucket=None,
    collectives=(),
    buckets=5,
    missing=(),
    all_came=False,
    runs_user_code=False,
    last_parameter="encoder.weight",
    last_bucket=1,
    step_seconds=(0.5, 0.25, 4.0),
    path="/dev/shm/fastddp-0-4711-0",
)
TWO = ("encoder.layer.1.weight", "encoder.layer.1.bias")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"doing": "nothing", "window": "idle"}, "no forward yet"),
        ({"doing": "forward", "window": "idle"}, "in forward"),
        ({"doing": "forward", "window": "finished"}, "in forward, without gradients"),
        ({"doing": "after_forward", "window": "armed"}, "between forward and backward"),
        ({"doing": "after_forward", "window": "finished"}, "after a forward without gradients"),
        (
            {"bucket": 2, "missing": TWO},
            "in backward: 2 gradients of bucket 2 are missing (encoder.layer.1.weight, ...)",
        ),
        ({"bucket": 2, "missing": ("w",)}, "in backward: 1 gradient of bucket 2 is missing (w)"),
        ({"bucket": 2, "missing": ("a\x1b[2Jb",)}, "in backward: 1 gradient of bucket 2 is missing (a\ufffd[2Jb)"),
        ({"all_came": True}, "in backward: all gradients have come"),
        ({}, "in backward"),
        ({"window": "accumulating"}, "in or after a backward without synchronisation"),
        ({"doing": "tick", "bucket": 2}, "sends bucket 2 of 5"),
        ({"doing": "tick"}, "sends the last buckets"),
        ({"doing": "tick", "bucket": 2, "runs_user_code": True}, "in a communication hook, bucket 2"),
        ({"doing": "tick", "runs_user_code": True}, "in a communication hook"),
        ({"doing": "finish", "bucket": 2}, "waits for bucket 2 of 5"),
        ({"doing": "finish"}, "waits for a bucket"),
        ({"doing": "closing"}, "waits for the end of the step"),
        ({"doing": "after_backward", "window": "finished"}, "between backward and the optimizer"),
        ({"doing": "after_backward", "window": "failed"}, "after a step that failed"),
        (
            {"doing": "after_backward", "window": "partial", "missing": TWO},
            "after a backward without 2 gradients (encoder.layer.1.weight, ...)",
        ),
        ({"doing": "optimizer", "window": "finished"}, "in the optimizer"),
        ({"doing": "after_optimizer", "window": "finished"}, "outside: data loading, evaluation or other code"),
    ],
)
def test_what_a_rank_does_is_said_in_words(changes: dict[str, Any], words: str) -> None:
    assert ps.in_words(replace(AT_REST, **changes)) == words


def test_everything_that_a_page_can_say_has_words() -> None:
    stub = (ROOT / "fastddp" / "_C.pyi").read_text()
    known = re.findall(r'"(\w+)"', stub.split("\nDoing: TypeAlias = Literal[")[1].split("]")[0])
    assert len(known) > 5
    for doing in known:
        assert ps.in_words(replace(AT_REST, doing=doing))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (4.2, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (723, "12 min 3 s"),
        (11100, "3 h 5 min"),
    ],
)
def test_durations_are_said_in_words(seconds: float, words: str) -> None:
    assert ps.duration(seconds) == words


# ------------------------------------------------------------------------------------------------------------ judgement


@pytest.mark.parametrize(
    ("changes", "concern"),
    [
        ({}, None),
        ({"process": "stopped"}, "stopped"),
        ({"process": "gone", "seconds": 1e6}, "gone"),
        ({"process": "uninterruptible"}, None),
        ({"process": "unknown"}, None),
        ({"seconds": 19.9}, None),
        ({"seconds": 20.1}, "long"),  # its longest step took 4 s
        ({"seconds": 9.9, "step_seconds": (0.1,)}, None),
        ({"seconds": 10.1, "step_seconds": (0.1,)}, "long"),
        ({"seconds": 1e6, "step_seconds": ()}, None),  # nothing to compare with: a first step may take any time
    ],
)
def test_who_stands_out(changes: dict[str, Any], concern: str | None) -> None:
    assert replace(AT_REST, **changes).concern == concern


def test_steps_a_second_are_those_of_the_median() -> None:
    assert AT_REST.steps_per_second == 2.0
    assert replace(AT_REST, step_seconds=()).steps_per_second is None


def test_ranks_of_a_job_are_next_to_each_other() -> None:
    def of(ranks: int, rank: int, pid: int, wrapper: int) -> live.LiveRank:
        return replace(AT_REST, ranks=ranks, rank=rank, pid=pid, wrapper=wrapper)

    ordered = [of(2, 0, 9, 0), of(2, 1, 5, 0), of(2, 1, 5, 1), of(2, 1, 6, 0), of(8, 0, 1, 0), of(8, 10, 2, 0)]
    assert list(live.in_order(reversed(ordered))) == ordered


# ---------------------------------------------------------------------------------------------- facts, from a snapshot


def snapshot(**changes: Any) -> Any:
    """Of six parameters in three buckets; the first two have come."""
    came = [True, True, False, False, False, False]
    sent = [SimpleNamespace(lane=0, first=7, last=8)]
    buckets = [SimpleNamespace(members=[2 * i, 2 * i + 1], collectives=sent) for i in range(3)]
    made = SimpleNamespace(
        host="node",
        ranks=8,
        rank=3,
        pid=4711,
        number=0,
        life="runs",
        windows=11,
        state="reducing",
        doing="backward",
        seconds=4.2,
        bucket=0,
        tick=1,
        names=list("abcdef"),
        came=came,
        buckets=buckets,
        runs_user_code=False,
        last_parameter=1,
        step_seconds=[0.5],
    )
    made.__dict__.update(changes)
    made.missing = lambda bucket: [i for i in made.buckets[bucket].members if not made.came[i]]
    return made


@pytest.mark.parametrize(
    ("state", "doing", "step"),
    [
        ("idle", "nothing", 11),
        ("idle", "forward", 12),
        ("idle", "after_forward", 12),
        ("accumulating", "backward", 12),
        ("armed", "after_forward", 12),
        ("reducing", "backward", 12),
        ("partial", "after_backward", 12),
        ("finished", "after_backward", 11),
        ("finished", "forward", 11),  # of an evaluation
        ("failed", "after_backward", 11),
    ],
)
def test_the_step_is_the_window_that_is_open_or_ended_last(state: str, doing: str, step: int) -> None:
    assert live.live_rank(snapshot(state=state, doing=doing), "").step == step


@pytest.mark.parametrize(
    ("changes", "bucket", "missing"),
    [
        ({}, 1, ("c", "d")),
        ({"state": "armed"}, 1, ("c", "d")),
        ({"came": [True, True, False, True, False, False]}, 1, ("c",)),
        ({"came": [True, True, True, True, True, False]}, 2, ("f",)),  # bucket 1 is complete, and about to start
        ({"came": [True] * 6}, None, ()),
        ({"tick": 3}, None, ()),
        ({"state": "accumulating"}, None, ()),
        ({"doing": "finish"}, 0, ()),
        ({"doing": "tick", "bucket": 2}, 2, ()),
        ({"doing": "forward", "state": "armed"}, None, ()),  # its bucket is what an earlier wait was for
        ({"doing": "after_backward", "state": "partial"}, None, ("c", "d", "e", "f")),
        ({"doing": "after_backward", "state": "finished"}, None, ()),
    ],
)
def test_what_is_missing_is_of_the_first_bucket_that_lacks_something(
    changes: dict[str, Any], bucket: int | None, missing: tuple[str, ...]
) -> None:
    rank = live.live_rank(snapshot(**changes), "")
    assert (rank.bucket, rank.missing) == (bucket, missing)


def test_the_collectives_of_a_bucket_are_told_while_it_is_waited_for() -> None:
    assert live.live_rank(snapshot(doing="finish"), "").collectives == (live.Collectives(0, 7, 8),)
    assert live.live_rank(snapshot(), "").collectives == ()
    assert live.live_rank(snapshot(doing="finish", bucket=None), "").collectives == ()


@pytest.mark.parametrize(
    ("last", "name", "bucket"), [(None, None, None), (1, "b", 0), (5, "f", 2)], ids=["none", "first", "last"]
)
def test_the_last_gradient_has_its_bucket(last: int | None, name: str | None, bucket: int | None) -> None:
    rank = live.live_rank(snapshot(last_parameter=last), "")
    assert (rank.last_parameter, rank.last_bucket) == (name, bucket)


# -------------------------------------------------------------------------------------------------- pages of this test


@pytest.fixture
def page() -> _C.Progress:
    """The only one of this process."""
    gc.collect()  # errors of earlier tests keep frames, and those keep pages
    return _C.Progress(["a[red]", "b"], 3, 8)


@needs_shared_memory
@pytest.mark.tier("nightly")
def test_without_a_terminal_it_prints_once(page: _C.Progress) -> None:
    status, out, errors = run(os.getpid())
    assert (status, errors) == (0, "")
    [row] = [line for line in out.splitlines() if str(os.getpid()) in line]
    for cell in ("3 of 8", "runs", "no forward yet"):
        assert cell in row
    assert "\x1b" not in out
    # As in CI, where colours are wanted in a log: rich takes that for a terminal.
    status, out, _ = run(os.getpid(), FORCE_COLOR="1")
    assert (status, out.count("3 of 8")) == (0, 1)


@needs_shared_memory
def test_json_is_one_document_of_plain_values(page: _C.Progress) -> None:
    status, out, errors = run("--once", "--json", os.getpid())
    assert (status, errors) == (0, "")
    document = json.loads(out)
    assert (document["format"], document["version"], document["unreadable"]) == ("fastddp ps", ps.VERSION, [])
    [rank] = document["ranks"]
    assert (rank["rank"], rank["ranks"], rank["pid"], rank["process"]) == (3, 8, os.getpid(), "runs")
    assert (rank["step"], rank["doing"], rank["in_words"]) == (0, "nothing", "no forward yet")
    assert (rank["bucket"], rank["missing"], rank["last_parameter"], rank["steps_per_second"]) == (None, [], None, None)
    assert rank["seconds"] >= 0
    assert rank["path"] == page.path


def test_json_has_all_that_is_known_of_a_rank() -> None:
    of_bucket = replace(AT_REST, bucket=2, missing=TWO, collectives=(live.Collectives(lane=1, first=7, last=8),))
    [rank] = json.loads(ps.as_json(live.Node((of_bucket,))))["ranks"]
    known = asdict(of_bucket)
    assert {name: rank[name] for name in known.keys() & rank.keys()} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in known.items() if name in rank
    }
    assert known.keys() - rank.keys() == {"all_came", "runs_user_code"}  # in_words has them
    assert (rank["steps_per_second"], rank["concern"]) == (2.0, None)


def test_the_page_on_json_names_every_field() -> None:
    text = (ROOT / "docs" / "watch.md").read_text()
    [rank] = json.loads(ps.as_json(live.Node((AT_REST,))))["ranks"]
    assert [name for name in rank if f"`{name}`" not in text] == []


@needs_shared_memory
def test_numbers_choose_processes_and_several_wrappers_are_rows(page: _C.Progress) -> None:
    other = _C.Progress(["c"], 0, 2)
    chosen = live.look([os.getpid()])
    assert [(of.rank, of.ranks) for of in chosen.ranks] == [(0, 2), (3, 8)]
    assert {of.pid for of in chosen.ranks} == {os.getpid()}
    status, out, _ = invoke(os.getpid())
    assert status == 0
    assert "wrapper" in out
    assert out.count(str(os.getpid())) == 2
    assert other.path in {of.path for of in live.look().ranks}


def test_gone_ranks_come_with_a_hint() -> None:
    assert "--remove-gone" in rendered(AT_REST, replace(AT_REST, pid=1, process="gone"))
    assert "--remove-gone" not in rendered(AT_REST)


def test_a_wrapper_has_a_number_only_beside_another_one() -> None:
    assert "wrapper" not in rendered(AT_REST, replace(AT_REST, pid=1))
    assert "wrapper" in rendered(AT_REST, replace(AT_REST, wrapper=1))


def rendered(*ranks: live.LiveRank, width: int = 200, color: bool = False) -> str:
    from rich.console import Console

    console = Console(width=width, force_terminal=color, color_system="standard" if color else None)
    with console.capture() as capture:
        console.print(ps.page(live.Node(ranks)))
    return capture.get()


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"process": "stopped"}, 31), ({"process": "gone"}, 31), ({"seconds": 1e3}, 33), ({}, None)],
    ids=["stopped", "gone", "long", "well"],
)
def test_who_stands_out_is_coloured(changes: dict[str, Any], code: int | None) -> None:
    out = rendered(replace(AT_REST, **changes), color=True)
    assert [number for number in (31, 33) if f"\x1b[{number}m" in out] == ([] if code is None else [code])


def test_a_table_fits_80_columns() -> None:
    long = "encoder.layer.11.attention.output.dense.weight"
    rank = replace(AT_REST, pid=3048211, step=101204, last_parameter=long, bucket=2, missing=(long,), seconds=1e4)
    out = rendered(rank, width=80)
    assert max(map(len, out.splitlines())) <= 80
    for whole in ("3 of 8", "3048211", "101,204", "2 h 46 min", "steps/s", "2.00"):
        assert whole in out


def test_names_are_shown_as_they_are() -> None:
    out = rendered(replace(AT_REST, last_parameter="a[red]b", bucket=2, missing=("[bold]w",)))
    assert "a[red]b" in out
    assert "[bold]w" in out


@pytest.mark.tier("slow")
@needs_shared_memory
def test_a_process_without_a_page_is_an_error_with_a_remedy(page: _C.Progress) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    status, out, errors = run(os.getpid(), gone.pid)
    assert (status, out) == (1, "")
    assert f"There is no process {gone.pid}" in errors
    assert "Name ranks' own processes, not torchrun's" in errors
    assert str(os.getpid()) not in errors
    status, out, errors = invoke("--json", 1)
    assert (status, out) == (1, "")
    assert "Process 1 has no page" in errors


@pytest.mark.parametrize("arguments", [("x",), ("0",), ("--every", "0")])
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments)[0] == 2


def test_no_pages_at_all_is_a_sentence_that_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_C, "shared_pages", list)
    monkeypatch.setattr(ps, "FOLDER", tmp_path)
    assert invoke() == (0, f"{ps.NOTHING}\n", "")
    status, out, _ = invoke("--json")
    assert (status, json.loads(out)["ranks"]) == (0, [])
    monkeypatch.setattr(ps, "FOLDER", tmp_path / "none")
    assert invoke() == (0, f"{ps.NO_SHARED_MEMORY}\n", "")


@pytest.fixture
def spoilt(page: _C.Progress) -> Iterator[Path]:
    """What looks like another page of this process."""
    path = Path(f"{page.path}9999")
    path.write_bytes(Path(page.path).read_bytes())
    yield path
    path.unlink(missing_ok=True)


@needs_shared_memory
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content[:8] + b"\x63" + content[9:], "version 99"),
        (lambda content: content[:40], "too short"),
        (lambda content: content[:-1], "shorter than it says"),
        (lambda content: b"", "too short"),
        (lambda content: content.replace(b"a[red]", b"\xff\xfe\xff\xff\xff\xff"), "no text"),
    ],
    ids=["another version", "a part of the beginning", "without its end", "empty", "names that are none"],
)
def test_a_page_that_cannot_be_read_is_a_line(spoilt: Path, change: Callable[[bytes], bytes], problem: str) -> None:
    spoilt.write_bytes(change(spoilt.read_bytes()))
    node = live.look([os.getpid()])
    assert str(spoilt) not in {of.path for of in node.ranks}
    [unreadable] = node.unreadable
    assert (unreadable.pid, unreadable.path) == (os.getpid(), str(spoilt))
    assert problem in unreadable.problem
    status, out, errors = invoke(os.getpid())
    assert (status, errors) == (0, "")
    assert problem in " ".join(out.split())
    [listed] = json.loads(invoke("--json", os.getpid())[1])["unreadable"]
    assert listed == asdict(unreadable)


@needs_shared_memory
def test_a_window_in_no_known_state_is_a_line(spoilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Torn:
        names: tuple[str, ...] = ()
        doing = "forward"

        @property
        def state(self) -> str:
            raise RuntimeError("no state: 77\nException raised from ...")

    monkeypatch.setattr(_C, "read_progress", lambda path: Torn())
    assert {of.problem for of in live.look([os.getpid()]).unreadable} == {"no state: 77"}


def test_a_page_that_goes_while_it_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_C, "shared_pages", lambda: [str(tmp_path / "fastddp-0-12-0")])
    assert live.look() == live.Node(())


@needs_shared_memory
def test_json_stays_one_document_where_pages_are_removed(page: _C.Progress) -> None:
    status, out, errors = invoke("--json", "--remove-gone", os.getpid())
    assert (status, errors) == (0, "Removed: nothing\n")
    assert len(json.loads(out)["ranks"]) == 1
    assert Path(page.path).exists()


@needs_shared_memory
def test_a_page_is_removed_only_if_its_owner_is_still_gone(page: _C.Progress) -> None:
    """The number of a process may have been given to a new one since it was shown."""
    [rank] = live.look([os.getpid()]).ranks
    assert live.remove_gone([replace(rank, process="gone")]) == []
    assert Path(page.path).exists()


@pytest.mark.tier("slow")
def test_where_the_extension_cannot_be_imported_it_says_so() -> None:
    code = "import sys; sys.modules['fastddp._C'] = None; from fastddp_command import main; main()"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code, "ps"], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("fastddp ps: what ranks say is read by fastddp's extension")
    assert "Traceback" not in ended.stderr


# ----------------------------------------------------------------------------------------------------------- a terminal


@dataclass
class Terminal:
    """The command on a terminal of its own, and all that it has written there."""

    process: subprocess.Popen[bytes]
    end: int
    written: str = ""

    @classmethod
    def start(cls, *arguments: object) -> Terminal:
        end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
            # Where the tests themselves run in the background, Ctrl-C is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(other)
        return cls(process, end)

    def read_until(self, holds: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds(self.written):
            assert time.monotonic() < deadline, self.written
            if select.select([self.end], [], [], 0.1)[0]:
                try:
                    read = os.read(self.end, 65536)
                except OSError:  # the other end was closed
                    read = b""
                assert read, self.written
                self.written += read.decode(errors="replace")

    def rest(self) -> str:
        """What is left, once it has ended."""
        left = b""
        try:
            while read := os.read(self.end, 65536):
                left += read
        except OSError:
            pass
        return left.decode(errors="replace")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.tier("slow")
@needs_shared_memory
def test_on_a_terminal_it_is_renewed_until_ctrl_c(page: _C.Progress) -> None:
    terminal = Terminal.start(os.getpid(), "--every", 0.1)
    try:
        terminal.read_until(lambda written: "3 of 8" in written)
        later = _C.Progress(["c"], 5, 6)
        terminal.read_until(lambda written: "5 of 6" in written)
        del later
        shown = len(terminal.written)
        terminal.read_until(lambda written: "3 of 8" in written[shown:] and "5 of 6" not in written[-300:])
        terminal.process.send_signal(signal.SIGINT)
        # A terminal that nobody reads is full soon, and then who writes to it waits.
        end = terminal.rest()
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.stop()
    assert "Traceback" not in terminal.written + end
    assert "Aborted" not in terminal.written + end


@pytest.mark.tier("slow")
@needs_shared_memory
@pytest.mark.parametrize("option", ["--once", "--remove-gone"])
def test_on_a_terminal_once_is_once(page: _C.Progress, option: str) -> None:
    terminal = Terminal.start(os.getpid(), option)
    try:
        terminal.read_until(lambda written: "3 of 8" in written)
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.stop()


# -------------------------------------------------------------------------------------------------------------- a run

RANK = '''
import sys
import torch, torch.distributed as dist
from torch import nn
import fastddp

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
told = []


def pause(where):
    """Go on when the test says so; after "run" never pause again."""
    if told[-1:] != ["run"]:
        print(where, flush=True)
        told.append(input())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        pause("forward")
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: pause("backward"))
        return self.second(hidden).sum()


model = fastddp.DistributedDataParallel(Net(), bucket_cap_mb=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_pre_hook(lambda *_: pause("optimizer"))
pause("made")
while True:
    loss = model(torch.ones(2, 4))
    pause("between")
    loss.backward()
    pause("after")
    optimizer.step()
    pause("outside")
'''


@dataclass
class Rank:
    """A process that trains from pause to pause."""

    process: subprocess.Popen[str]

    def is_at(self, where: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == where

    def go_on(self, how: str = "") -> None:
        assert self.process.stdin is not None
        print(how, file=self.process.stdin, flush=True)

    def goes_to(self, where: str) -> None:
        self.go_on()
        self.is_at(where)

    @property
    def seen(self) -> live.LiveRank:
        [rank] = live.look([self.process.pid]).ranks
        return rank


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[Rank, Rank]]:
    ranks = [
        Rank(
            subprocess.Popen(
                [sys.executable, "-P", "-c", RANK, str(rank), str(tmp_path / "store")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        for rank in range(2)
    ]
    yield ranks[0], ranks[1]
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()
    for of in live.look([rank.process.pid for rank in ranks]).ranks:
        _C.remove_page(of.path)


@needs_shared_memory
@pytest.mark.tier("nightly")
def test_a_run_is_followed_through_its_steps(job: tuple[Rank, Rank]) -> None:
    for rank in job:
        rank.is_at("made")
    first, second = job
    said = [(first.seen.step, ps.in_words(first.seen))]
    for where in ("forward", "between", "backward"):
        for rank in job:
            rank.goes_to(where)
        said.append((first.seen.step, ps.in_words(first.seen)))
    assert first.seen.last_parameter == "second.weight"
    assert first.seen.last_bucket == 0

    first.go_on()
    until(lambda: first.seen.doing == "finish")
    said.append((first.seen.step, ps.in_words(first.seen)))
    second.goes_to("after")
    first.is_at("after")
    said.append((first.seen.step, ps.in_words(first.seen)))
    for where in ("optimizer", "outside"):
        first.goes_to(where)
        said.append((first.seen.step, ps.in_words(first.seen)))
    assert said == [
        (0, "no forward yet"),
        (1, "in forward"),
        (1, "between forward and backward"),
        (1, "in backward: 1 gradient of bucket 1 is missing (first.weight)"),
        (1, "waits for bucket 1 of 2"),
        (1, "between backward and the optimizer"),
        (1, "in the optimizer"),
        (1, "outside: data loading, evaluation or other code"),
    ]


@pytest.mark.tier("nightly")
@needs_shared_memory
def test_ranks_that_wait_are_stopped_or_killed(job: tuple[Rank, Rank]) -> None:
    pids = [rank.process.pid for rank in job]
    for rank in job:
        rank.is_at("made")
        rank.go_on("run")
    until(lambda: all(len(of.step_seconds) > 2 for of in live.look(pids).ranks))
    first, second = live.look(pids).ranks
    assert (first.rank, second.rank, first.process) == (0, 1, "runs")
    assert first.steps_per_second is not None

    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: job[1].seen.process == "stopped" and job[0].seen.doing in ("finish", "closing"))
    status, out, _ = run("--json", *pids)
    waits, stopped = json.loads(out)["ranks"]
    assert (status, waits["process"], stopped["process"]) == (0, "runs", "stopped")
    # What is left of the step when rank 1 stops: a bucket, or what follows the buckets.
    assert waits["in_words"] in (f"waits for bucket {waits['bucket']} of 2", "waits for the end of the step")
    assert (waits["concern"], stopped["concern"]) in ((None, "stopped"), ("long", "stopped"))
    os.kill(pids[1], signal.SIGCONT)
    step = waits["step"]
    until(lambda: job[0].seen.step > step + 2)

    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    job[1].process.wait()
    status, out, errors = run("--remove-gone", *pids)
    assert (status, errors) == (0, "")
    assert "stopped" in out
    assert "gone" in out
    assert f"Removed: /dev/shm/fastddp-{os.geteuid()}-{pids[1]}-" in out
    assert [of.pid for of in live.look(pids).ranks] == pids[:1]
    assert run(pids[1])[0] == 1
