"""The picture of one or more runs, as a PNG for a README: splits, and the timeline of one step of each run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from fastddp.times.split import Split
from fastddp.tools.trace import colours
from fastddp.tools.trace.comparison import compare
from fastddp.tools.trace.report import Report, Timeline, What
from fastddp.tools.trace.thinning import thin
from fastddp.tools.trace.wording import headline, ms, printable, shortened, shown_parts, unbroken

WIDTH, DPI = 11.0, 130  # inches; pixels an inch
MOST_RANKS = 8  # with bars; of more, only the shortest and the longest
MOST_BARS = 3_000  # of a timeline, about two a pixel
ROW, LANE = 0.3, 0.52  # inches a bar of the split, and a lane of a timeline
AROUND = 0.75  # inches for title and axis of each part
NARROWEST_NUMBER = 0.018  # share of the axis that a bucket's number needs


def write_picture(path: Path, reports: Sequence[Report]) -> None:
    """Write the picture of runs, compared with the first; ValueError: there is no report."""
    if not reports:
        raise ValueError("a picture needs a report, and there is none")
    # Names may have dollar signs, between which matplotlib would look for formulas.
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 10}):
        draw(reports).savefig(path, dpi=DPI, format="png")


def draw(reports: Sequence[Report]) -> Figure:
    """The figure."""
    rows = _split_rows(reports)
    timelines = [
        (report, min(report.timelines, key=lambda timeline: timeline.rank)) for report in reports if report.timelines
    ]
    heights = [ROW * len(rows) + AROUND, *(LANE * len(timeline.lanes) + AROUND for _, timeline in timelines)]
    layout = ConstrainedLayoutEngine(h_pad=0.12, hspace=0.02)
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.1), layout=layout, facecolor="white")
    figure.suptitle(_title(reports), fontsize=12.5, x=0.012, ha="left", fontweight="bold")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_splits(axes[0], rows)
    length = max((timeline.length for _, timeline in timelines), default=0.0)
    for place, (report, timeline) in zip(axes[1:], timelines, strict=True):
        _draw_timeline(place, timeline, length)
        name = f"{shortened(printable(report.name), 60)}: " if len(reports) > 1 else ""
        text = f"{name}the median step of rank {timeline.rank}, {ms(timeline.length)}"
        place.set_title(text[0].upper() + text[1:] if not name else text, loc="left", fontsize=11)
    if timelines:
        axes[-1].set_xlabel("milliseconds since the step began")
        handles = _legend([timeline for _, timeline in timelines])
        figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False)
    return figure


def _title(reports: Sequence[Report]) -> str:
    if len(reports) == 1:
        sentences = headline(reports[0])
    else:
        sentences = " ".join(change.headline for change in compare(reports).changes)
    incomplete = [report for report in reports if report.warnings]
    if incomplete:
        named = "" if len(reports) == 1 else " of " + ", ".join(printable(report.name) for report in incomplete)
        sentences = f"Incomplete: not all{named} could be read. {sentences}"
    return textwrap.fill(unbroken(sentences), 94)


def _split_rows(reports: Sequence[Report]) -> list[tuple[str, Split]]:
    """Label and split of each bar: several runs' means, or one run's mean and ranks."""
    if len(reports) > 1:
        return [(shortened(printable(report.name), 30), report.split) for report in reports]
    ranks = list(reports[0].ranks)
    if len(ranks) == 1:
        return [(f"rank {ranks[0].rank}", ranks[0].split)]
    if len(ranks) > MOST_RANKS:
        ranks.sort(key=lambda rank: rank.split.step)
        ranks = [ranks[0], ranks[-1]]
    return [("mean", reports[0].split), *((f"rank {rank.rank}", rank.split) for rank in ranks)]


def _draw_splits(axes: Axes, rows: Sequence[tuple[str, Split]]) -> None:
    starts = [0.0] * len(rows)
    longest = max(split.step for _, split in rows)
    shown = shown_parts(split for _, split in rows)
    for field, name in shown.items():
        times = [getattr(split, field) for _, split in rows]
        bars = axes.barh(range(len(rows)), times, 0.78, left=starts, color=colours.SPLIT[field], label=name)
        labels = [f"{time:,.1f}" if time > 0.035 * longest else "" for time in times]
        axes.bar_label(bars, labels, label_type="center", fontsize=9, color="#222222" if field == "idle" else "white")
        starts = [start + time for start, time in zip(starts, times, strict=True)]
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    for tick, (label, _) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if label.startswith("rank ") else "bold")
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, longest * 1.01 or 1)
    axes.set_title("A step, ms", loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(ncols=len(shown), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.1)


def _draw_timeline(axes: Axes, timeline: Timeline, length: float) -> None:
    drawn = thin(timeline, MOST_BARS).timeline.intervals
    for what in colours.IN_DRAWING_ORDER:
        height = 0.8 if what in colours.HIGH else 0.6  # lanes
        for lane in range(len(timeline.lanes)):
            bars = [interval for interval in drawn if interval.what == what and interval.lane == lane]
            axes.broken_barh(
                [(bar.start, bar.end - bar.start) for bar in bars],
                (lane - height / 2, height),
                facecolors=[colours.of_interval(what, bar.bucket) for bar in bars],
                alpha=0.4 if what == "wait" else 1,
                edgecolor="white",
                linewidth=0.5 if what == "collective" else 0,
            )
    for bar in drawn:
        if bar.what == "collective" and bar.bucket is not None and bar.end - bar.start > NARROWEST_NUMBER * length:
            middle = (bar.start + bar.end) / 2
            axes.text(middle, bar.lane, str(bar.bucket), color="white", ha="center", va="center", fontsize=9)
    axes.set_yticks(range(len(timeline.lanes)), [shortened(printable(lane), 26) for lane in timeline.lanes])
    axes.set_ylim(len(timeline.lanes) - 0.45, -0.55)
    axes.set_xlim(0, length * 1.01 or 1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _legend(timelines: Sequence[Timeline]) -> list[Patch]:
    found = {interval.what for timeline in timelines for interval in timeline.intervals}
    labels: dict[What, str] = {what: what for what in ("forward", "compute", "copy", "wait")}
    labels["collective"] = "collective, pack, unpack: in the colour of their bucket"
    return [
        Patch(color=colours.of_interval(what, 0), alpha=0.4 if what == "wait" else 1, label=label)
        for what, label in labels.items()
        if what in found
    ]
