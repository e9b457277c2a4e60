"""The command ``fastddp trace``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fastddp.tools.trace.report import Report

NAME = "fastddp-trace"


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
            help="Write OUTPUT.html, OUTPUT.png and OUTPUT.json; of a folder (OUTPUT/), fastddp-trace.* in it.",
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
    try:
        reports = read_reports(paths, step_range)
    except TraceError as error:
        raise _refuse(str(error)) from None
    is_folder = output.endswith(("/", "/.")) or Path(output).name in ("", "..")  # a Path drops "/" and "/." at its end
    console = Console()
    try:  # before it prints: a reader may close the pipe
        written = [] if no_files else _write(reports, Path(output) / NAME if is_folder else Path(output))
    finally:
        print_reports(reports, console)
    if written:
        console.print(f"Written: {', '.join(map(str, written))}", markup=False, highlight=False, soft_wrap=True)


def _write(reports: list[Report], output: Path) -> list[Path]:
    from fastddp.tools.trace.as_json import write_json
    from fastddp.tools.trace.page import write_page
    from fastddp.tools.trace.picture import write_picture

    written = []
    for suffix, write in ((".html", write_page), (".png", write_picture), (".json", write_json)):
        path = output.with_name(output.name + suffix)
        try:
            write(path, reports)
        except OSError as error:
            raise _refuse(f"{path} cannot be written: {error.strerror}.") from None
        written.append(path)
    return written


def _refuse(message: str) -> typer.Exit:
    typer.echo(f"fastddp trace: {message}", err=True)
    return typer.Exit(2)
