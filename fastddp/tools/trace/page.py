"""One HTML page that holds everything it needs: it works from a file, offline, and asks no server for anything.

The page is `page.html`, filled in by Jinja, which escapes text from files. Its policy allows only the page's own two
scripts to run, and nothing to be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fastddp.tools.trace import colours
from fastddp.tools.trace.comparison import compare
from fastddp.tools.trace.figures import split_figure, timeline_figure
from fastddp.tools.trace.grids import Grid, bucket_grid, collective_grid, rank_grid
from fastddp.tools.trace.report import Report, What
from fastddp.tools.trace.thinning import Thinned, thin
from fastddp.tools.trace.wording import DEFINITIONS, headline, ms, printable, setting, shown_parts, unbroken

MOST_BARS = 4_000  # of a timeline; with more, zooming is slow
MOST_BARS_OF_A_PAGE = 60_000  # of all its timelines; a bar takes some 200 bytes
FEWEST_BARS = 500  # of a timeline, however many there are

Legend = list[tuple[str, str, str]]  # name, colour, class
TIMELINE_LEGEND: dict[What, tuple[str, str, str]] = {
    "forward": ("forward", colours.FORWARD, ""),
    "compute": ("compute", colours.COMPUTE, ""),
    "copy": ("copy", colours.COPY, ""),
    "collective": ("collective", colours.BUCKETS[0], ""),
    "pack": ("pack", colours.BUCKETS[0], "striped"),
    "unpack": ("unpack", colours.BUCKETS[0], "striped back"),
    "wait": ("wait", colours.BUCKETS[0], "dotted"),
}


@dataclass(frozen=True)
class Run:
    """What the page shows of one report."""

    report: Report
    figures: tuple[tuple[str, int], ...]  # name and rank of each timeline
    buckets: Grid
    collectives: Grid
    ranks: Grid
    bus_known: bool


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Write the page about one run, or about several, which are compared with the first.

    Raises:
        ValueError: there is no report.
    """
    path.write_bytes(page(reports).encode())


def page(reports: Sequence[Report]) -> str:
    """The page of :func:`write_page`: some 5 MB, most of it plotly's JavaScript."""
    if not reports:
        raise ValueError("a page needs a report, and there is none")
    comparison = compare(reports) if len(reports) > 1 else None
    drawn = Drawn(reports)
    runs = [
        Run(
            report,
            drawn.names[number],
            bucket_grid(report),
            collective_grid(report),
            rank_grid(report),
            any(bucket.bus_gb_per_s is not None for bucket in report.buckets),
        )
        for number, report in enumerate(reports)
    ]
    plotly_js, script = get_plotlyjs(), resource("page.js")
    return template().render(
        title=", ".join(report.name for report in reports),
        headline=" ".join(change.headline for change in comparison.changes) if comparison else headline(reports[0]),
        comparison=comparison,
        reports=reports,
        runs=runs,
        split_legend=split_legend(reports),
        timeline_legend=timeline_legend(reports),
        definitions=DEFINITIONS,
        headline_of=headline,
        setting=setting,
        colour_of=colours.of_bucket,
        # A browser ends a script at any `</script`, so each `<` of the JSON is written as an escape.
        figures=Markup(json.dumps(drawn.figures, separators=(",", ":")).replace("<", "\\u003c")),
        style=Markup(resource("page.css")),
        plotly=Markup(plotly_js),
        script=Markup(script),
        policy=policy(plotly_js, script),
    )


class Drawn:
    """All figures of a page, by name."""

    def __init__(self, reports: Sequence[Report]) -> None:
        timelines = [timeline for report in reports for timeline in report.timelines]
        most = max(FEWEST_BARS, min(MOST_BARS, MOST_BARS_OF_A_PAGE // max(1, len(timelines))))
        # One axis for all, so that a longer step looks longer.
        length = max((timeline.length for timeline in timelines), default=0.0)
        self.figures: dict[str, dict[str, Any]] = {"split": {"figure": split_figure(reports), "caption": ""}}
        self.names: list[tuple[tuple[str, int], ...]] = []
        for number, report in enumerate(reports):
            buckets = {bucket.bucket: bucket for bucket in report.buckets}
            names: list[tuple[str, int]] = []
            for timeline in report.timelines:
                thinned = thin(timeline, most)
                name = f"timeline-{number}-{len(names)}"
                figure = timeline_figure(thinned.timeline, buckets, length)
                self.figures[name] = {"figure": figure, "caption": caption(thinned)}
                names.append((name, timeline.rank))
            self.names.append(tuple(names))


def caption(thinned: Thinned) -> str:
    """Which step is drawn, and what is left out."""
    timeline = thinned.timeline
    text = f"Step {timeline.step} of rank {timeline.rank}, {ms(timeline.length)}."
    return f"{text} {thinned.note}" if thinned.note else text


def split_legend(reports: Sequence[Report]) -> Legend:
    """The parts of the bars."""
    splits = [split for report in reports for split in (report.split, *(rank.split for rank in report.ranks))]
    return [(name, colours.SPLIT[field], "") for field, name in shown_parts(splits).items()]


def timeline_legend(reports: Sequence[Report]) -> Legend:
    """The kinds of intervals in the timelines."""
    found = {interval.what for report in reports for timeline in report.timelines for interval in timeline.intervals}
    return [entry for what, entry in TIMELINE_LEGEND.items() if what in found]


def policy(*scripts: str) -> str:
    """What a browser may do: draw, and run these scripts."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def template() -> Template:
    """The page's template. It escapes everything except Markup."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=clean)
    return environment.from_string(resource("page.html"))


def clean(value: object) -> object:
    """Text as a page can show it."""
    return unbroken(printable(value)) if type(value) is str else value


def resource(name: str) -> str:
    """A file beside this module."""
    return files("fastddp.tools.trace").joinpath(name).read_text(encoding="utf-8")
