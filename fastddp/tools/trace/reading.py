"""From paths to reports, with a progress bar for a person who waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fastddp.tools.trace.analysis import analyse
from fastddp.tools.trace.as_json import NotAReport, read_json
from fastddp.tools.trace.files import Run, find_inputs, read
from fastddp.tools.trace.recording import Recording, TraceError
from fastddp.tools.trace.report import Report


def read_reports(paths: Sequence[Path], step_range: str | None = None) -> list[Report]:
    """A report of each run, and the reports in files of reports; no two have the same name.

    Args:
        paths: files, or folders of them.
        step_range: the name of the script's own ranges that are steps.

    Raises:
        TraceError: something is neither a trace nor a report.
    """
    reports: list[Report] = []
    for found in find_inputs(paths):
        if isinstance(found, Run):
            recordings, notes = read_run(found, step_range)
            reports.append(analyse(recordings, found.name, notes, step_range))
        else:
            reports += _saved(found)
    return _told_apart(reports)


def _saved(path: Path) -> tuple[Report, ...]:
    try:
        return read_json(path)
    except NotAReport as error:
        raise TraceError(str(error)) from None


def _told_apart(reports: list[Report]) -> list[Report]:
    names: set[str] = set()
    result = []
    for report in reports:
        name, number = report.name, 1
        while name in names:
            number += 1
            name = f"{report.name} ({number})"
        names.add(name)
        result.append(replace(report, name=name))
    return result


def read_run(run: Run, step_range: str | None = None) -> tuple[list[Recording], list[str]]:
    """All recordings of a run, and notes on what was left out of its folder.

    Raises:
        TraceError: a file that was named, or each file of a folder, cannot be read as a trace.
    """
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
