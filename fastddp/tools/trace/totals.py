"""All collectives of a run by their kind: how many, how long, how large, how fast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fastddp.tools.trace.collectives import bus_bytes
from fastddp.tools.trace.intervals import Floats
from fastddp.tools.trace.matching import Matched
from fastddp.tools.trace.ranks import RankView
from fastddp.tools.trace.recording import NONE
from fastddp.tools.trace.report import CollectiveReport


def totals(views: Sequence[RankView], matched: Matched, world_size: int | None) -> tuple[CollectiveReport, ...]:
    """A report of each kind, the most exposed first; ``world_size``: of collectives whose group is not known."""
    kinds = {
        (view.runs.kinds[kind], bool(of_bucket))
        for view in views
        for kind, of_bucket in zip(view.runs.kind, view.runs.bucket != NONE, strict=True)
    }
    # How long each run went on after the last rank had joined: the shortest time of any rank.
    travelling = [view.runs.end - view.runs.start for view in views]
    if matched.run.shape[1]:
        shortest = np.nanmin(matched.end - matched.start, axis=0)
        for own, run in zip(travelling, matched.run, strict=True):
            own[run[run != NONE]] = shortest[run != NONE]
    speeds = [_speeds(view, own, world_size) for view, own in zip(views, travelling, strict=True)]
    found = [_total(kind, of_buckets, views, speeds) for kind, of_buckets in kinds]
    return tuple(sorted((one for one in found if one), key=lambda one: (-one.exposed, -one.total, one.kind)))


def _total(kind: str, of_buckets: bool, views: Sequence[RankView], speeds: Sequence[Floats]) -> CollectiveReport | None:
    """None: no step has any."""
    steps = sum(len(view.steps) for view in views)
    own = [_own(view, kind, of_buckets) for view in views]

    def of_kind(by_rank: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([of_rank[mine] for of_rank, mine in zip(by_rank, own, strict=True)])

    durations = of_kind(view.runs.end - view.runs.start for view in views)
    sizes, speed = of_kind(view.runs.bytes for view in views), of_kind(speeds)
    speed = speed[np.isfinite(speed)]
    if not durations.size:
        return None
    return CollectiveReport(
        kind,
        of_buckets,
        durations.size / steps,
        float(durations.sum()) / steps,
        float(np.median(durations)),
        float(sizes.sum()) / steps if (sizes != NONE).all() else None,
        float(np.median(speed)) if speed.size else None,
        sum(_exposed(view, kind, of_buckets, mine) for view, mine in zip(views, own, strict=True)) / len(views),
    )


def _own(view: RankView, kind: str, of_buckets: bool) -> np.ndarray:
    if kind not in view.runs.kinds:
        return np.zeros(len(view.runs.kind), dtype=bool)
    is_kind = view.runs.kind == view.runs.kinds.index(kind)
    return is_kind & (view.runs.step != NONE) & ((view.runs.bucket != NONE) == of_buckets)


def _exposed(view: RankView, kind: str, of_buckets: bool, own: np.ndarray) -> float:
    """Mean over the rank's steps. A bucket's exposed time is divided among its kinds of collectives by their counts."""
    if kind not in view.runs.kinds:
        return 0.0
    if not of_buckets:
        return float(view.times.exposed_kinds[:, view.runs.kinds.index(kind)].mean())
    buckets = view.times.exposed.shape[1]
    in_steps = (view.runs.bucket != NONE) & (view.runs.step != NONE)
    counts = np.bincount(view.runs.bucket[own], minlength=buckets)
    all_counts = np.bincount(view.runs.bucket[in_steps], minlength=buckets)
    return float((view.times.exposed.mean(axis=0) * counts / np.maximum(all_counts, 1)).sum())


def _speeds(view: RankView, travelling: Floats, world_size: int | None) -> Floats:
    """GB/s on the bus of each run; NaN: not known."""
    speeds = np.full(len(travelling), np.nan)
    for i, (activity, size) in enumerate(zip(view.runs.activity, view.runs.bytes, strict=True)):
        about = view.recording.collectives[view.recording.activities.about[activity]]
        ranks = about.group_size or world_size
        if size != NONE and ranks and ranks > 1 and travelling[i] > 0:
            speeds[i] = bus_bytes(about.operation, float(size), ranks) / travelling[i] / 1e6
    return speeds
