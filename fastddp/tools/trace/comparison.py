"""Several runs side by side; the others are compared with the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from fastddp.tools.trace.grids import Column, Grid, as_change, as_count, as_number
from fastddp.tools.trace.report import Report, StepMark
from fastddp.tools.trace.wording import (
    PARTS,
    all_steps,
    collective_name,
    in_words,
    ms,
    percent,
    plural,
    printable,
    quantile,
    shown_parts,
    size,
    wrapper,
)


@dataclass(frozen=True)
class Change:
    """How a run differs from the first one."""

    name: str
    headline: str
    sentences: tuple[str, ...]  # the parts of the headline's difference, and other differences


@dataclass(frozen=True)
class Comparison:
    """The comparison of two or more runs."""

    steps: Grid  # times of a step, with differences and ratios
    buckets: Grid  # matched by number
    collectives: Grid  # matched by kind
    changes: tuple[Change, ...]  # of each run but the first


def compare(reports: Sequence[Report]) -> Comparison:
    """Compare each run with the first one; ValueError: there are fewer than two."""
    if len(reports) < 2:
        raise ValueError(f"a comparison needs two runs, and there is {plural(len(reports), 'run')}")
    first, *others = reports
    changes = tuple(
        Change(printable(other.name), _comparing_headline(first, other), tuple(_what_changed(first, other)))
        for other in others
    )
    return Comparison(_step_grid(reports), bucket_grid(reports), collective_grid(reports), changes)


def for_screen(comparison: Comparison) -> RenderableType:
    """What rich prints: sentences, then tables."""
    parts: list[RenderableType] = []
    for change in comparison.changes:
        parts.append(Text(change.headline, style="bold"))
        parts += [Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in change.sentences]
    parts.append(comparison.steps.for_screen("A step, ms"))
    parts.append(comparison.buckets.for_screen("Buckets, matched by their numbers"))
    if comparison.collectives.rows:
        parts.append(comparison.collectives.for_screen("Collectives, a step"))
    return Group(*parts)


def _step_grid(reports: Sequence[Report]) -> Grid:
    """Times of a step: a column for each run; after all but the first also difference and ratio to the first."""
    columns = [Column(""), Column(printable(reports[0].name), as_number)]
    for report in reports[1:]:
        columns.append(Column(printable(report.name), as_number))
        columns += [Column("difference", as_change), Column("ratio", as_number)]
    rows = []
    shown = shown_parts(report.split for report in reports).values()
    for name, read in STEP_ROWS.items():
        if name in PARTS.values() and name not in shown:
            continue
        first, *others = (read(report) for report in reports)
        row: list[Any] = [name, first]
        for other in others:
            row += [other, _difference(first, other), _ratio(first, other)]
        rows.append(tuple(row))
    return Grid(tuple(columns), tuple(rows))


Number = float | None

STEP_ROWS: dict[str, Callable[[Report], Number]] = {
    "step, mean": lambda report: report.split.step,
    **{name: attrgetter(f"split.{field}") for field, name in PARTS.items()},
    "communication": lambda report: report.split.communication,
    "step, median": lambda report: _step_quantile(report, 0.5),
    "step, 10 %": lambda report: _step_quantile(report, 0.1),
    "step, 90 %": lambda report: _step_quantile(report, 0.9),
}


def _step_quantile(report: Report, part: float) -> Number:
    steps = all_steps(report.ranks)
    return quantile(steps, part) if steps else None


def _difference(before: Number, after: Number) -> Number:
    return None if before is None or after is None else after - before


def _ratio(before: Number, after: Number) -> Number:
    return None if before is None or after is None or before == 0 else after / before


def bucket_grid(reports: Sequence[Report]) -> Grid:
    """A row for each bucket number of any run."""
    found = [{bucket.bucket: bucket for bucket in report.buckets} for report in reports]
    numbers = sorted(set().union(*found))
    grid = _side_by_side(reports, Column("bucket", str), numbers, found, BUCKET_COLUMNS)
    return replace(grid, buckets=tuple(numbers))


def collective_grid(reports: Sequence[Report]) -> Grid:
    """A row for each kind of collective of any run."""
    found = [{collective_name(one.kind, one.of_buckets): one for one in report.collectives} for report in reports]
    kinds = list(dict.fromkeys(kind for of_run in found for kind in of_run))
    return _side_by_side(reports, Column("collective"), kinds, found, COLLECTIVE_COLUMNS)


def _side_by_side(
    reports: Sequence[Report],
    first: Column,
    keys: Sequence[Any],
    found: Sequence[dict[Any, Any]],
    compared_columns: Sequence[ComparedColumn],
) -> Grid:
    """A row for each key: for each column, the values of all runs, and how they compare with the first run's."""
    columns = [first]
    for name, show, _, compared in compared_columns:
        columns += [Column(f"{name}, {printable(report.name)}", show, in_page=compared is None) for report in reports]
        if compared:
            columns += [Column(f"{name}, {compared[0]}", compared[1]) for _ in reports[1:]]
    rows = []
    for key in keys:
        row: list[Any] = [key]
        for _, _, read, compared in compared_columns:
            values = [read(of[key]) if key in of else None for of in found]
            row += values
            if compared:
                row += [compared[2](values[0], value) for value in values[1:]]
        rows.append(tuple(row))
    return Grid(tuple(columns), tuple(rows))


Compared = tuple[str, Callable[[Any], str], Callable[[Number, Number], Number]]

ComparedColumn = tuple[str, Callable[[Any], str], Callable[[Any], Any], Compared | None]

BUCKET_COLUMNS: tuple[ComparedColumn, ...] = (
    ("size", size, lambda bucket: bucket.bytes, None),
    ("duration, ms", as_number, lambda bucket: bucket.duration, ("ratio", as_number, _ratio)),
    ("exposed, ms", as_number, lambda bucket: bucket.exposed, ("difference", as_change, _difference)),
)
COLLECTIVE_COLUMNS: tuple[ComparedColumn, ...] = (
    ("count", as_count, lambda one: one.count, None),
    ("total, ms", as_number, lambda one: one.total, ("ratio", as_number, _ratio)),
    ("exposed, ms", as_number, lambda one: one.exposed, ("difference", as_change, _difference)),
)


def _comparing_headline(before: Report, after: Report) -> str:
    old, new = before.split.step, after.split.step
    ratio = f"{new / old:.2f} of the " if old else "not the "
    step = f"A step of “{printable(after.name)}” takes {ms(new)}, {ratio}{ms(old)} of “{printable(before.name)}”"
    if doubt := _doubt(before, after):
        return f"{step}{doubt}."
    return f"{step}.{_other_work(before, after)}"


def _other_work(before: Report, after: Report) -> str:
    """A sentence, if at least half of the difference is compute that is not the wrapper's."""
    difference = after.split.step - before.split.step
    other = _other_compute(after) - _other_compute(before)
    if before.split.step == 0 or difference == 0 or other / difference < 0.5:
        return ""
    return (
        f" Compute outside of DDP changed by {in_words(other)}: the model, the optimizer, or who else used the cores. "
        "That says nothing about DDP."
    )


def _other_compute(report: Report) -> float:
    """Ms a step. What is packed is drawn in timelines alone."""
    packed = [
        sum(interval.end - interval.start for interval in timeline.intervals if interval.what in ("pack", "unpack"))
        for timeline in report.timelines
    ]
    return report.split.compute + report.split.overlapped - (fmean(packed) if packed else 0.0)


def _what_changed(before: Report, after: Report) -> Iterator[str]:
    """Sentences, the most important first."""
    if before.split != after.split:
        shown = shown_parts([before.split, after.split]).items()
        changes = [(getattr(after.split, field) - getattr(before.split, field), name) for field, name in shown]
        changes.sort(key=lambda change: -abs(change[0]))
        addends = ", ".join(f"{name} {in_words(value)}" for value, name in changes)
        yield f"The difference of {in_words(after.split.step - before.split.step)} consists of {addends}."
    if before.split.communication and after.split.communication:
        yield (
            f"{percent(after.split.overlapped, after.split.communication)} of communication is hidden behind compute, "
            f"instead of {percent(before.split.overlapped, before.split.communication)}."
        )
    of_after = {bucket.bucket: bucket for bucket in after.buckets}
    pairs = [(bucket, of_after[bucket.bucket]) for bucket in before.buckets if bucket.bucket in of_after]
    changed = [pair for pair in pairs if pair[0].exposed != pair[1].exposed]
    if changed:
        then, now = max(changed, key=lambda pair: abs(pair[1].exposed - pair[0].exposed))
        exposed = f"{ms(now.exposed)} instead of {ms(then.exposed)}"
        yield f"The bucket whose exposed time changed most is {then.bucket}: {exposed}."
    yield from _circumstances(before, after)


def _doubt(before: Report, after: Report) -> str:
    """What to add to a difference that may be none: the middle halves of both runs' step times overlap."""
    some, others = all_steps(before.ranks), all_steps(after.ranks)
    if not some or not others:
        return ""
    apart = quantile(some, 0.75) < quantile(others, 0.25) or quantile(others, 0.75) < quantile(some, 0.25)
    return "" if apart else ", which is no more than steps of one run differ"


def _circumstances(before: Report, after: Report) -> Iterator[str]:
    for report in (before, after):
        if report.warnings:
            yield f"“{printable(report.name)}” is incomplete: not all of its traces could be read."
    if before.wrapper != after.wrapper:
        yield (
            f"It ran under {wrapper(after)}, not under {wrapper(before)}: a bucket's number may mean other parameters."
        )
    if before.recorder != after.recorder:
        yield f"It was recorded by {after.recorder}, not by {before.recorder}: what recording costs differs."
    if before.step_mark != after.step_mark:
        yield (
            f"Its steps are counted {STEPS[after.step_mark]}, not {STEPS[before.step_mark]}: they may hold different "
            "work."
        )
    sizes = after.world_size, before.world_size
    if sizes[0] != sizes[1]:
        now, then = ("an unknown number of ranks" if n is None else plural(n, "rank") for n in sizes)
        yield f"It has {now} instead of {then}."
    old, new = _contents(before), _contents(after)
    if old != new:
        yield f"It has {new}, instead of {old}."


STEPS: dict[StepMark, str] = {
    "--step-range": "by ranges of the script's own (--step-range)",
    "ProfilerStep#": "by calls of profile.step() (ProfilerStep#)",
    "fastddp.step": "by the wrapper's windows (fastddp.step)",
    "forward": "by the wrapper's forwards",
    "nothing": "as one, the whole trace",
}


def _contents(report: Report) -> str:
    sizes = [bucket.bytes for bucket in report.buckets if bucket.bytes is not None]
    wires = sorted({bucket.wire for bucket in report.buckets if bucket.wire is not None})
    what = plural(len(report.buckets), "bucket")
    if sizes and len(sizes) == len(report.buckets):
        what += f" of {size(sum(sizes))} in all"
    return printable(f"{what} ({', '.join(wires)})" if wires else what)
