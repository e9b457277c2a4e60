"""Makes the report of one run from its recordings."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from statistics import fmean

import numpy as np

from fastddp.tools.trace.advice import advise
from fastddp.tools.trace.buckets import GUESSED, facts_of, note_on_windows, wrapper_of
from fastddp.tools.trace.collectives import ALL_REDUCE, bus_bytes
from fastddp.tools.trace.intervals import Floats
from fastddp.tools.trace.names import Name
from fastddp.tools.trace.numbering import number
from fastddp.tools.trace.ranks import RankView, Together, bring_together, view
from fastddp.tools.trace.recording import NONE, Recording
from fastddp.tools.trace.report import BucketReport, Idle, RankReport, Report
from fastddp.tools.trace.split import mean
from fastddp.tools.trace.stragglers import describe_stragglers, waits
from fastddp.tools.trace.timeline import timeline_of
from fastddp.tools.trace.totals import totals


def analyse(
    recordings: Sequence[Recording], name: str, notes: Sequence[str] = (), step_range: str | None = None
) -> Report:
    """The report of a run, a recording a rank; TraceError: recordings do not fit together, or lack ``step_range``."""
    by_rank, on_numbers = number(recordings)
    views = [view(rank, recording, step_range) for rank, recording in by_rank]
    together = bring_together(views)
    world_sizes = {one.recording.world_size for one in views} - {None}
    world_size = max(world_sizes) if world_sizes else None  # type: ignore[type-var]
    waiting = waits(together)
    waits_ms = [_median(of_rank) if len(views) > 1 else None for of_rank in waiting]
    ranks = tuple(
        RankReport(one.rank, one.recording.source, tuple(one.steps.length.tolist()), mean(one.splits), wait)
        for one, wait in zip(views, waits_ms, strict=True)
    )
    facts = {bucket: fact for one in reversed(views) for bucket, fact in facts_of(one.recording).items()}
    known = np.flatnonzero(np.isfinite(together.start).any(axis=(0, 1))).tolist()
    buckets = tuple(_bucket_report(bucket, facts.get(bucket), views, together, world_size) for bucket in known)
    collectives = totals(views, together.collectives, world_size)
    split = mean([rank.split for rank in ranks])
    on_device, *idle_times = zip(*(astuple(one.idle) for one in views), strict=True)
    idle = Idle(on_device[0], *map(fmean, idle_times))
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
        advise(
            split,
            buckets,
            _halves(together),
            fmean(rank.waits_ms or 0.0 for rank in ranks),
            collectives,
            idle,
            is_torch=wrapper_of(views[0].recording) == "torch DDP",
        ),
        (*notes, *_notes(views, together, world_size), *on_numbers),
        views[0].steps.mark,
        collectives,
        idle,
        tuple(dict.fromkeys(warning for one in views for warning in one.recording.warnings)),
    )


def _median(values: Floats) -> float | None:
    """Of known values."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else None


def _last_of(values: Floats) -> Floats:
    """Over ranks; NaN if no rank knows."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmax(values, axis=0)


def _bucket_report(
    bucket: int, fact: Name | None, views: list[RankView], together: Together, world_size: int | None
) -> BucketReport:
    begin = together.begin.min(axis=0)
    ready = _last_of(together.ready[:, :, bucket]) - begin
    # A collective begins when the last rank has joined it.
    start = _last_of(together.start[:, :, bucket]) - begin
    duration = _last_of(together.end[:, :, bucket]) - begin - start
    delay = np.maximum(start - ready, 0.0)
    last_rank, last_parameter = _last_arrival(bucket, views, together)
    sent = fact.bytes if fact is not None else _bytes_of_runs(views[0], bucket)
    length = _median(duration) or 0.0
    exposed = [one.times.exposed[:, bucket] for one in views if bucket < one.times.exposed.shape[1]]
    return BucketReport(
        bucket,
        fact.first if fact else None,
        fact.last if fact else None,
        sent,
        fact.wire if fact else _wire_of_runs(views[0], bucket),
        _median(ready),
        _median(delay),
        _median(start) or 0.0,
        length,
        _bus_gb_per_s(sent, length, world_size),
        max(float(np.median(of_rank)) for of_rank in together.exposed[:, :, bucket]),
        last_rank,
        last_parameter,
        float(sum(of_steps.mean() for of_steps in exposed)) / len(views),
    )


def _halves(together: Together) -> dict[int, float]:
    """By bucket: how long before its last gradient half of its gradients had come; median, of the last rank."""
    earlier = _last_of(together.ready) - _last_of(together.half)
    medians = {bucket: _median(earlier[:, bucket]) for bucket in range(earlier.shape[1])}
    return {bucket: median for bucket, median in medians.items() if median is not None}


def _last_arrival(bucket: int, views: list[RankView], together: Together) -> tuple[int | None, str | None]:
    ready = together.ready[:, :, bucket]
    known = np.flatnonzero(np.isfinite(ready).all(axis=0))
    if not known.size:
        return None, None
    last = Counter(ready[:, known].argmax(axis=0).tolist()).most_common(1)[0][0]
    parameters = [name for name in together.last_parameter[last, known, bucket] if name is not None]
    return views[last].rank, Counter(parameters).most_common(1)[0][0] if parameters else None


def _bytes_of_runs(view: RankView, bucket: int) -> int | None:
    """Bytes of the bucket's collectives in a step."""
    own = (view.runs.bucket == bucket) & (view.runs.bytes != NONE) & (view.runs.step != NONE)
    in_steps = np.bincount(view.runs.step[own], weights=view.runs.bytes[own])
    in_steps = in_steps[in_steps > 0]
    return int(np.median(in_steps)) if in_steps.size else None


def _wire_of_runs(view: RankView, bucket: int) -> str | None:
    """The dtype of the bucket's kernels."""
    own = view.recording.activities.about[view.runs.activity[view.runs.bucket == bucket]]
    wires = {view.recording.collectives[about].wire for about in own}
    return wires.pop() if len(wires) == 1 else None


def _bus_gb_per_s(sent: int | None, milliseconds: float, world_size: int | None) -> float | None:
    if not sent or not world_size or world_size < 2 or milliseconds <= 0:
        return None
    return bus_bytes(ALL_REDUCE, sent, world_size) / milliseconds / 1e6


def _notes(views: list[RankView], together: Together, world_size: int | None) -> tuple[str, ...]:
    notes = [note for one in views for note in (*one.recording.notes, *one.steps.notes)]
    notes += together.notes
    if wrapper_of(views[0].recording) == "torch DDP":
        notes.append(GUESSED)
    notes += filter(None, (note_on_windows(one.recording, one.steps) for one in views))
    marks = sorted({one.steps.mark for one in views})
    if len(marks) > 1:
        notes.append(f"Ranks' steps are not marked alike ({', '.join(marks)}): they may hold different work.")
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
