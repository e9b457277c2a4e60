"""What is found out about each rank by itself, and which steps of ranks are the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fastddp.times.split import Split
from fastddp.tools.trace.buckets import BucketTimes, Runs, bucket_times, runs_of
from fastddp.tools.trace.idling import idle_of
from fastddp.tools.trace.intervals import Floats, Integers, unite
from fastddp.tools.trace.matching import Matched, match
from fastddp.tools.trace.recording import Recording
from fastddp.tools.trace.report import Idle
from fastddp.tools.trace.split import compute_of, moments_of, split_steps
from fastddp.tools.trace.steps import DeviceClock, Steps, find_steps

ALIGNED = (
    "The ranks' clocks are not known to be one: they are aligned by the ends of collectives, which all ranks reach "
    "together."
)


@dataclass(frozen=True)
class RankView:
    """One rank by itself, on its own clock."""

    rank: int
    recording: Recording
    steps: Steps
    compute: Floats
    splits: list[Split]  # a step each
    idle: Idle
    runs: Runs
    times: BucketTimes


@dataclass(frozen=True)
class Together:
    """The steps that all ranks recorded, on one clock; arrays of shape (ranks, steps, buckets) or (ranks, steps)."""

    begin: Floats  # (ranks, steps)
    start: Floats
    end: Floats
    ready: Floats
    half: Floats
    exposed: Floats
    last_parameter: np.ndarray
    collectives: Matched  # on the same clock
    compute: tuple[Floats, ...]  # by rank, intervals on the same clock
    notes: tuple[str, ...]


def view(rank: int, recording: Recording, step_range: str | None = None) -> RankView:
    """What one recording says; ``step_range``: as for :func:`~fastddp.tools.trace.steps.find_steps`."""
    clock = DeviceClock(recording)
    steps = find_steps(recording, clock, step_range)
    compute, communication = compute_of(recording), moments_of(recording.activities, "collective")
    copies = moments_of(recording.activities, "copy")
    runs = runs_of(recording, steps)
    times = bucket_times(recording, steps, clock, runs, compute)
    splits = split_steps(compute, communication, copies, steps)
    idle = idle_of(recording, steps, unite([compute, communication, copies]))
    return RankView(rank, recording, steps, compute, splits, idle, runs, times)


def bring_together(views: list[RankView]) -> Together:
    """The steps that all ranks have."""
    shifts = [(other.recording.origin_ns - views[0].recording.origin_ns) / 1e6 for other in views]
    hosts = {other.recording.host for other in views}
    one_clock = len(views) == 1 or (len(hosts) == 1 and None not in hosts)
    chosen = _matching_steps(views, shifts if one_clock else None)
    buckets = max(other.times.start.shape[1] for other in views)
    collectives = match([other.recording for other in views], [other.runs for other in views], chosen)
    notes: tuple[str, ...] = ()
    if not one_clock:
        notes = (ALIGNED,)
        shifts = _shifts_by_ends(collectives.end)
    aligned = np.array(shifts)[:, None]
    collectives = replace(collectives, start=collectives.start + aligned, end=collectives.end + aligned)

    def stacked(field: str, unknown: float | None = np.nan) -> np.ndarray:
        found = [getattr(other.times, field)[own] for other, own in zip(views, chosen, strict=True)]
        missing = [((0, 0), (0, buckets - values.shape[1])) for values in found]  # buckets that a rank does not have
        return np.stack([np.pad(one, of, constant_values=unknown) for one, of in zip(found, missing, strict=True)])  # type: ignore[arg-type]

    begin = np.stack([other.steps.start[own] for other, own in zip(views, chosen, strict=True)])
    start, end, ready, half = (stacked(field) + aligned[:, None] for field in ("start", "end", "ready", "half"))
    return Together(
        begin + aligned,
        start,
        end,
        ready,
        half,
        stacked("exposed", 0.0),
        stacked("last_parameter", None),
        collectives,
        tuple(other.compute + shift for other, shift in zip(views, shifts, strict=True)),
        notes,
    )


def _matching_steps(views: list[RankView], shifts: list[float] | None) -> list[Integers]:
    """For each rank, indices of the steps that all ranks have, in one order."""
    if all(other.steps.numbered for other in views):
        common = sorted(set.intersection(*(set(other.steps.numbers) for other in views)))
        return [np.array([other.steps.numbers.index(number) for number in common], dtype=np.int64) for other in views]
    firsts = [0] * len(views)
    if shifts is not None:
        # Collectives keep ranks within a step of each other, so the step nearest in time is the same one.
        starts = [other.steps.start + shift for other, shift in zip(views, shifts, strict=True)]
        latest = max(start[0] for start in starts)
        firsts = [int(np.abs(start - latest).argmin()) for start in starts]
    count = min(len(other.steps) - first for other, first in zip(views, firsts, strict=True))
    return [np.arange(first, first + count) for first in firsts]


def _shifts_by_ends(ends: Floats) -> list[float]:
    """What to add to each rank's times so that collectives end at once, also through ranks that share no group."""
    shifts: dict[int, float] = {0: 0.0}
    while True:
        for rank in set(range(len(ends))) - shifts.keys():
            for other, shift in shifts.items():
                difference = ends[other] + shift - ends[rank]
                if np.isfinite(difference).any():
                    shifts[rank] = float(np.nanmedian(difference))
                    break
            else:
                continue
            break
        else:
            return [shifts.get(rank, 0.0) for rank in range(len(ends))]
