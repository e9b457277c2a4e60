"""What would make a step shorter, in a few words, with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastddp.times.split import Split
from fastddp.tools.trace.advice import advise
from fastddp.tools.trace.names import GATHER, STATUS
from fastddp.tools.trace.report import BucketReport, Idle
from test_trace_ranks import rank_trace
from trace_files import FORWARD, LAUNCHER, NCCL, ChromeTrace, report


def without_names(*buckets: tuple[float, float, float], name: str = NCCL, **noted: object) -> ChromeTrace:
    """Torch's DDP. Of each bucket: the end of what was launched before it, and start and end of its kernel."""
    trace = ChromeTrace(0, world_size=2)
    for t in (0.0, 100.0, 200.0, 300.0):
        trace.range(t, t + 1, FORWARD)
        before = 0.0
        for index, (computed, start, end) in enumerate(buckets):
            trace.launch(t + index, t + before, t + computed)
            trace.nccl(t + index + 0.5, t + start, t + end, name=name).noting(**noted)
            before = computed
    return trace


def of_no_bucket(launched_in: str) -> ChromeTrace:
    trace = rank_trace(0)
    for t in (0.0, 100.0, 200.0, 300.0, 400.0):
        trace.range(t + 89.75, t + 90.25, launched_in, LAUNCHER).gloo(t + 90, t + 90, t + 95, None)
    return trace


HIDDEN = rank_trace(0).operator(0, 600, thread=4)
TORCHS = without_names((30, 30, 35), (70, 70, 90))
FIRST_OF_TORCH = ChromeTrace(0, 2).range(0, 1, FORWARD).range(100, 101, FORWARD).gloo(40, 41, 51, None)
TRACES: dict[str, tuple[list[ChromeTrace], str]] = {
    "what is hidden needs none": ([HIDDEN], "hidden: of 49.00 ms a step, 0.00 ms are exposed"),
    "a run that sends nothing": ([ChromeTrace().operator(0, 30)], "No communication was recorded"),
    # Half of its gradients came at 30, the others at 50.
    "a smaller cap": (
        [rank_trace(0)],
        '2 MiB (bucket_cap_mb; under "auto", a plan of your own: buckets=) its first half would start 20.00 ms earlier',
    ),
    # Under torch they come evenly since the launch before, and torch's first bucket has none before it.
    "half the cap of torch": ([TORCHS], "half its cap (bucket_cap_mb) its first half would start 20.00 ms earlier"),
    "torch's first bucket": ([FIRST_OF_TORCH], "Bucket 0 is exposed 10.00 ms, and the trace does not say when"),
    "where ranks wait for one": ([rank_trace(0), rank_trace(1, late=30)], "15.00 ms are waits for the last rank"),
    "what is exposed of no bucket": ([of_no_bucket("another's")], "belong to no bucket: all_reduce 5.00 ms (sparse"),
    "the status of a step": ([of_no_bucket(STATUS)], "no bucket: fastddp.status 5.00 ms (fastddp.status ends each"),
    "parameters": ([of_no_bucket(f"{GATHER} bucket=1")], "no bucket: fastddp.gather 5.00 ms (fastddp.gather brings"),
}
ALONE = ("what is hidden needs none", "a run that sends nothing")
FIRST = (*ALONE, "where ranks wait for one", "half the cap of torch")


@pytest.mark.parametrize("which", TRACES)
def test_advice(tmp_path: Path, which: str) -> None:
    traces, words = TRACES[which]
    found = report(tmp_path, *traces).advice
    places = [place for place, sentence in enumerate(found) if words in sentence]
    assert len(places) == 1
    assert places == [0] or which not in FIRST
    assert len(found) == 1 or which not in ALONE
    assert any("no bucket" in sentence for sentence in found) == ("no bucket" in words)


@pytest.mark.parametrize(
    ("name", "noted", "wire"),
    [
        (NCCL, {}, "float32"),
        (NCCL.replace("f32", "bf16"), {}, "bfloat16"),
        ("ncclDevKernel_Generic", {"Collective_name": "allreduce", "dtype": "Half"}, "float16"),
    ],
)
def test_the_wire_is_what_a_name_says(tmp_path: Path, name: str, noted: dict[str, Any], wire: str) -> None:
    found = report(tmp_path, without_names((5, 10, 99), name=name, **noted))
    assert [one.wire for one in found.buckets] == [wire]
    assert any("bf16_compress_hook" in sentence for sentence in found.advice) == (wire == "float32")


# -------------------------------------------------------------------------------------------------------- thresholds


def a_bucket(number: int, **values: float) -> BucketReport:
    """Of a step of 100 ms; exposed where it is not said."""
    of = {"ready": 80.0, "delay": 0.0, "start": 80.0, "duration": 10.0, "exposed": 10.0, **values}
    named = {"first": "first", "last": "last", "last_rank": 0, "last_parameter": "first", "mean_exposed": of["exposed"]}
    return BucketReport(number, bytes=4 << 20, wire="float16", bus_gb_per_s=1.0, **named, **of)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("buckets", "half", "words"),
    [
        # It is spoken of from two hundredths of a step on.
        ([a_bucket(0), a_bucket(1, exposed=1.9)], 5.0, ["Bucket 0"]),
        ([a_bucket(0), a_bucket(1, exposed=2.1)], 5.0, ["Bucket 0", "Bucket 1"]),
        # A cap, where it gains a tenth of what is exposed.
        ([a_bucket(0)], 1.1, ["with a cap of 2 MiB"]),
        ([a_bucket(0)], 0.9, []),
        # A delay, from half of what is exposed on.
        ([a_bucket(0, delay=5.1)], 5.0, ["it was ready 5.10 ms before"]),
        ([a_bucket(0, delay=4.9)], 5.0, ["with a cap of 2 MiB"]),
        # It is late behind others that end in the second half of its delay.
        ([a_bucket(0, start=50, duration=21), a_bucket(1, ready=60, delay=20)], 5.0, ["behind other", "Bucket 0"]),
        ([a_bucket(0, start=50, duration=19), a_bucket(1, ready=60, delay=20)], 5.0, ["no other", "Bucket 0"]),
        # It would only wait with a smaller cap if it begins as the one before it ends.
        ([a_bucket(0, start=50, duration=29.5, exposed=1), a_bucket(1, duration=20, exposed=19)], 10.0, ["is busy"]),
        ([a_bucket(0, start=10, duration=30, exposed=1), a_bucket(1, duration=20, exposed=19)], 10.0, ["with a cap"]),
    ],
)  # fmt: skip
def test_a_bucket_gets_advice_if(buckets: list[BucketReport], half: float, words: list[str]) -> None:
    exposed = sum(bucket.exposed for bucket in buckets)
    split = Split(compute=100 - exposed, overlapped=0, exposed=exposed, idle=0)
    found = advise(split, buckets, {bucket.bucket: half for bucket in buckets})
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


# -------------------------------------------------------------------------------------------------------------- idle


def test_idle_time_is_divided_by_what_the_device_waits_for(tmp_path: Path) -> None:
    """Of 100 ms: 20 compute; up to 30 the batch is loaded, up to 50 nothing is launched, up to 60 it does not start."""
    trace = ChromeTrace()
    for t in (0.0, 100.0, 200.0, 300.0):
        trace.steps(t).launch(t, t, t + 10).launch(t + 50, t + 60, t + 70)
        trace.range(t + 5, t + 30, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    found = report(tmp_path, trace)
    assert found.split.idle == pytest.approx(80)
    assert found.idle == Idle(on_device=True, host=pytest.approx(50), data=20, launched=10, unknown=0)
    parts = ["idle 80 %", "50.00 ms for the host", "20.00 ms for the next batch", "10.00 ms between", "larger batches"]
    places = [found.advice[-1].index(part) for part in parts]  # raises where one lacks
    assert places == sorted(places)


def test_on_the_cpu_idle_time_is_what_is_no_operator(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for t in (0.0, 100.0, 200.0):
        trace.steps(t).operator(t, t + 30)
        trace.range(t + 40, t + 90, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    found = report(tmp_path, trace)
    assert found.idle == Idle(on_device=False, host=20, data=50, launched=0, unknown=0)
    assert "CPU is idle 70 % of a step: 50.00 ms for the next batch, 20.00 ms outside operators" in found.advice[-1]


def test_idle_time_of_which_no_launch_is_known_is_said_and_below_a_fifth_of_a_step_none(tmp_path: Path) -> None:
    found = report(tmp_path, ChromeTrace().launch(None, 0, 10).launch(None, 60, 100))
    assert found.idle == Idle(True, 0, 0, 0, pytest.approx(50))
    assert "50.00 ms for what the trace does not tell" in found.advice[-1]
    assert len(advise(Split(81, 0, 0, 19), [], {}, idle=found.idle)) == 1
    assert len(advise(Split(79, 0, 0, 21), [], {}, idle=found.idle)) == 2
