"""Reports on a screen: what a person wants to know first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fastddp.tools.trace.comparison import compare, for_screen
from fastddp.tools.trace.grids import bucket_grid, collective_grid, rank_grid
from fastddp.tools.trace.report import Report
from fastddp.tools.trace.wording import headline, printable, setting


def print_reports(reports: Sequence[Report], console: Console) -> None:
    """Print each run; then, if there are several, how the others differ from the first."""
    for report in reports:
        _print_report(report, console)
    if len(reports) > 1:
        console.print(for_screen(compare(reports)))


def _print_report(report: Report, console: Console) -> None:
    console.print(Text.assemble((printable(report.name), "bold"), f": {setting(report)}"))
    for warning in report.warnings:
        console.print(Text(f"Warning: {printable(warning)}", style="bold red"))
    console.print(Text(headline(report)))
    console.print(rank_grid(report).for_screen("Time of a step"))
    if report.buckets:
        console.print(bucket_grid(report).for_screen("Buckets, from the step's start"))
    if report.collectives:
        console.print(collective_grid(report).for_screen("Collectives, a step"))
    for heading, sentences in (("Stragglers", report.stragglers), ("Advice", report.advice), ("Notes", report.notes)):
        if sentences:
            console.print(Text(heading, style="bold"))
        for sentence in sentences:
            console.print(Text(f"- {printable(sentence)}"))
