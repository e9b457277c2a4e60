"""torchrun's error file: what it shows of a rank that has failed holds what fastddp knows."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure

from fastddp import Corruption, CorruptionError
from fastddp.errors import see
from fastddp.watch.error_file import leave_reports
from repository import TESTS

STALL = json.dumps({"version": 1, "step": 7, "message": "fastddp: step 7 stands still."})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delattr(sys, "last_value", raising=False)
    return tmp_path / "error.json"


def dies_of(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the interpreter leaves it behind when it has printed an exception that nobody caught."""
    try:
        raise error
    except BaseException as raised:
        monkeypatch.setattr(sys, "last_value", raised, raising=False)


def shown(file: Path) -> str:
    """What torchrun shows."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    message: Any = failure.message
    assert failure.timestamp > 1e9
    return message["extraInfo"]["py_callstack"]


def test_a_report_follows_the_exception_and_not_said_twice(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies_of(ConnectionError("closed by peer"), monkeypatch)
    leave_reports([STALL, "", STALL])
    calls, _, rest = shown(file).partition("ConnectionError: closed by peer\n")
    assert "dies_of" in calls
    assert rest == "\nfastddp: step 7 stands still."
    assert json.loads(file.read_text())["fastddp"] == {"stalls": [json.loads(STALL)], "corruptions": []}
    file.unlink()
    dies_of(RuntimeError("fastddp: step 7 stands still."), monkeypatch)
    leave_reports([STALL])
    assert shown(file).count("step 7 stands still") == 1


def test_what_torch_has_recorded_stays_and_the_report_is_added(file: Path) -> None:
    ErrorHandler().record_exception(ConnectionError("closed by peer"))
    before = json.loads(file.read_text())["message"]
    leave_reports([STALL])
    after = json.loads(file.read_text())["message"]
    assert after["message"] == before["message"] == "ConnectionError: closed by peer"
    assert after["extraInfo"]["timestamp"] == before["extraInfo"]["timestamp"]
    assert shown(file).endswith("fastddp: step 7 stands still.")


def test_wrong_numbers_are_found_after_another_exception(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("while it was saved")
    error.__context__ = CorruptionError(Corruption("replicas", 3, (1,), "layer.weight", "Replicas differ."))
    dies_of(error, monkeypatch)
    leave_reports([])
    [kept] = json.loads(file.read_text())["fastddp"]["corruptions"]
    assert (kept["kind"], kept["ranks"], kept["parameter"]) == ("replicas", [1], "layer.weight")
    assert "Replicas differ." in shown(file)


def caused_by(error: BaseException) -> ValueError:
    of_the_user = ValueError("in the loop")
    of_the_user.__cause__ = error
    return of_the_user


OF_OTHERS = [
    dist.DistNetworkError("broken pipe"),
    RuntimeError("nobody comes" + see("FD015")),
    RuntimeError("rank 1 raised" + see("FD010")),
    RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
]
OWN = [ValueError("of the user's"), torch.OutOfMemoryError("none left"), RuntimeError("gradients" + see("FD005"))]


@pytest.mark.parametrize("comes_last", [True, False])
@pytest.mark.parametrize("follows", [*OF_OTHERS, *map(caused_by, OF_OTHERS)])
def test_torchrun_calls_the_error_of_the_rank_that_has_raised_the_root_cause(
    file: Path, monkeypatch: pytest.MonkeyPatch, follows: Exception, comes_last: bool
) -> None:
    for own, is_recorded in itertools.product(OWN, (True, False)):
        ranks = (follows, own) if comes_last else (own, follows)
        check_root(file, monkeypatch, ranks, own, int(not comes_last), is_recorded)


def check_root(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[Exception, Exception],
    own: Exception,
    follower: int,
    is_recorded: bool,
) -> None:
    failures = {}
    for rank, error in enumerate(ranks):
        of_rank = file.with_name(f"{rank}.json")
        of_rank.unlink(missing_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(of_rank))
        dies_of(error, monkeypatch)
        if is_recorded:
            ErrorHandler().record_exception(error)
        leave_reports([STALL] if rank == follower else [])
        failures[rank] = ProcessFailure(rank, pid=1, exitcode=1, error_file=str(of_rank))
    _, root = ChildFailedError("train.py", failures).get_first_failure()
    message: Any = root.message
    assert message["message"] == f"{type(own).__name__}: {own}"
    signal = ProcessFailure(2, pid=1, exitcode=-9, error_file="none")  # it leaves no file
    assert ChildFailedError("train.py", {0: failures[follower], 2: signal}).get_first_failure()[0] == 2


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_nothing_is_left_by_a_process_that_ends_well_or_is_told_to_end(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    if error is not None:
        dies_of(error, monkeypatch)
    leave_reports([STALL])
    assert not file.exists()
    file.write_text("no JSON")
    leave_reports([STALL])
    assert file.read_text() == "no JSON"  # what makes no sense is left alone


@pytest.mark.parametrize("name", ["/dev/null", ""])
def test_where_nobody_wants_a_file_nothing_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun has it where it keeps no logs."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", name)
    dies_of(ValueError(), monkeypatch)
    asked = iter([STALL])
    leave_reports(asked)
    assert list(asked) == [STALL]


SCRIPT = """
import time, torch, torch.distributed as dist, fastddp
from hooks_by_name import register
from torch.distributed.elastic.multiprocessing.errors import record

def main():
    dist.init_process_group("gloo")
    watch = fastddp.Watch(stall="raise", patience=1.5, idle_patience=1.5)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = fastddp.DistributedDataParallel(layers, watch=watch, bucket_cap_mb=0)
    register(model, sys.argv[1])
    for step in range(8):
        if step == 6 and dist.get_rank() == 1:
            time.sleep(1000)
        model(torch.ones(2, 8)).sum().backward()

(record(main) if sys.argv[1] == "none" else main)()
"""


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("exchange", ["none", "python"])
def test_a_rank_that_waits_raises_and_ends_and_torchrun_shows_the_report(tmp_path: Path, exchange: str) -> None:
    """The one that does not come is still there when it has ended: nothing waits for it."""
    script = tmp_path / "train.py"
    script.write_text(f"import sys; sys.path.append({str(TESTS / 'support')!r})\n{SCRIPT}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, f"--log-dir={tmp_path}", "--", "-mfastddp", str(script), exchange]  # as api.md has it
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert f"\n{script} FAILED\n" in ended.stderr
    root = ended.stderr.rpartition("Root Cause")[2]
    [file] = [json.loads(of.read_text()) for of in tmp_path.rglob("error.json")]
    assert "step 7 stands still" in root
    assert "rank 1 is past its backward" in root
    assert [(of["step"], of["causes"][0]["cause"]) for of in file["fastddp"]["stalls"]] == [(7, "after_backward")]
