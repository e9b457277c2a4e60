"""Fewer intervals than a trace has, and what is never left out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import trace_reports
from fastddp.tools.trace.report import Interval, Timeline
from fastddp.tools.trace.thinning import Thinned, merge, thin

LENGTH = 100.0
SHORT = ("compute", "copy")  # what may be merged

intervals = st.builds(
    lambda lane, start, length, what: Interval(lane, start, min(LENGTH, start + length), what, f"{what} at {start}"),
    lane=st.integers(0, 2),
    start=st.floats(0, LENGTH),
    length=st.floats(0, 10) | st.floats(0, 0.01),
    what=st.sampled_from(["forward", *SHORT, "pack", "collective", "wait", "unpack"]),
)
timelines = st.lists(intervals, max_size=60).map(lambda found: Timeline(0, 0, ("a", "b", "c"), tuple(found), LENGTH))


@given(timelines, st.floats(0.001, 5))
def test_only_compute_shorter_than_a_pixel_is_merged_within_two_pixels(timeline: Timeline, pixel: float) -> None:
    thinned = merge(timeline, pixel)
    new = [interval for interval in thinned.timeline.intervals if interval not in timeline.intervals]
    for gone in set(timeline.intervals) - set(thinned.timeline.intervals):
        assert gone.what in SHORT
        assert gone.end - gone.start < pixel
        of_lane = [drawn for drawn in new if (drawn.lane, drawn.what) == (gone.lane, gone.what)]
        assert any(drawn.start <= gone.start <= gone.end <= drawn.end for drawn in of_lane)
    assert all(drawn.end - drawn.start < 2 * pixel * (1 + 1e-9) for drawn in new)
    assert thinned.merged == len(timeline.intervals) - len(thinned.timeline.intervals) + len(new)


@given(timelines, st.integers(1, 60))
def test_a_timeline_keeps_everything_or_becomes_small_enough(timeline: Timeline, most: int) -> None:
    thinned = thin(timeline, most)
    if len(timeline.intervals) <= most:
        assert thinned == Thinned(timeline)
    # Each lane's compute fills its pixels, and one more may begin at the very end.
    short = [i for i in thinned.timeline.intervals if i.what in SHORT and i.end - i.start < thinned.pixel * 2]
    assert len(short) <= most + 6


def test_thousands_of_kernels_become_few_bars_that_say_what_they_are() -> None:
    long = trace_reports.with_many_intervals(20_000)
    thinned = thin(long, 1000)
    assert len(thinned.timeline.intervals) == 1001
    assert sum(interval.what == "collective" for interval in thinned.timeline.intervals) == 1
    assert any(i.name.startswith("20 short ones, the longest: elementwise_kernel<") for i in thinned.timeline.intervals)
    assert thinned.note.startswith("20,000 intervals of compute shorter than 100.0 µs are drawn together")
    lanes = tuple(replace(kernel, lane=lane) for lane in range(3) for kernel in long.intervals[:-1])
    assert len(thin(replace(long, intervals=lanes), 900).timeline.intervals) == 900  # which lanes share
