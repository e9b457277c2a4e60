"""From paths to reports, with a progress bar for a person who waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fastddp.tools.trace.analysis import analyse
from fastddp.tools.trace.as_json import read_json
from fastddp.tools.trace.files import Run, find_inputs, read
from fastddp.tools.trace.recording import Recording, TraceError
from fastddp.tools.trace.report import Report


def read_reports(paths: Sequence[Path], step_range: str | None = None) -> list[Report]:
    """A report of each run, each with its own name; TraceError: something is neither a trace nor a report."""
    reports: list[Report] = []
    for found in find_inputs(paths):
        if isinstance(found, Run):
            recordings, notes = _read_run(found, step_range)
            reports.append(analyse(recordings, found.name, notes, step_range))
        else:
            reports += read_json(found)
    return _told_apart(reports)


def _told_apart(reports: list[Report]) -> list[Report]:
    told: dict[str, Report] = {}
    for report in reports:
        name, number = report.name, 1
        while name in told:
            number += 1
            name = f"{report.name} ({number})"
        told[name] = replace(report, name=name)
    return list(told.values())


def _read_run(run: Run, step_range: str | None) -> tuple[list[Recording], list[str]]:
    """All recordings of a run, and notes on what was left out of its folder."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    recordings: list[Recording] = []
    errors: list[TraceError] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for path in run.files:
            task = progress.add_task(path.name, total=path.stat().st_size)
            try:
                recordings += read(path, lambda count, task=task: progress.update(task, completed=count), step_range)  # type: ignore[misc]
            except TraceError as error:
                errors.append(error)
    if errors and (not recordings or not run.is_folder):
        raise errors[0]
    return recordings, [f"Left out: {error}" for error in errors]
