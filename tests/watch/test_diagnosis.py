"""Who keeps the others waiting: from what ranks say of themselves to a report."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import pytest

from fastddp import _C
from fastddp.watch.stall_report import StallReport

WAITS = {"life": "runs", "doing": "finish", "seconds": 6.5, "still": 6.5, "user_code": 0, "state": "reducing"}
IN_STEP_7 = {"windows": 6, "bucket": 1, "buckets": 3, "tick": 3, "finished": 1, "bytes": 4096, "sequence": 40}


def record(rank: int, **fields: Any) -> str:
    """What a rank writes, which waits for bucket 1 of 3 in step 7 if nothing else is given; a list is several lines."""
    of_rank = {"rank": rank, "host": "node", "pid": 100 + rank, "written": int(time.time() * 1000)}
    lines = []
    for key, value in (of_rank | WAITS | IN_STEP_7 | fields).items():
        lines += [f"{key} {one}" for one in (value if isinstance(value, list) else [value]) if one is not None]
    return "\n".join(["fastddp 1", *lines]) + "\n"


def elsewhere(rank: int, doing: str, **fields: Any) -> str:
    return record(rank, **{"doing": doing, "bucket": None, "tick": 0, "finished": 0, "bytes": 0} | fields)


def diagnose(records: list[str], ranks: int) -> StallReport:
    return StallReport.of(_C.diagnose(records, ranks))


def gathers(rank: int, **fields: Any) -> str:
    """A rank that waits for the parameters of bucket 1 of 3, after step 6."""
    return record(rank, **{"doing": "gather", "of_parameters": 1, "state": "finished", "bytes": 0} | fields)


SILENT = ""  # a rank that has written nothing
WAIT = [record(0), record(1)]
GOES_ON = elsewhere(2, "after_backward", still=0.2)
RAISED = elsewhere(2, "after_backward", state="reducing")  # its backward has
GONE = elsewhere(3, "forward", life="gone")
FOLLOWED = [elsewhere(rank, "after_backward", state="reducing", life="gone") for rank in (2, 3)]
IN_FORWARD = [elsewhere(0, "forward"), elsewhere(1, "forward")]
IN_STEP = elsewhere(1, "optimizer")
COMPUTES = elsewhere(2, "after_backward", bucket=1, device="computes")
GATHER = [gathers(0), gathers(1)]
AHEAD = [elsewhere(rank, "after_optimizer", bucket=1, device="waits") for rank in (0, 1, 2)]


@pytest.mark.parametrize(
    ("records", "found"),
    [
        # The rank for which the others wait.
        ([*WAIT, elsewhere(2, "forward", life="gone")], [("gone", [2])]),
        ([*WAIT, elsewhere(2, "forward", ends=1)], [("gone", [2])]),
        ([*WAIT, elsewhere(2, "forward", life="stopped")], [("stopped", [2])]),
        ([*WAIT, elsewhere(2, "forward", life="uninterruptible")], [("uninterruptible", [2])]),
        ([*WAIT, elsewhere(2, "after_optimizer")], [("outside", [2])]),
        ([*WAIT, elsewhere(2, "forward")], [("forward", [2])]),
        ([*WAIT, elsewhere(2, "after_forward")], [("loss", [2])]),
        ([*WAIT, elsewhere(2, "tick", user_code=1, bucket=0)], [("hook", [2])]),
        ([*WAIT, elsewhere(2, "backward", missing=["w"], missing_count=1)], [("backward", [2])]),
        ([*WAIT, elsewhere(2, "after_backward", state="partial")], [("other_graph", [2])]),
        ([*WAIT, elsewhere(2, "after_backward")], [("after_backward", [2])]),
        ([*WAIT, elsewhere(2, "optimizer", windows=7)], [("optimizer", [2])]),
        ([*WAIT, elsewhere(2, "backward", still=0.2)], [("slow", [2])]),
        # Of several causes those that explain the others.
        ([*WAIT, record(2, life="stopped")], [("stopped", [2])]),  # a cause too, though it was waiting
        ([*WAIT, elsewhere(2, "forward"), GONE], [("gone", [3]), ("forward", [2])]),  # the worse one first
        ([*WAIT, GOES_ON, GONE], [("gone", [3])]),  # who goes on is not named beside one that does not
        ([*WAIT, RAISED], [("after_backward", [2])]),
        ([*WAIT, elsewhere(2, "forward"), elsewhere(3, "forward")], [("forward", [2, 3])]),
        # Who has ended because of another one is not named.
        ([record(0), elsewhere(1, "forward", life="gone"), *FOLLOWED], [("gone", [1])]),
        ([record(0), SILENT, *FOLLOWED], [("gone", [2, 3]), ("silent", [1])]),
        # All but one are in forward: they may wait for it in collectives of the module's own.
        ([*IN_FORWARD, elsewhere(2, "after_optimizer")], [("outside", [2])]),
        # Where all wait, the odd one.
        ([*WAIT, record(2, windows=5)], [("windows_apart", [2])]),
        ([*WAIT, record(2, bucket=2)], [("other_order", [2])]),
        ([*WAIT, record(2, bytes=2048)], [("other_shapes", [2])]),
        ([*WAIT, record(2, sequence=41)], [("other_collective", [2])]),
        ([record(0), record(1, bytes=2048)], [("other_shapes", [0, 1])]),  # nobody knows which of two is right
        ([*WAIT, SILENT, SILENT], [("silent", [2, 3])]),
        # Who waits for parameters waits for others.
        ([*GATHER, elsewhere(2, "optimizer", state="finished")], [("optimizer", [2])]),
        ([*GATHER, gathers(2, followed=1, life="gone"), elsewhere(3, "optimizer", life="gone")], [("gone", [3])]),
        ([*GATHER, record(2)], [("other_order", [2])]),
        (GATHER, [("network", [])]),
        # The network; one that carries bytes is slow.
        (WAIT, [("network", [])]),
        ([record(0, unanswered=["10.0.0.1"]), record(1), SILENT], [("network", []), ("silent", [2])]),
        ([*WAIT, elsewhere(2, "forward", unanswered=["10.0.0.1"])], [("network", []), ("forward", [2])]),
        ([record(0), record(1, moved=5000.0)], [("slow", [])]),
        # What ranks say to each other when they stand still is no progress; nor is what another connection carries.
        ([record(0, moved=1000.0), record(1)], [("network", [])]),
        # A device that waits counts for its host, and one that computes keeps others waiting.
        ([*AHEAD[:2], COMPUTES], [("device", [2])]),
        ([*AHEAD[:2], elsewhere(2, "forward")], [("forward", [2])]),
        (AHEAD, [("network", [])]),
        ([elsewhere(0, "forward", bucket=1, device="waits", of_parameters=1), IN_STEP], [("optimizer", [1])]),
    ],
)
def test_cause_and_ranks_are_found(records: list[str], found: list[tuple[str, list[int]]]) -> None:
    report = diagnose([of for of in records if of != SILENT], len(records))
    assert [(cause.cause, list(cause.ranks)) for cause in report.causes] == found


def test_a_report_says_step_rank_parameter_bucket_process_and_time() -> None:
    of_today = datetime.fromtimestamp(1764e6).astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
    sent = "collective 17 of lane 2"
    waiting = [record(0, written=1764000000123, collectives=sent), record(1, written=1763999999000)]
    stack = ["train.py:3 main: loss.backward()", 'a.py:1 f: say("\\\t")']
    of_gradients = {"missing": ["encoder.1.weight", "bias"], "missing_count": 3, "last_parameter": "encoder.2"}
    found = _C.diagnose([*waiting, elsewhere(2, "backward", written=0, tick=1, stack=stack, **of_gradients)], 3)
    report = StallReport.of(found)
    assert report.time == of_today
    headline, rank, code, *calls = report.message.splitlines()
    for fact in ("step 7", "2 of 3 ranks", "bucket 1 of 3", sent, "for 6.5 s", "ranks 0, 1", of_today):
        assert fact in headline
    for fact in ("rank 2", "for 6.5 s", "process 102 on node", "encoder.1.weight and 2 more", "encoder.2"):
        assert fact in rank
    assert "rank 2" in code
    assert [call.strip() for call in calls] == stack
    as_json = json.loads(found)
    assert as_json == json.loads(report.to_json())
    assert [(of["cause"], of["ranks"]) for of in as_json["causes"]] == [("backward", [2])]
    assert (as_json["version"], as_json["step"], as_json["ranks"], as_json["stack"]) == (1, 7, 3, stack)
    assert datetime.fromisoformat(as_json["time"]).tzinfo is not None


UNANSWERED = [record(rank, host="left", unanswered=["10.0.0.2", "10.0.0.3"], still=5.0 + rank) for rank in range(2)]
OWN_LOADER = "train.py:9 main: evaluate(model, dataloader)"
LOADER = "torch/utils/data/dataloader.py:1 __next__: data = self._next_data()"


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (UNANSWERED, ["(ranks 0, 1) to 10.0.0.2, for up to 6.0 s", "from left (ranks 0, 1) to 10.0.0.3"]),
        ([record(0, moved=10.0), record(1, moved=5000.0)], ["0.01 MB a second"]),
        ([*WAIT, elsewhere(2, "forward", ends=1)], ["is ending (process 102 on node). It was in forward."]),
        ([*AHEAD[:2], COMPUTES], ["waiting for bucket 1 of 3 on the device", "does not come to bucket 1 of 3"]),
        ([gathers(0), gathers(2), IN_STEP], ["2 of 3 ranks are waiting for the parameters of bucket 1 of 3, for"]),
        ([*WAIT, elsewhere(2, "after_optimizer", stack=[LOADER])], ["waits for its data loader"]),
        ([*WAIT, elsewhere(2, "after_optimizer", stack=[OWN_LOADER])], [OWN_LOADER]),
        ([*map(record, range(512)), *(elsewhere(rank, "forward") for rank in range(512, 1024))], ["(512 in all)"]),
    ],
)
def test_a_report_says_what_is_known_of_the_cause(records: list[str], words: list[str]) -> None:
    text = diagnose(records, len(records)).message
    assert [word for word in words if word not in text] == []
    assert ("its data loader" in text) == any("its data loader" in word for word in words)
    assert len(text) < 1000


LIBRARIES = [("/lib/", 5), ("/lib/site/", 10), ("/work/fastddp/", 6)]
GET = "queue.py:3 get: self.wait()"
CALLS = {
    "start": ("<frozen runpy>", 1, "_run_code", "exec()"),
    "main": ("/work/train.py", 41, "main", "model(batch)"),
    "call": ("/lib/site/torch/nn/module.py", 1, "_call_impl", "forward()"),
    "ddp": ("/work/fastddp/ddp.py", 2, "forward", "module()"),
    "layer": ("/work/model.py", 7, "forward", "self.lock.acquire()"),
    "get": ("/lib/queue.py", 3, "get", "self.wait()"),
    "wait": ("/lib/threading.py", 5, "wait", ""),
}


@pytest.mark.parametrize(
    ("calls", "lines"),
    [
        ("start main", ["main"]),
        ("main call call ddp call layer", ["main", "(4 calls in torch/nn, fastddp)", "layer"]),
        ("main get call call wait", ["main", GET, "(2 calls in torch/nn)", "threading.py:5 wait"]),
        ("get wait", [GET, "threading.py:5 wait"]),
        (" ".join(["start", "main", *["layer"] * 20]), ["layer"] * 12),
    ],
)
def test_calls_of_libraries_are_folded(calls: str, lines: list[str]) -> None:
    users = {"main": "/work/train.py:41 main: model(batch)", "layer": "/work/model.py:7 forward: self.lock.acquire()"}
    found = _C.calls_in_lines([CALLS[call] for call in calls.split()], LIBRARIES)
    assert found == [users.get(line, line) for line in lines]


def test_only_a_rank_or_a_network_that_goes_on_makes_it_soft() -> None:
    slow = elsewhere(2, "backward", still=0.1)
    carries = [record(0), record(1, moved=5000.0)]
    of_all = [[*WAIT, slow], carries, [*WAIT, slow, elsewhere(3, "forward")], WAIT]
    assert [diagnose(of, len(of)).is_soft for of in of_all] == [True, True, False, False]


def test_a_record_tells_what_a_page_says() -> None:
    page = _C.Progress(["layer\nwith a line break"], 3, 8)
    [finding] = diagnose([_C.record_of(page, 7.0), *(record(rank) for rank in range(3))], 4).causes
    assert (finding.cause, finding.ranks) == ("outside", (3,))
