"""Tables, independent of how they are shown: on a screen by rich, in a page by HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from statistics import median
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from fastddp.tools.trace import colours
from fastddp.tools.trace.report import BucketReport, CollectiveReport, RankReport, Report
from fastddp.tools.trace.wording import (
    LONGEST_NAME,
    PARTS,
    UNKNOWN,
    collective_name,
    parameters,
    printable,
    shortened,
    shown_parts,
    size,
)


def as_number(value: float) -> str:
    """A time or a ratio: tables always show two digits, so that columns line up."""
    return f"{value:,.2f}"


def as_change(value: float) -> str:
    """A difference of times."""
    shown = f"{value:+,.2f}".replace("-", "−")
    return shown[1:] if shown[1:] == "0.00" else shown


def as_count(value: float) -> str:
    """A mean of numbers of things."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


@dataclass(frozen=True)
class Column:
    """How the values of a column are shown; None is shown as unknown. ``in_page``: only a page has room for it."""

    name: str
    show: Callable[[Any], str] = printable
    in_page: bool = False

    @property
    def is_text(self) -> bool:
        """Text is on the left, numbers are on the right."""
        return self.show is printable

    def cell(self, value: Any) -> str:
        """A value as text."""
        return UNKNOWN if value is None else self.show(value)


@dataclass(frozen=True)
class Grid:
    """Rows of values; ``buckets`` has the bucket that a row is about, for its colour."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    buckets: tuple[int, ...] | None = None

    def cells(self, row: tuple[Any, ...]) -> list[str]:
        """A row as text."""
        return [column.cell(value) for column, value in zip(self.columns, row, strict=True)]

    def for_screen(self, title: str | None = None) -> Table:
        """The table that rich prints."""
        table = Table(box=box.SIMPLE_HEAVY, title=title, title_style="bold", title_justify="left", padding=(0, 1, 0, 0))
        shown = [number for number, column in enumerate(self.columns) if not column.in_page]
        for column in (self.columns[number] for number in shown):
            heading = Text("\n".join(column.name.replace(",", "").split()))  # to fit 80 columns
            justify: JustifyMethod = "left" if column.is_text else "right"
            table.add_column(heading, justify=justify, no_wrap=not column.is_text, overflow="fold")
        for number, row in enumerate(self.rows):
            cells = self.cells(row)
            first, *others = (Text(cells[column]) for column in shown)
            if self.buckets:
                first = Text.assemble(("■ ", colours.of_bucket(self.buckets[number])), first)
            table.add_row(first, *others)
        return table


BUCKETS: dict[Column, Callable[[BucketReport], Any]] = {
    Column("bucket", str): lambda bucket: bucket.bucket,
    Column("parameters", in_page=True): lambda bucket: parameters(bucket) or None,
    Column("size", size): lambda bucket: bucket.bytes,
    Column("wire", in_page=True): lambda bucket: bucket.wire,
    Column("ready, ms", as_number): lambda bucket: bucket.ready,
    Column("delay, ms", as_number): lambda bucket: bucket.delay,
    Column("start, ms", as_number, in_page=True): lambda bucket: bucket.start,
    Column("duration, ms", as_number): lambda bucket: bucket.duration,
    Column("exposed, ms", as_number): lambda bucket: bucket.exposed,
    Column("bus, GB/s", as_number): lambda bucket: bucket.bus_gb_per_s,
    Column("last on rank", str): lambda bucket: bucket.last_rank,
    Column("last gradient"): lambda bucket: bucket.last_parameter and shortened(bucket.last_parameter, LONGEST_NAME),
}

RANKS: dict[Column, Callable[[RankReport], Any]] = {
    Column("rank"): lambda rank: str(rank.rank),
    Column("steps", str): lambda rank: len(rank.step_ms),
    Column("step, ms", as_number): lambda rank: rank.split.step,
    **{Column(f"{name}, ms", as_number): attrgetter(f"split.{field}") for field, name in PARTS.items()},
    Column("waits, ms", as_number): lambda rank: rank.waits_ms,
    Column("median step, ms", as_number, in_page=True): lambda rank: median(rank.step_ms) if rank.step_ms else None,
    Column("longest step, ms", as_number, in_page=True): lambda rank: max(rank.step_ms, default=None),
    Column("file", in_page=True): lambda rank: shortened(rank.source, 2 * LONGEST_NAME),
}
MEAN: dict[str, Callable[[Report], Any]] = {
    "rank": lambda report: "mean",
    "step, ms": lambda report: report.split.step,
    **{f"{name}, ms": attrgetter(f"split.{field}") for field, name in PARTS.items()},
}


COLLECTIVES: dict[Column, Callable[[CollectiveReport], Any]] = {
    Column("collective"): lambda one: collective_name(one.kind, one.of_buckets),
    Column("count", as_count): lambda one: one.count,
    Column("total, ms", as_number): lambda one: one.total,
    Column("median, ms", as_number): lambda one: one.median,
    Column("bytes", lambda value: size(round(value))): lambda one: one.bytes,
    Column("bus, GB/s", as_number): lambda one: one.bus_gb_per_s,
    Column("exposed, ms", as_number): lambda one: one.exposed,
}


def collective_grid(report: Report) -> Grid:
    """A row for each kind of collective, without columns that are all unknown."""
    return _without_unknown(COLLECTIVES, report.collectives)


def bucket_grid(report: Report) -> Grid:
    """A row for each bucket, without columns that are all unknown."""
    numbers = tuple(bucket.bucket for bucket in report.buckets)
    moved = {Column(f"{what}, ms", as_number): partial(_drawn, report, what) for what in ("pack", "unpack")}
    return replace(_without_unknown(BUCKETS | moved, report.buckets), buckets=numbers)


def _drawn(report: Report, what: str, bucket: BucketReport) -> float | None:
    """Ms that this takes a bucket in the step that is drawn, on the rank where that is most; None: nothing."""
    drawn = ([one for one in timeline.intervals if one.what == what] for timeline in report.timelines)
    of_ranks = [sum(one.end - one.start for one in own if one.bucket == bucket.bucket) for own in drawn]
    return max(of_ranks, default=0.0) or None


def _without_unknown(columns: dict[Column, Callable[[Any], Any]], things: Sequence[Any]) -> Grid:
    known = {column: [read(thing) for thing in things] for column, read in columns.items()}
    known = {column: values for column, values in known.items() if any(value is not None for value in values)}
    return Grid(tuple(known), tuple(zip(*known.values(), strict=True)))


def rank_grid(report: Report) -> Grid:
    """A row for each rank, and one for their mean; times of a step are means, so that they add up."""
    hidden = {f"{name}, ms" for name in PARTS.values() if name not in shown_parts([report.split]).values()}
    columns = {column: read for column, read in RANKS.items() if column.name not in hidden}
    rows = [tuple(read(rank) for read in columns.values()) for rank in report.ranks]
    if len(rows) > 1:
        rows.append(tuple(MEAN.get(column.name, lambda _: None)(report) for column in columns))
    return Grid(tuple(columns), tuple(rows))
