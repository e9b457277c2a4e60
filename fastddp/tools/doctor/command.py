"""``fastddp doctor``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fastddp.tools.doctor.report import Report
    from fastddp.tools.doctor.together import Seat

_JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write all of it there too.")
]
_TimeLimit = Annotated[
    float,
    typer.Option(
        min=1.0, max=24 * 3600.0, metavar="SECONDS", help="Under torchrun: what a rank may take for each of two parts."
    ),
]


def doctor(json_file: _JsonFile = None, time_limit: _TimeLimit = 120.0) -> None:
    """What a job will run on, before it runs: versions, GPUs, kernels.

    Under torchrun (torchrun ... --no-python fastddp doctor) also whether ranks agree, and how fast they exchange.

    Exit status: 0; 1 if something is wrong; 2 for wrong usage, or if FILE cannot be written.
    """
    from rich.console import Console

    from fastddp.tools.doctor.examination import examine
    from fastddp.tools.doctor.report import write
    from fastddp.tools.doctor.together import seat

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.absolute().parent}", param_hint="--json")
    try:
        place = seat(os.environ)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="the environment") from None
    if place is None:
        with Console(stderr=True).status("looking") as spinner:
            report = write(None, {0: examine(None, spinner.update)})
        raise typer.Exit(_say(report, json_file))
    status = _together(place, time_limit, json_file)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the interpreter's own end, which waits for threads and process groups: one may hang, and is reported.
    os._exit(status)


def _together(seat: Seat, time_limit: float, json_file: Path | None) -> int:
    from torch.distributed import DistError

    from fastddp.tools.doctor.together import follow, lead

    try:
        store = seat.store(time_limit)
    except DistError as error:
        where = f"{seat.address}:{seat.port}"
        print(f"rank {seat.rank}: no store at {where} within {time_limit:g} s: {error}", file=sys.stderr)
        return 1
    if seat.rank != 0:
        follow(seat, store, time_limit)
        return 0  # rank 0's status is the job's
    return _say(lead(seat, store, time_limit), json_file)


def _say(report: Report, json_file: Path | None) -> int:
    """Print and write; return the exit status."""
    from rich.console import Console

    from fastddp.tools.doctor.report import page

    out = Console(highlight=False)
    # Wide enough for the tables even if it is a file or a pipe.
    (out if out.is_terminal else Console(width=150, highlight=False)).print(page(report))
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(asdict(report) | {"status": report.status}, indent=2) + "\n")
        except OSError as error:  # all of it has been printed
            typer.echo(f"fastddp doctor: {json_file} cannot be written: {error.strerror}. Name another file.", err=True)
            return 2
    return report.status
