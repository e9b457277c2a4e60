"""From recordings of one run to its report."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fastddp.trace.advice import advise
from fastddp.trace.buckets import GUESSED, facts_of, wrapper_of
from fastddp.trace.intervals import Floats
from fastddp.trace.names import Name
from fastddp.trace.ranks import RankView, Together, bring_together, view
from fastddp.trace.recording import NONE, Recording, TraceError
from fastddp.trace.report import BucketReport, RankReport, Report
from fastddp.trace.split import mean
from fastddp.trace.stragglers import describe_stragglers, waits
from fastddp.trace.timeline import timeline_of


def analyse(recordings: Sequence[Recording], name: str, notes: Sequence[str] = ()) -> Report:
    """The report of a run, from a recording of each rank; ``notes`` are added to its own.

    Raises:
        TraceError: two recordings are of one rank, or made by different recorders.
    """
    views = [view(rank, recording) for rank, recording in _by_rank(recordings)]
    together = bring_together(views)
    world_sizes = {one.recording.world_size for one in views} - {None}
    world_size = max(world_sizes) if world_sizes else None  # type: ignore[type-var]
    waiting = waits(together)
    ranks = tuple(_rank_report(one, waiting[i] if len(views) > 1 else None) for i, one in enumerate(views))
    buckets = _bucket_reports(views, together, world_size)
    split = mean([rank.split for rank in ranks])
    return Report(
        name,
        views[0].recording.recorder,
        wrapper_of(views[0].recording),
        world_size,
        ranks,
        split,
        buckets,
        tuple(timeline_of(one) for one in views),
        describe_stragglers([one.rank for one in views], waiting, split.step),
        advise(split, buckets, _halves(together), sum(rank.waits_ms or 0.0 for rank in ranks) / len(ranks)),
        (*notes, *_notes(views, together, world_size)),
    )


def _by_rank(recordings: Sequence[Recording]) -> list[tuple[int, Recording]]:
    recorders = {recording.recorder for recording in recordings}
    if len(recorders) > 1:
        raise TraceError(
            f"These traces are of one run, but were recorded by {' and '.join(sorted(recorders))}: "
            f"{', '.join(recording.source for recording in recordings)}. Look at them one by one."
        )
    if any(recording.rank is None for recording in recordings):
        return list(enumerate(recordings))
    by_rank: dict[int, Recording] = {}
    for recording in recordings:
        assert recording.rank is not None
        other = by_rank.setdefault(recording.rank, recording)
        if other is not recording:
            raise TraceError(
                f"{other.source} and {recording.source} are both of rank {recording.rank}. Name one file a rank, and "
                "put each run into a folder of its own."
            )
    return sorted(by_rank.items())


def _rank_report(view: RankView, waits: Floats | None) -> RankReport:
    lengths = tuple(float(length) for length in view.steps.length)
    waits_ms = None if waits is None else _median(waits)
    return RankReport(view.rank, view.recording.source, lengths, mean(view.splits), waits_ms)


def _median(values: Floats) -> float | None:
    """Of what is known."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else None


def _most_common(values: Sequence[object]) -> object:
    known = [value for value in values if value is not None]
    return Counter(known).most_common(1)[0][0] if known else None


def _last_of(values: Floats) -> Floats:
    """Over ranks; NaN where no rank knows."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmax(values, axis=0)


def _bucket_reports(views: list[RankView], together: Together, world_size: int | None) -> tuple[BucketReport, ...]:
    facts = facts_of(views[0].recording)
    reports = (
        _bucket_report(bucket, facts.get(bucket), views, together, world_size)
        for bucket in range(together.start.shape[2])
        if np.isfinite(together.start[:, :, bucket]).any()
    )
    return tuple(reports)


def _bucket_report(
    bucket: int, fact: Name | None, views: list[RankView], together: Together, world_size: int | None
) -> BucketReport:
    begin = together.begin.min(axis=0)
    ready_by_rank = together.ready[:, :, bucket]
    ready = _last_of(ready_by_rank) - begin
    # A collective begins when the last rank has joined it.
    start = _last_of(together.start[:, :, bucket]) - begin
    duration = _last_of(together.end[:, :, bucket]) - begin - start
    delay = np.maximum(start - ready, 0.0)
    last_rank, last_parameter = _last_arrival(bucket, views, together)
    carried = fact.bytes if fact is not None else _bytes_of_runs(views[0], bucket)
    length = _median(duration) or 0.0
    return BucketReport(
        bucket,
        fact.first if fact else None,
        fact.last if fact else None,
        carried,
        fact.wire if fact else None,
        _median(ready),
        _median(delay),
        _median(start) or 0.0,
        length,
        _bus_gb_per_s(carried, length, world_size),
        max(float(np.median(of_rank)) for of_rank in together.exposed[:, :, bucket]),
        last_rank,
        last_parameter,
    )


def _halves(together: Together) -> dict[int, float]:
    """By bucket: how long before its last gradient half of its gradients had come, median, on the last rank."""
    earlier = _last_of(together.ready) - _last_of(together.half)
    medians = {bucket: _median(earlier[:, bucket]) for bucket in range(earlier.shape[1])}
    return {bucket: median for bucket, median in medians.items() if median is not None}


def _last_arrival(bucket: int, views: list[RankView], together: Together) -> tuple[int | None, str | None]:
    ready = together.ready[:, :, bucket]
    known = np.flatnonzero(np.isfinite(ready).all(axis=0))
    if not known.size:
        return None, None
    last = Counter(ready[:, known].argmax(axis=0).tolist()).most_common(1)[0][0]
    parameter = _most_common(together.last_parameter[last, known, bucket].tolist())
    return views[last].rank, None if parameter is None else str(parameter)


def _bytes_of_runs(view: RankView, bucket: int) -> int | None:
    """What a step's collectives of the bucket carry."""
    own = (view.runs.bucket == bucket) & (view.runs.bytes != NONE) & (view.runs.step != NONE)
    in_steps = np.bincount(view.runs.step[own], weights=view.runs.bytes[own])
    in_steps = in_steps[in_steps > 0]
    return int(np.median(in_steps)) if in_steps.size else None


def _bus_gb_per_s(carried: int | None, milliseconds: float, world_size: int | None) -> float | None:
    if not carried or not world_size or world_size < 2 or milliseconds <= 0:
        return None
    return carried * 2 * (world_size - 1) / world_size / milliseconds / 1e6


def _notes(views: list[RankView], together: Together, world_size: int | None) -> tuple[str, ...]:
    notes = [note for one in views for note in (*one.recording.notes, *one.steps.notes)]
    notes += together.notes
    if wrapper_of(views[0].recording) == "torch DDP":
        notes.append(GUESSED)
    if any(one.recording.rank is None for one in views):
        notes.append(
            "The traces do not say which rank is which: ranks are counted in the order of files and processes."
        )
    if world_size is not None and world_size > len(views):
        notes.append(f"{len(views)} of {world_size} ranks are here: what the others did is not known.")
    if together.begin.shape[1] == 0:
        notes.append("The ranks' traces have no step in common, so nothing is said of buckets across ranks.")
    counts = {len(one.steps) for one in views}
    if len(counts) > 1:
        notes.append(
            f"Ranks recorded {min(counts)} to {max(counts)} steps; buckets are compared over {together.begin.shape[1]}."
        )
    return tuple(dict.fromkeys(notes))
