"""Advice on traces of torch's DDP and of other scripts: what launches say, what idle time is spent on."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastddp.trace import chrome
from fastddp.trace.advice import advise
from fastddp.trace.analysis import analyse
from fastddp.trace.report import BucketReport, Idle, Report, Split
from trace_files import NCCL, NCCL_STREAM, ChromeTrace


def report(folder: Path, trace: ChromeTrace) -> Report:
    return analyse([chrome.read(trace.write(folder / "0.json"))], "run")


def under_torch(*runs: tuple[float, float, float], name: str = NCCL, **arguments: object) -> ChromeTrace:
    """Steps of 100 ms. Of each bucket: the end of what was launched before it, and start and end of its kernel."""
    trace = ChromeTrace(0, world_size=2)
    for step in range(4):
        t = 100.0 * step
        trace.range(t, t + 1, "DistributedDataParallel.forward")
        before = 0.0
        for index, (computed, start, end) in enumerate(runs):
            number = 100 * step + 2 * index
            trace.call(t + index, number)
            trace.kernel(t + before, t + computed, number)
            trace.call(t + index + 0.5, number + 1)
            trace.kernel(t + start, t + end, number + 1, name, NCCL_STREAM, **arguments)
            before = computed
    return trace


def test_a_bucket_of_torchs_is_ready_when_all_is_computed_that_was_launched_before_it(tmp_path: Path) -> None:
    found = report(tmp_path, under_torch((30, 31, 51), (60, 62, 90)))
    assert [one.ready for one in found.buckets] == pytest.approx([30, 60])
    assert [one.delay for one in found.buckets] == pytest.approx([1, 2])


def test_buckets_back_to_back_need_fewer_bytes_and_no_smaller_cap(tmp_path: Path) -> None:
    """The first one is ready at 30, and the last computation ends at 40: the wire is busy to 95."""
    found = report(tmp_path, under_torch((30, 31, 61), (35, 61, 85), (40, 85, 95)))
    assert len(found.advice) >= 3
    assert not any("with a cap" in sentence or "smaller bucket_cap_mb" in sentence for sentence in found.advice)
    assert sum("fewer bytes would" in sentence for sentence in found.advice) >= 2


def test_a_bucket_that_begins_as_the_one_before_it_ends_would_only_wait_with_a_smaller_cap() -> None:
    def a_bucket(number: int, ready: float, start: float, duration: float, exposed: float) -> BucketReport:
        return BucketReport(
            number,
            None,
            None,
            4 << 20,
            "float16",
            ready,
            start - ready,
            start,
            duration,
            None,
            exposed,
            0,
            None,
            exposed,
        )

    before = a_bucket(0, ready=50, start=50, duration=29.5, exposed=1)
    split = Split(compute=80, overlapped=0, exposed=20, idle=0)
    (sentence,) = advise(split, [before, a_bucket(1, ready=79, start=80, duration=20, exposed=19)], {1: 10.0})
    assert "the wire is busy. Smaller buckets would not help; fewer bytes would." in sentence
    before = a_bucket(0, ready=10, start=10, duration=30, exposed=1)
    (sentence,) = advise(split, [before, a_bucket(1, ready=79, start=80, duration=20, exposed=19)], {1: 10.0})
    assert "with a cap of 2 MiB" in sentence


def test_what_a_cap_gains_under_torch_is_taken_from_the_launches(tmp_path: Path) -> None:
    found = report(tmp_path, under_torch((30, 30, 35), (70, 70, 90)))
    sentence, *_ = found.advice
    assert sentence == (
        "Bucket 1 is exposed 20.00 ms: with half its bucket_cap_mb its first half would start 20.00 ms earlier, when "
        "half of its gradients had come, if they came evenly since the bucket before was launched."
    )


@pytest.mark.parametrize(
    ("name", "arguments", "wire"),
    [
        (NCCL, {}, "float32"),
        (NCCL.replace("f32", "bf16"), {}, "bfloat16"),
        ("ncclDevKernel_Generic", {"Collective name": "allreduce", "dtype": "Half"}, "float16"),
    ],
)
def test_the_wire_is_what_torch_or_the_kernels_name_says(
    tmp_path: Path, name: str, arguments: dict[str, object], wire: str
) -> None:
    found = report(tmp_path, under_torch((5, 10, 99), name=name, **arguments))
    assert [one.wire for one in found.buckets] == [wire]
    assert any("bf16_compress_hook" in sentence for sentence in found.advice) == (wire == "float32")


# -------------------------------------------------------------------------------------------------------------- idle


def test_idle_time_is_divided_by_what_the_device_waits_for(tmp_path: Path) -> None:
    """Of 100 ms: 20 compute; up to 30 the batch is loaded, up to 50 nothing is launched, up to 60 it does not start."""
    trace = ChromeTrace()
    for step in range(4):
        t = 100.0 * step
        trace.moment(t, "fastddp.step")
        trace.call(t, 10 * step)
        trace.kernel(t, t + 10, 10 * step)
        trace.range(t + 5, t + 30, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
        trace.call(t + 50, 10 * step + 1)
        trace.kernel(t + 60, t + 70, 10 * step + 1)
    found = report(tmp_path, trace)
    assert found.split.idle == pytest.approx(80)
    assert found.idle == Idle(on_device=True, host=pytest.approx(50), data=20, launched=10, unknown=0)
    assert found.advice[-1].startswith(
        "The device is idle 80 % of a step: 50.00 ms for the host to launch what comes next, 20.00 ms for the next "
        "batch, 10.00 ms between the launch of what comes next and its start. Of the largest part: larger batches,"
    )


def test_on_the_cpu_idle_time_is_what_is_no_operator(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for step in range(3):
        trace.moment(100 * step, "fastddp.step")
        trace.operator(100 * step, 100 * step + 30)
        trace.range(100 * step + 40, 100 * step + 90, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    found = report(tmp_path, trace)
    assert found.idle == Idle(on_device=False, host=20, data=50, launched=0, unknown=0)
    assert (
        "The CPU is idle 70 % of a step: 50.00 ms for the next batch, 20.00 ms outside operators." in found.advice[-1]
    )


def test_idle_time_below_a_fifth_of_a_step_needs_no_word() -> None:
    idle = Idle(True, 19.0, 0.0, 0.0, 0.0)
    assert len(advise(Split(81, 0, 0, 19), [], {}, idle=idle)) == 1
    assert len(advise(Split(79, 0, 0, 21), [], {}, idle=idle)) == 2


def test_a_launch_that_is_not_known_is_said(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.kernel(0, 10, 1)
    trace.kernel(60, 100, 2)
    found = report(tmp_path, trace)
    assert found.idle == Idle(True, 0, 0, 0, pytest.approx(50))
    assert "50.00 ms for what the trace does not tell" in found.advice[-1]
