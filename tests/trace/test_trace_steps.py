"""What marks steps, and what is said where a step holds more than one wrapper's, or runs are marked otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import trace_reports
from fastddp.trace import chrome
from fastddp.trace.analysis import analyse
from fastddp.trace.buckets import SEVERAL, SHARED
from fastddp.trace.comparison import compare
from fastddp.trace.report import Report
from trace_files import NCCL, NCCL_STREAM, ChromeTrace, bucket, gradient


def report(folder: Path, *traces: ChromeTrace) -> Report:
    return analyse([chrome.read(trace.write(folder / f"{i}.json")) for i, trace in enumerate(traces)], "run")


def two_windows_a_step(rank: int = 0, first: int = 3, names: tuple[str, str] = ("layer", "layer")) -> ChromeTrace:
    """The user's steps last 90 of every 100 ms, and hold two windows, with a bucket each; of wrappers, or of one."""
    trace = ChromeTrace(rank, world_size=2)
    for number in range(first, 6):
        t = 100.0 * number
        trace.range(t, t + 90, f"ProfilerStep#{number}")
        for place, name in enumerate(names):
            begin = t + 40 * place
            trace.moment(begin + 1, "fastddp.step")
            trace.operator(begin + 1, begin + 20)
            trace.moment(begin + 20, bucket("ready", 0, of=1).replace("layer", name))
            trace.gloo(begin + 21, begin + 22, begin + 32, 0)
    return trace


def test_the_profilers_steps_are_what_the_user_calls_a_step(tmp_path: Path) -> None:
    found = report(tmp_path, two_windows_a_step())
    assert found.step_mark == "ProfilerStep#"
    assert found.ranks[0].step_ms == pytest.approx((90, 90, 90))
    assert (found.split.compute, found.split.exposed) == pytest.approx((38, 20))
    assert found.timelines[0].step in (3, 4, 5)


def test_of_steps_that_the_profiler_numbered_those_of_one_number_belong_together(tmp_path: Path) -> None:
    found = report(tmp_path, two_windows_a_step(0), two_windows_a_step(1, first=5))
    assert [len(rank.step_ms) for rank in found.ranks] == [3, 1]
    assert any("compared over 1" in note for note in found.notes)
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([0, 0])


def test_on_a_gpu_a_step_of_the_profilers_begins_and_ends_with_what_the_host_launched_in_it(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number in range(2):  # the host is two steps ahead
        trace.range(10 * number, 10 * number + 9, f"ProfilerStep#{number}")
        trace.moment(10 * number + 1, "fastddp.step")
        trace.call(10 * number + 2, number)
        trace.moment(10 * number + 3, gradient("layer0.weight", 0))
        trace.moment(10 * number + 3, bucket("ready", 0, of=1))
        trace.range(10 * number + 4, 10 * number + 6, bucket("collective", 0, of=1))
        trace.call(10 * number + 5, 10 + number)
        trace.kernel(100 * number + 100, 100 * number + 170, number)
        trace.kernel(100 * number + 172, 100 * number + 180, 10 + number, NCCL, NCCL_STREAM)
    found = report(tmp_path, trace)
    assert found.ranks[0].step_ms == pytest.approx((100, 70))
    assert (found.buckets[0].ready, found.buckets[0].start) == pytest.approx((70, 72))


def test_without_them_a_step_goes_from_one_window_to_the_next(tmp_path: Path) -> None:
    trace = two_windows_a_step()
    trace.events = [event for event in trace.events if not event["name"].startswith("ProfilerStep")]
    found = report(tmp_path, trace)
    assert found.step_mark == "fastddp.step"
    assert found.ranks[0].step_ms == pytest.approx((40, 60, 40, 60, 40))


def test_a_step_of_two_wrappers_says_that_their_buckets_have_the_same_numbers(tmp_path: Path) -> None:
    assert SHARED in report(tmp_path, two_windows_a_step(names=("encoder", "decoder"))).notes


def test_of_two_windows_in_a_step_the_last_one_tells_when_a_bucket_travels(tmp_path: Path) -> None:
    found = report(tmp_path, two_windows_a_step())
    (only,) = found.buckets
    assert (only.ready, only.delay, only.start, only.duration) == pytest.approx((60, 2, 62, 10))
    assert only.exposed == pytest.approx(20)
    assert SEVERAL in found.notes
    assert SHARED not in found.notes


def test_a_step_of_one_window_needs_no_such_note(tmp_path: Path) -> None:
    trace = two_windows_a_step()
    trace.events = [event for event in trace.events if not event["name"].startswith("ProfilerStep")]
    assert not {SEVERAL, SHARED} & set(report(tmp_path, trace).notes)


def test_one_step_in_which_buckets_are_rebuilt_is_not_of_two_wrappers(tmp_path: Path) -> None:
    trace = two_windows_a_step()
    trace.moment(301, bucket("ready", 0, of=1).replace("layer", "other"))
    assert SHARED not in report(tmp_path, trace).notes


def test_ranks_whose_steps_are_marked_in_different_ways_are_told_apart(tmp_path: Path) -> None:
    other = two_windows_a_step(1)
    other.events = [event for event in other.events if not event["name"].startswith("ProfilerStep")]
    notes = report(tmp_path, two_windows_a_step(0), other).notes
    assert "Ranks' steps are not marked alike (ProfilerStep#, fastddp.step): they may hold different work." in notes


def test_runs_whose_steps_are_marked_in_different_ways_are_compared_with_a_warning() -> None:
    before, after = trace_reports.report("before"), trace_reports.report("after")
    (change,) = compare([replace(before, step_mark="ProfilerStep#"), after]).changes
    assert change.sentences[-1] == (
        "Its steps are counted by the wrapper's windows (fastddp.step), not by calls of profile.step() "
        "(ProfilerStep#): they may hold different work."
    )


def test_bucket_numbers_that_cannot_be_do_not_fill_the_memory(tmp_path: Path) -> None:
    trace = two_windows_a_step()
    for name in (
        "fastddp.ready bucket=99999999",
        "fastddp.ready bucket=2 of=2",
        "fastddp.ready bucket=99999999 of=100000000",
        "fastddp.gradient parameter=layer0.weight bucket=9999",  # none of those that the other names count
        f"fastddp.collective bucket={'9' * 5000} of=1",
        f"fastddp.collective tick={'9' * 30} bytes={'9' * 30}",
    ):
        trace.moment(350, name)
    assert [one.bucket for one in report(tmp_path, trace).buckets] == [0]
    assert chrome.read(tmp_path / "0.json").ranges_of("ready")[0].name.bucket == 0
