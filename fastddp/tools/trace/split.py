"""What a rank's time is spent on: sets of moments, and their lengths in steps. Definitions: fastddp/times/split.py."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from fastddp.times.split import Split
from fastddp.tools.trace.intervals import Floats, difference, intersection, length_between, union, unite
from fastddp.tools.trace.recording import Activities, Kind, Recording
from fastddp.tools.trace.steps import Steps


def compute_of(recording: Recording) -> Floats:
    """All moments of compute; a thread that launches, runs or awaits a collective computes nothing."""
    activities = recording.activities
    by_lane = []
    for lane in np.unique(activities.lane).tolist():
        busy = moments_of(activities, "compute", "pack", "unpack", lane=lane)
        by_lane.append(difference(busy, not_computing(activities, lane)))
    return unite(by_lane)


def not_computing(activities: Activities, lane: int) -> Floats:
    """All moments in which a thread is in a range that computes nothing."""
    return moments_of(activities, "wait", "launch", "collective", lane=lane)


def moments_of(activities: Activities, *kinds: Kind, lane: int | None = None) -> Floats:
    """All moments in which an activity of these kinds is under way; ``lane``: on this one only."""
    chosen = activities.of(*kinds) & (True if lane is None else activities.lane == lane)
    return union(activities.start[chosen], activities.end[chosen])


def split_steps(compute: Floats, communication: Floats, copies: Floats, steps: Steps) -> list[Split]:
    """Each step's time."""

    def within(moments: Floats) -> Floats:
        return length_between(moments, steps.start, steps.end)

    overlapped = within(intersection(compute, communication))
    computing, exposed = within(compute) - overlapped, within(communication) - overlapped
    copying = within(difference(copies, unite([compute, communication])))
    idle = steps.length - computing - exposed - overlapped - copying
    # Differences of sums: a 0 may be off by a rounding.
    parts = np.maximum(np.stack([computing, overlapped, exposed, idle, copying]), 0.0)
    return [Split(*(float(part) for part in step)) for step in parts.T]


def mean(splits: list[Split]) -> Split:
    """The mean of each part."""
    return Split(*(float(part) for part in np.array([astuple(split) for split in splits]).mean(axis=0)))
