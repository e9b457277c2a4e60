"""What an idle device waits for: the host, or the start of launched work (as in HolisticTraceAnalysis)."""

from __future__ import annotations

import numpy as np

from fastddp.tools.trace.intervals import Floats, difference, intersection, length_between, union
from fastddp.tools.trace.names import LOADER
from fastddp.tools.trace.recording import Recording
from fastddp.tools.trace.report import Idle
from fastddp.tools.trace.steps import Steps


def idle_of(recording: Recording, steps: Steps, busy: Floats) -> Idle:
    """Means over steps; ``busy``: all moments in which something is computed, sent or copied."""
    gaps = difference(union(steps.start, steps.end), busy)
    loads = [(range_.start, range_.end) for range_ in recording.ranges_named(LOADER)]
    loading = union(*np.array(loads).reshape(-1, 2).T)
    launch = _launch_of_next(recording, gaps[:, 1]) if recording.on_device else gaps[:, 1]
    known = np.isfinite(launch)
    until = np.clip(np.where(known, launch, gaps[:, 0]), gaps[:, 0], gaps[:, 1])
    for_host = union(gaps[:, 0], until)
    for_data = intersection(for_host, loading)

    def a_step(moments: Floats) -> float:
        return float(length_between(moments, steps.start, steps.end).mean())

    data = a_step(for_data)
    return Idle(
        recording.on_device,
        a_step(for_host) - data,
        data,
        a_step(union(until[known], gaps[known, 1])),
        a_step(union(gaps[~known, 0], gaps[~known, 1])),
    )


def _launch_of_next(recording: Recording, ends: Floats) -> Floats:
    """When the host launched the activity that ended each gap; NaN: unknown, or none came."""
    activities, shown = recording.activities, np.flatnonzero(recording.on_timeline)
    if not shown.size:
        return np.full(len(ends), np.nan)
    by_start = shown[np.argsort(activities.start[shown], kind="stable")]
    place = np.searchsorted(activities.start[by_start], ends - 1e-9, side="left")
    found = activities.launched[by_start[np.minimum(place, len(by_start) - 1)]]
    return np.where(place < len(by_start), found, np.nan)
