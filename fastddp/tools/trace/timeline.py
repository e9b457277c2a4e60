"""A rank's step of median length, to be drawn."""

from __future__ import annotations

from typing import get_args

import numpy as np

from fastddp.tools.trace.intervals import Floats, difference
from fastddp.tools.trace.names import parse
from fastddp.tools.trace.ranks import RankView
from fastddp.tools.trace.recording import KINDS, NONE, Activities
from fastddp.tools.trace.report import Interval, Timeline, What
from fastddp.tools.trace.split import not_computing


def timeline_of(view: RankView) -> Timeline:
    """All that is drawn, clipped to the step, by lane and start."""
    lengths = view.steps.length
    step = int(np.abs(lengths - np.median(lengths)).argmin())
    begin, end = float(view.steps.start[step]), float(view.steps.end[step])
    recording, activities = view.recording, view.recording.activities
    drawn = [kind for kind in KINDS if kind in get_args(What)]
    chosen = np.flatnonzero(activities.of(*drawn) & (activities.end > begin) & (activities.start < end))
    chosen = chosen[np.lexsort((-activities.end[chosen], activities.start[chosen], activities.lane[chosen]))]
    lanes = [int(lane) for lane in np.unique(activities.lane[chosen])]
    idle = {lane: not_computing(activities, lane) for lane in lanes}
    bucket_of_run = dict(zip(view.runs.activity.tolist(), view.runs.bucket.tolist(), strict=True))
    intervals = tuple(
        Interval(
            lanes.index(int(activities.lane[i])),
            start - begin,
            stop - begin,
            KINDS[activities.kind[i]],  # type: ignore[arg-type]
            recording.names[activities.name[i]],
            _bucket(view, int(i), bucket_of_run),
        )
        for i in chosen
        for start, stop in _pieces(activities, int(i), idle, begin, end)
    )
    names = tuple(recording.lanes[lane] for lane in lanes)
    return Timeline(view.rank, view.steps.numbers[step], names, intervals, end - begin)


def _pieces(
    activities: Activities, activity: int, idle: dict[int, Floats], begin: float, end: float
) -> list[tuple[float, float]]:
    """The parts of an activity in the step; of an operator, only those where it computes, as the split counts it."""
    start, stop = max(float(activities.start[activity]), begin), min(float(activities.end[activity]), end)
    if KINDS[activities.kind[activity]] != "compute":
        return [(start, stop)]
    others = idle[int(activities.lane[activity])]
    first = np.searchsorted(others[:, 1], start, side="right")
    last = np.searchsorted(others[:, 0], stop, side="left")
    if first >= last:
        return [(start, stop)]
    return [(float(one), float(other)) for one, other in difference(np.array([[start, stop]]), others[first:last])]


def _bucket(view: RankView, activity: int, bucket_of_run: dict[int, int]) -> int | None:
    """Of a bucket's parameters, too."""
    recording, activities = view.recording, view.recording.activities
    launched_in = int(activities.range[activity])
    own_name = recording.names[activities.name[activity]]
    name = parse(own_name) if launched_in == NONE else recording.ranges[launched_in].name
    if activity in bucket_of_run and (name is None or name.what != "gather"):
        bucket = bucket_of_run[activity]
        return None if bucket == NONE else bucket
    return None if name is None else name.bucket
