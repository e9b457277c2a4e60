"""The command ``fastddp trace``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fastddp.tools.trace.report import Report

NAME = "fastddp-trace"
SUFFIXES = (".html", ".png", ".json")


def trace(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of one run, a file a rank; or folders of them, a folder a run; or JSON of this command.",
            metavar="PATH...",
            show_default=False,
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="Write OUTPUT.html, OUTPUT.png and OUTPUT.json; of a folder (OUTPUT/), fastddp-trace.* in it. Folders "
            "that do not exist are made.",
            metavar="OUTPUT",
        ),
    ] = NAME,
    step_range: Annotated[
        str | None,
        typer.Option(
            "--step-range",
            help="Steps are the ranges of this name, which a number may follow: NVTX ranges, or record_function.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    no_files: Annotated[bool, typer.Option("--no-files", help="Only print.")] = False,
) -> None:
    """Say where the time of a step went: compute, communication, what overlapped, bucket by bucket.

    Reads chrome traces of torch.profiler (.json, .json.gz) and traces of Nsight Systems (.nsys-rep, .sqlite). Several
    runs are compared with the first one.
    """
    from rich.console import Console

    from fastddp.tools.trace.reading import read_reports
    from fastddp.tools.trace.recording import TraceError
    from fastddp.tools.trace.screen import print_reports

    if not output:
        raise _refuse("--output is empty. Give what names of files are to begin with.")
    if step_range == "":
        raise _refuse("--step-range is empty. Give the name of the ranges that are steps.")
    files = [] if no_files else _files(output)
    for path in files:  # before traces are read, which takes long
        _check_writable(path)
    try:
        reports = read_reports(paths, step_range)
    except TraceError as error:
        raise _refuse(str(error)) from None
    console = Console()
    try:  # before it prints: a reader may close the pipe
        written = _write(reports, files)
    finally:
        print_reports(reports, console)
    if written:
        console.print(f"Written: {', '.join(map(str, written))}", markup=False, highlight=False, soft_wrap=True)


def _files(output: str) -> list[Path]:
    """The page, the picture and the JSON."""
    # A Path drops "/" and "/." at its end, and its is_dir() raises where the name is too long.
    is_folder = output.endswith(("/", "/.")) or Path(output).name in ("", "..") or os.path.isdir(output)  # noqa: PTH112
    start = Path(output) / NAME if is_folder else Path(output)
    if start.suffix in SUFFIXES:
        start = start.with_suffix("")
    return [start.with_name(start.name + suffix) for suffix in SUFFIXES]


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, or that may be a trace; leave everything as it is."""
    from fastddp.tools.trace.as_json import holds_reports

    try:
        try:
            path.open("r+b").close()
        except FileNotFoundError:
            folder = next(folder for folder in path.parents if folder.exists())
            tempfile.TemporaryFile(dir=folder).close()
            return
    except OSError as error:
        raise _cannot_be_written(path, error) from None
    if path.suffix == ".json" and not holds_reports(path):
        raise _refuse(f"{path} is there, and no report of this command: it would be lost. Give another --output.")


def _write(reports: list[Report], files: list[Path]) -> list[Path]:
    from fastddp.tools.trace.as_json import write_json
    from fastddp.tools.trace.page import write_page
    from fastddp.tools.trace.picture import write_picture

    for path, write in zip(files, (write_page, write_picture, write_json), strict=False):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, reports)
        except OSError as error:
            raise _cannot_be_written(path, error) from None
    return files


def _cannot_be_written(path: Path, error: OSError) -> typer.Exit:
    return _refuse(
        f"{path} cannot be written: {error.strerror or 'no file'}. Give another --output, or --no-files, to print only."
    )


def _refuse(message: str) -> typer.Exit:
    typer.echo(f"fastddp trace: {message}", err=True)
    return typer.Exit(2)
