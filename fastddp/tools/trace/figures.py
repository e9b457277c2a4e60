"""The figures of a page, for plotly's JavaScript. The page has the colours of text and grid.

They are dicts, not plotly's objects, which would check each of ten thousands of values. Tests check them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fastddp.times.split import Split
from fastddp.tools.trace import colours
from fastddp.tools.trace.report import BucketReport, Interval, Report, Timeline, What
from fastddp.tools.trace.wording import printable, shortened, shown_parts, size

Figure = dict[str, Any]  # "data" and "layout"

ROW, GAP = 26, 0.5  # pixels a bar of the split; space between two groups of bars, in rows
TALLEST = 700  # pixels: with very many ranks, bars get narrower
LANE, LABEL = 54, 0.29  # pixels a lane of the timeline; how far above its middle its name stands, in lanes

BAR = {"type": "bar", "orientation": "h", "hovertemplate": "%{hovertext}<extra></extra>"}
PATTERNS: dict[What, str] = {"pack": "/", "unpack": "\\", "wait": "."}


def split_figure(reports: Sequence[Report]) -> Figure:
    """A bar for the mean and for each rank, one below the other; several runs' bars are next to each other."""
    positions, labels, splits = map(list, zip(*_split_rows(reports), strict=True))
    bottom = positions[-1]
    pixels = min(ROW, TALLEST / (bottom + 1))
    every = math.ceil(14 / pixels)  # a label needs 14 pixels
    layout = _plain_layout(height=round(pixels * (bottom + 1)) + 56)
    layout["xaxis"] |= {"title": {"text": "ms"}, "rangemode": "tozero", "fixedrange": True}
    layout["yaxis"] |= {"tickvals": positions[::every], "ticktext": labels[::every], "showgrid": False}
    layout["yaxis"] |= {"range": [bottom + 0.5, -0.5], "fixedrange": True}
    return {
        "data": [_split_bar(field, name, positions, labels, splits) for field, name in shown_parts(splits).items()],
        "layout": layout | {"barmode": "stack"},
    }


def _split_bar(field: str, name: str, positions: list[float], labels: list[str], splits: list[Split]) -> dict[str, Any]:
    times = [getattr(split, field) for split in splits]
    return {
        **BAR,
        "name": name,
        "x": times,
        "y": positions,
        "width": 0.78,
        "marker": {"color": colours.SPLIT[field], "line": {"width": 0}},
        **_inner_text([f"{time:,.1f}" for time in times], "#222222" if field == "idle" else "#ffffff"),
        "hovertext": [_hover_of_part(*one) for one in zip(labels, itertools.repeat(name), times, splits, strict=False)],
    }


def _split_rows(reports: Sequence[Report]) -> Iterator[tuple[float, str, Split]]:
    """Position, label and split of each bar."""
    by_run = [_groups(report) for report in reports]
    position = 0.0
    for group in dict.fromkeys(name for of in by_run for name in of):  # in order, each once
        for report, of in zip(reports, by_run, strict=True):
            if group in of:
                yield position, group if len(reports) == 1 else f"{group} · {_in_plotly(report.name, 24)}", of[group]
                position += 1
        position += GAP if len(reports) > 1 else 0


def _groups(report: Report) -> dict[str, Split]:
    ranks = {f"rank {rank.rank}": rank.split for rank in report.ranks}
    return ranks if len(ranks) == 1 else {"<b>mean</b>": report.split, **ranks}


def _hover_of_part(label: str, part: str, time: float, split: Split) -> str:
    share = f", {time / split.step:.1%} of {split.step:,.2f} ms" if split.step else ""
    return f"<b>{label}</b><br>{part}: {time:,.2f} ms{share}"


def timeline_figure(timeline: Timeline, buckets: dict[int, BucketReport], length: float) -> Figure:
    """The lanes of a step, one below the other; ``length``: of the axis, in ms."""
    lanes = len(timeline.lanes)
    layout = _plain_layout(height=LANE * lanes + 92)
    layout["xaxis"] |= {"title": {"text": "ms since the step began"}, "range": [0, length]}
    layout["xaxis"] |= {"minallowed": 0, "maxallowed": length}
    layout["yaxis"] |= {"visible": False, "fixedrange": True, "range": [lanes - 0.6, -0.65]}
    layout |= {"barmode": "overlay", "hovermode": "closest", "dragmode": "zoom", "uirevision": "keep the zoom"}
    layout["margin"] = layout["margin"] | {"t": 34}  # for the buttons
    layout["annotations"] = [_lane_name(number, lane) for number, lane in enumerate(timeline.lanes)]
    order = colours.IN_DRAWING_ORDER
    by_what = {what: [interval for interval in timeline.intervals if interval.what == what] for what in order}
    return {"data": [_bars(what, found, buckets) for what, found in by_what.items() if found], "layout": layout}


def _bars(what: What, intervals: Sequence[Interval], buckets: dict[int, BucketReport]) -> dict[str, Any]:
    marker: dict[str, Any] = {
        "color": [colours.of_interval(what, interval.bucket) for interval in intervals],
        "line": {"width": 0},
    }
    if what in PATTERNS:
        marker["pattern"] = {"shape": PATTERNS[what], "fillmode": "overlay", "size": 5, "solidity": 0.25}
        marker["pattern"]["fgcolor"] = "#ffffff"
    numbers = ["" if interval.bucket is None else str(interval.bucket) for interval in intervals]
    return {
        **BAR,
        "name": what,
        "base": [round(interval.start, 6) for interval in intervals],
        "x": [round(interval.end - interval.start, 6) for interval in intervals],
        "y": [interval.lane for interval in intervals],
        "width": 0.52 if what in colours.HIGH else 0.38,  # lanes
        "opacity": 0.45 if what == "wait" else 1,
        "marker": marker,
        **(_inner_text(numbers, "#ffffff") if what == "collective" else {"textposition": "none"}),
        "hovertext": [_hover_of_interval(interval, buckets) for interval in intervals],
    }


def _inner_text(text: list[str], colour: str) -> dict[str, Any]:
    return {
        "text": text,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": colour},
    }


def _lane_name(number: int, lane: str) -> dict[str, Any]:
    """The name of a lane, above it: on a phone there is no place beside it."""
    return {
        "text": _in_plotly(lane, 60),
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "y": number - LABEL,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11.5},
        "borderpad": 0,
    }


def _hover_of_interval(interval: Interval, buckets: dict[int, BucketReport]) -> str:
    lines = [f"<b>{_in_plotly(interval.name, 90)}</b>"]
    if interval.bucket is not None:
        bucket = buckets.get(interval.bucket)
        known = [size(bucket.bytes)] if bucket and bucket.bytes is not None else []
        lines.append(", ".join([f"{interval.what} of bucket {interval.bucket}", *known]))
    else:
        lines.append(interval.what)
    lines.append(f"starts at {interval.start:,.3f} ms, takes {interval.end - interval.start:,.3f} ms")
    return "<br>".join(lines)


def _in_plotly(text: str, length: int) -> str:
    """Text from a file, escaped: plotly reads strings as HTML."""
    return escape(shortened(printable(text), length), quote=False)


def _plain_layout(height: int) -> dict[str, Any]:
    """No colours, no legend, no space around: the page has them."""
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 4, "r": 12, "t": 8, "b": 44},
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left", "font": {"size": 12.5}},
        "font": {"size": 12.5},
        "uniformtext": {"mode": "hide", "minsize": 10},
        "xaxis": {"zeroline": False, "ticks": "outside", "ticklen": 4},
        "yaxis": {"zeroline": False, "automargin": True},
    }
