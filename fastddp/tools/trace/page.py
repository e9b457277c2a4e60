"""One HTML page that holds everything it needs: it works from a file, offline, and asks no server for anything.

The page is `page.html`, filled in by Jinja, which escapes text from files. Its policy allows only the page's own two
scripts to run, and nothing to be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fastddp.tools.trace import colours
from fastddp.tools.trace.comparison import compare
from fastddp.tools.trace.figures import split_figure, timeline_figure
from fastddp.tools.trace.grids import bucket_grid, collective_grid, rank_grid
from fastddp.tools.trace.report import Report, What
from fastddp.tools.trace.thinning import thin
from fastddp.tools.trace.wording import DEFINITIONS, headline, ms, printable, setting, shown_parts, unbroken

MOST_BARS = 4_000  # of a timeline; with more, zooming is slow
MOST_BARS_OF_A_PAGE = 60_000  # of all its timelines; a bar takes some 200 bytes
FEWEST_BARS = 500  # of a timeline, however many there are

OF_TIMELINES: tuple[What, ...] = ("forward", "compute", "copy", "collective", "pack", "unpack", "wait")
PATTERNS: dict[What, str] = {"pack": "striped", "unpack": "striped back", "wait": "dotted"}


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Write the page about one run, or several, compared with the first; ValueError: there is no report."""
    path.write_bytes(page(reports).encode())


def page(reports: Sequence[Report]) -> str:
    """The page of :func:`write_page`: some 5 MB, most of it plotly's JavaScript."""
    if not reports:
        raise ValueError("a page needs a report, and there is none")
    comparison = compare(reports) if len(reports) > 1 else None
    figures, names = _figures(reports)
    runs = [
        {
            "report": report,
            "figures": of_report,
            "buckets": bucket_grid(report),
            "collectives": collective_grid(report),
            "ranks": rank_grid(report),
            "bus_known": any(bucket.bus_gb_per_s is not None for bucket in report.buckets),
        }
        for report, of_report in zip(reports, names, strict=True)
    ]
    plotly_js, script = get_plotlyjs(), _resource("page.js")
    hashes = (base64.b64encode(hashlib.sha256(of.encode()).digest()).decode() for of in (plotly_js, script))
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    splits = [split for report in reports for split in (report.split, *(rank.split for rank in report.ranks))]
    drawn = {interval.what for report in reports for timeline in report.timelines for interval in timeline.intervals}
    # Escapes everything except Markup.
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_clean)
    return environment.from_string(_resource("page.html")).render(
        title=", ".join(report.name for report in reports),
        headline=" ".join(change.headline for change in comparison.changes) if comparison else headline(reports[0]),
        comparison=comparison,
        reports=reports,
        runs=runs,
        # Legends: name, colour, class.
        split_legend=[(name, colours.SPLIT[field], "") for field, name in shown_parts(splits).items()],
        timeline_legend=[(w, colours.of_interval(w, 0), PATTERNS.get(w, "")) for w in OF_TIMELINES if w in drawn],
        definitions=DEFINITIONS,
        headline_of=headline,
        setting=setting,
        colour_of=colours.of_bucket,
        # A browser ends a script at any `</script`, so each `<` of the JSON is written as an escape.
        figures=Markup(json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")),
        style=Markup(_resource("page.css")),
        plotly=Markup(plotly_js),
        script=Markup(script),
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:",
    )


def _figures(reports: Sequence[Report]) -> tuple[dict[str, dict[str, Any]], list[list[tuple[str, int]]]]:
    """All figures by name; and of each report, the name and the rank of each timeline."""
    timelines = [timeline for report in reports for timeline in report.timelines]
    most = max(FEWEST_BARS, min(MOST_BARS, MOST_BARS_OF_A_PAGE // max(1, len(timelines))))
    # One axis for all, so that a longer step looks longer.
    length = max((timeline.length for timeline in timelines), default=0.0)
    figures: dict[str, dict[str, Any]] = {"split": {"figure": split_figure(reports), "caption": ""}}
    names: list[list[tuple[str, int]]] = [[] for _ in reports]
    for number, report in enumerate(reports):
        buckets = {bucket.bucket: bucket for bucket in report.buckets}
        for timeline in report.timelines:
            thinned = thin(timeline, most)
            name = f"timeline-{number}-{len(names[number])}"
            text = f"Step {timeline.step} of rank {timeline.rank}, {ms(timeline.length)}."
            caption = f"{text} {thinned.note}" if thinned.note else text
            figures[name] = {"figure": timeline_figure(thinned.timeline, buckets, length), "caption": caption}
            names[number].append((name, timeline.rank))
    return figures, names


def _clean(value: object) -> object:
    return unbroken(printable(value)) if type(value) is str else value


def _resource(name: str) -> str:
    return files("fastddp.tools.trace").joinpath(name).read_text(encoding="utf-8")
