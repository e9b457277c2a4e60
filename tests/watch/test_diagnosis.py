"""Who keeps the others waiting: from what ranks say of themselves to a report."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import pytest

from fastddp import _C
from fastddp.watch.stall_report import StallReport


def record(rank: int, **fields: Any) -> str:
    """What a rank writes, which waits for bucket 1 of 3 in step 7 if nothing else is given; a list is several lines."""
    of_waiting = {
        "rank": rank,
        "host": "node",
        "pid": 100 + rank,
        "life": "runs",
        "written": int(time.time() * 1000),
        "doing": "finish",
        "seconds": 6.5,
        "still": 6.5,
        "user_code": 0,
        "state": "reducing",
        "windows": 6,
        "bucket": 1,
        "buckets": 3,
        "tick": 3,
        "finished": 1,
        "bytes": 4096,
        "sequence": 40,
    }
    lines = []
    for key, value in (of_waiting | fields).items():
        lines += [f"{key} {one}" for one in (value if isinstance(value, list) else [value]) if one is not None]
    return "\n".join(["fastddp 1", *lines]) + "\n"


def elsewhere(rank: int, doing: str, **fields: Any) -> str:
    return record(rank, **{"doing": doing, "bucket": None, "tick": 0, "finished": 0, "bytes": 0} | fields)


def findings(*records: str, ranks: int | None = None) -> list[tuple[str, list[int]]]:
    report = _C.diagnose(list(records), len(records) if ranks is None else ranks)
    return [(finding.cause, finding.ranks) for finding in report.findings]


WAIT = [record(0), record(1)]


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (elsewhere(2, "forward", life="gone"), "gone"),
        (elsewhere(2, "forward", life="stopped"), "stopped"),
        (elsewhere(2, "forward", life="uninterruptible"), "uninterruptible"),
        (elsewhere(2, "after_optimizer"), "outside"),
        (elsewhere(2, "nothing", windows=0), "outside"),
        (elsewhere(2, "forward"), "forward"),
        (elsewhere(2, "after_forward"), "loss"),
        (elsewhere(2, "tick", user_code=1, bucket=0), "hook"),
        (elsewhere(2, "backward", missing=["w"], missing_count=1), "backward"),
        (elsewhere(2, "after_backward", state="partial"), "other_graph"),
        (elsewhere(2, "after_backward"), "after_backward"),
        (elsewhere(2, "optimizer", windows=7), "optimizer"),
        (elsewhere(2, "backward", still=0.2), "slow"),
        (elsewhere(2, "forward", life="unknown"), "forward"),
        (elsewhere(2, "forward", life="uninterruptible", still=0.1), "slow"),
    ],
)
def test_the_rank_for_which_others_wait_is_the_cause(culprit: str, cause: str) -> None:
    assert findings(*WAIT, culprit) == [(cause, [2])]


GOES_ON = elsewhere(2, "after_backward", still=0.2)
RAISED = elsewhere(2, "after_backward", state="reducing")  # its backward has
GONE = elsewhere(3, "forward", life="gone")
IN_FORWARD = [elsewhere(0, "forward"), elsewhere(1, "forward")]


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([*WAIT, record(2, life="stopped")], [("stopped", [2])]),  # a cause too, though it was waiting
        ([*WAIT, elsewhere(2, "forward"), GONE], [("gone", [3]), ("forward", [2])]),  # the worse one first
        ([*WAIT, GOES_ON, GONE], [("gone", [3])]),  # who goes on is not named beside one that does not
        ([*WAIT, RAISED, GONE], [("gone", [3])]),
        ([*WAIT, RAISED], [("after_backward", [2])]),
        ([*WAIT, elsewhere(2, "forward"), elsewhere(3, "forward")], [("forward", [2, 3])]),
        # All but one are in forward: they may wait for it in collectives of the module's own.
        ([*IN_FORWARD, elsewhere(2, "after_optimizer")], [("outside", [2])]),
        ([*IN_FORWARD, elsewhere(2, "forward", life="gone")], [("gone", [2])]),
        ([record(0), record(1, bytes=2048)], [("other_shapes", [0, 1])]),  # nobody knows which of two is right
        (WAIT, [("network", [])]),
        ([*WAIT, elsewhere(2, "forward", unanswered=["10.0.0.1"])], [("network", []), ("forward", [2])]),
    ],
)
def test_of_several_causes_those_that_explain_the_others_are_named(
    records: list[str], found: list[tuple[str, list[int]]]
) -> None:
    assert findings(*records) == found


def test_a_rank_that_has_written_nothing_is_silent() -> None:
    assert findings(*WAIT, ranks=4) == [("silent", [2, 3])]


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        ({"windows": 5}, "windows_apart"),
        ({"bucket": 2}, "other_order"),
        ({"doing": "closing", "bucket": None}, "other_order"),
        ({"bytes": 2048}, "other_shapes"),
        ({"sequence": 41}, "other_collective"),
    ],
)
def test_where_all_wait_the_odd_one_is_the_cause(odd: dict[str, Any], cause: str) -> None:
    assert findings(*WAIT, record(2, **odd)) == [(cause, [2])]


def test_ways_without_an_answer_are_named_before_those_of_whom_nothing_is_known() -> None:
    left = [record(rank, host="left", unanswered=["10.0.0.2", "10.0.0.3"], still=5.0 + rank) for rank in range(2)]
    assert findings(*left, ranks=4) == [("network", []), ("silent", [2, 3])]
    text = _C.diagnose(left, 4).findings[0].text
    assert "from left (ranks 0, 1) to 10.0.0.2, for up to 6.0 s, from left (ranks 0, 1) to 10.0.0.3" in text


def test_a_network_that_carries_bytes_is_slow() -> None:
    moves = record(1, moved=5000.0)
    assert findings(record(0), moves) == [("slow", [])]
    report = _C.diagnose([record(0, moved=10.0), moves], 2)
    assert report.is_soft
    assert "0.01 MB a second" in report.findings[0].text
    # What ranks say to each other when they stand still is no progress; nor is what another connection carries.
    assert findings(record(0, moved=1000.0), record(1)) == [("network", [])]
    assert findings(record(0, unanswered=["10.0.0.2"]), moves) == [("network", [])]


def test_who_has_ended_because_of_another_one_is_not_named() -> None:
    followed = [elsewhere(rank, "after_backward", state="reducing", life="gone") for rank in (2, 3)]
    first = elsewhere(1, "forward", life="gone")
    assert findings(record(0), first, *followed) == [("gone", [1])]
    assert findings(record(0), *followed, ranks=4) == [("gone", [2, 3]), ("silent", [1])]


def test_a_process_that_is_ending_does_not_come_back() -> None:
    ending = elsewhere(2, "forward", ends=1)
    assert findings(*WAIT, ending) == [("gone", [2])]
    assert "is ending (process 102 on node). It was in forward." in _C.diagnose([*WAIT, ending], 3).findings[0].text


def test_a_report_says_step_rank_parameter_bucket_process_and_time() -> None:
    of_today = datetime.fromtimestamp(1764e6).astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
    sent = "collective 17 of lane 2"
    waiting = [record(0, written=1764000000123, collectives=sent), record(1, written=1763999999000)]
    missing = ["encoder.1.weight", "encoder.1.bias"]
    stack = ["train.py:3 main: loss.backward()", "ops.py:7 backward: wait()"]
    culprit = elsewhere(2, "backward", written=0, seconds=6.6, missing=missing, missing_count=3, tick=1,
                        last_parameter="encoder.2.weight", stack=stack)  # fmt: skip
    report = _C.diagnose([*waiting, culprit], 3)
    assert report.time == of_today
    headline, rank, code, *calls = report.text().splitlines()
    assert headline.startswith("fastddp: step 7 stands still: 2 of 3 ranks are waiting for bucket 1 of 3 (0.00 MB; ")
    assert headline.endswith(f"; {sent}), since 6.5 s: ranks 0, 1. ({of_today})")
    assert "rank 2 is in backward since 6.6 s (process 102 on node); bucket 1 lacks the gradient of encoder.1." in rank
    assert "encoder.1.weight and 2 more; the last gradient that came is that of encoder.2.weight." in rank
    assert "rank 2" in code
    assert [call.strip() for call in calls] == stack


def test_a_device_that_waits_counts_for_its_host_and_one_that_computes_keeps_others_waiting() -> None:
    ahead = [elsewhere(rank, "after_optimizer", bucket=1, device="waits") for rank in (0, 1)]
    late = elsewhere(2, "after_backward", bucket=1, device="computes")
    report = _C.diagnose([*ahead, late], 3)
    assert [(of.cause, of.ranks) for of in report.findings] == [("device", [2])]
    assert "2 of 3 ranks are waiting for bucket 1 of 3 on the device" in report.headline
    assert "does not come to bucket 1 of 3" in report.findings[0].text
    assert findings(*ahead, elsewhere(2, "forward")) == [("forward", [2])]
    assert findings(*ahead, elsewhere(2, "after_optimizer", bucket=1, device="waits")) == [("network", [])]


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("torch/utils/data/dataloader.py:1 __next__: data = self._next_data()", True),
        ("(3 calls in torch/utils/data)", True),
        ("train.py:9 main: evaluate(model, dataloader)", False),
    ],
)
def test_a_data_loader_shows_in_the_stack(line: str, waits: bool) -> None:
    [finding] = _C.diagnose([*WAIT, elsewhere(2, "after_optimizer", stack=[line])], 3).findings
    assert ("waits for its data loader" in finding.text) == waits


LIBRARIES = [("/lib/", 5), ("/lib/site/", 10), ("/work/fastddp/", 6)]
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
        ("main get", ["main", "queue.py:3 get: self.wait()"]),
        ("main get wait", ["main", "queue.py:3 get: self.wait()", "threading.py:5 wait"]),
        (
            "main get call call wait",
            ["main", "queue.py:3 get: self.wait()", "(2 calls in torch/nn)", "threading.py:5 wait"],
        ),
        ("get wait", ["queue.py:3 get: self.wait()", "threading.py:5 wait"]),
        (" ".join(["start", "main", *["layer"] * 20]), ["layer"] * 12),
    ],
)
def test_calls_of_libraries_are_folded(calls: str, lines: list[str]) -> None:
    users = {"main": "/work/train.py:41 main: model(batch)", "layer": "/work/model.py:7 forward: self.lock.acquire()"}
    found = _C.calls_in_lines([CALLS[call] for call in calls.split()], LIBRARIES)
    assert found == [users.get(line, line) for line in lines]


def test_a_report_is_json_too() -> None:
    culprit = elsewhere(2, "forward", stack=['a.py:1 f: say("\\\t")'])
    found = _C.diagnose([*WAIT, culprit], 3)
    report = json.loads(found.json())
    assert report == json.loads(StallReport.of(found).to_json())
    assert report["causes"][0]["cause"] == "forward"
    assert report["causes"][0]["ranks"] == [2]
    assert (report["version"], report["step"], report["ranks"]) == (1, 7, 3)
    assert report["stack"] == ['a.py:1 f: say("\\\t")']
    assert datetime.fromisoformat(report["time"]).tzinfo is not None


def test_a_thousand_ranks_fit_on_a_page() -> None:
    records = [record(rank) for rank in range(512)] + [elsewhere(rank, "forward") for rank in range(512, 1024)]
    text = _C.diagnose(records, 1024).text()
    assert "(512 in all)" in text
    assert len(text) < 1000


def test_only_a_rank_that_goes_on_makes_it_soft() -> None:
    slow = elsewhere(2, "backward", still=0.1)
    soft = [_C.diagnose(of, len(of)).is_soft for of in ([*WAIT, slow], [*WAIT, slow, elsewhere(3, "forward")], WAIT)]
    assert soft == [True, False, False]


def test_what_is_no_record_is_refused() -> None:
    for text in ("", "fastddp 2\nrank 1\n", "fastddp 1\ndoing juggling\n", "fastddp 1\nrank x\n"):
        with pytest.raises(ValueError):
            _C.diagnose([text], 2)


def test_a_record_tells_what_a_page_says() -> None:
    page = _C.Progress(["layer\nwith a line break"], 3, 8)
    [finding] = _C.diagnose([_C.record_of(page, 7.0), *(record(rank) for rank in range(3))], 4).findings
    assert (finding.cause, finding.ranks) == ("outside", [3])
