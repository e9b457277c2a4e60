"""``fastddp explain``."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from fastddp.errors import ERRORS

_WIDTH = 100
_Code = Annotated[
    str | None,
    typer.Argument(metavar="CODE", show_default=False, help="At an error's end, as FD010; none: list all codes."),
]


def explain(code: _Code = None) -> None:
    """What an error of fastddp means, and what to do about it.

    Exit status: 0; 2 for a code that there is not.
    """
    if code is None:
        typer.echo("\n".join(f"{known}  {error.title}" for known, error in ERRORS.items()))
        return
    if code.upper() not in ERRORS:
        first, *_, last = ERRORS
        raise typer.BadParameter(f"there is no {code}: codes are {first} to {last}.", param_hint="CODE")
    error = ERRORS[code.upper()]
    paragraphs = (f"{code.upper()}: {error.title}", error.cause, f"What to do: {error.remedy}")
    typer.echo("\n\n".join(textwrap.fill(text, _WIDTH, break_on_hyphens=False) for text in paragraphs))
