"""All commands of ``fastddp``; each is in the module ``command`` of its own package."""

from __future__ import annotations

from typing import Annotated

import typer

from fastddp.tools.doctor.command import doctor
from fastddp.tools.explain.command import explain
from fastddp.tools.ps.command import ps
from fastddp.tools.trace.command import trace

app = typer.Typer(
    help="What surrounds a training run with fastddp. The run itself: torchrun ... -m fastddp train.py arguments...",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from fastddp.tools.doctor.software import versions

        typer.echo(versions())
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    pass


for command in (doctor, explain, ps, trace):
    app.command()(command)
