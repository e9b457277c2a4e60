"""All commands of ``fastddp``; each lives with what it does, in a module ``command``."""

from __future__ import annotations

import typer

from fastddp.doctor.command import doctor
from fastddp.planning.command import plan
from fastddp.trace.command import trace

app = typer.Typer(
    help="What surrounds a training run with fastddp. The run itself: torchrun ... -m fastddp train.py arguments...",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (doctor, plan, trace):
    app.command()(command)
