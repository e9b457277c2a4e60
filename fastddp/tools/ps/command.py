"""``fastddp ps``."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

_Pids = Annotated[
    list[int] | None,
    typer.Argument(min=1, metavar="[PID]...", help="Ranks' own processes; all of this user's where there is none."),
]
_Every = Annotated[float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="How often the table is renewed.")]
_Watch = Annotated[bool, typer.Option("--watch", "-w", help="Renew the table until Ctrl-C, on a terminal.")]
_All = Annotated[bool, typer.Option("--all", help="Show jobs that are gone, too.")]
_Json = Annotated[bool, typer.Option("--json", help="Print once, as one JSON document.")]
_RemoveGone = Annotated[
    bool, typer.Option("--remove-gone", help="Print once, then remove the status files of those that are gone.")
]


def ps(
    pids: _Pids = None,
    watch: _Watch = False,
    every: _Every = 1.0,
    show_all: _All = False,
    json: _Json = False,
    remove_gone: _RemoveGone = False,
) -> None:
    """What this node's ranks are doing or wait for, job by job.

    Red: stopped or gone. Yellow: in the same thing for more than 10 s, and 5 times as long as its longest recent step.

    Exit status: 0; 1 if a PID has no status file, or if fastddp's extension cannot be imported; 2 for wrong usage.
    """
    try:
        from fastddp.tools.ps import live
    except ImportError as error:
        raise _refuse(
            f"what ranks say is read by fastddp's extension, which cannot be imported. {error}. "
            "Run: python -m fastddp build"
        ) from None
    from rich.console import Console

    from fastddp.tools.ps import printing

    chosen = pids or []
    node = live.look(chosen)
    found = {of.pid for of in node.ranks} | {of.pid for of in node.unreadable}
    if strangers := [pid for pid in dict.fromkeys(chosen) if pid not in found]:
        remedy = "Name ranks' own processes, not torchrun's, or none: then all are shown."
        raise _refuse(" ".join([*map(_why_no_page, strangers), remedy]))
    if json:
        typer.echo(printing.as_json(node))
    else:
        # Not rich's own guess: environment variables change it, and in a log it would print for ever.
        is_terminal = sys.stdout.isatty()
        console = Console() if is_terminal else Console(width=150)
        with_gone = show_all or remove_gone or bool(chosen)
        if watch and is_terminal and not console.is_dumb_terminal:
            _renew(console, chosen, every, with_gone)
            return
        console.print(printing.page(node, with_gone), soft_wrap=not node.ranks)
    if remove_gone:
        removed = live.remove_gone(node)
        typer.echo(f"Removed: {', '.join(removed) or 'nothing'}", err=json)


def _renew(console: Console, pids: Sequence[int], every: float, with_gone: bool) -> None:
    """Until Ctrl-C."""
    from rich.live import Live

    from fastddp.tools.ps import live
    from fastddp.tools.ps.printing import page

    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as screen:
        while True:
            screen.update(page(live.look(pids), with_gone), refresh=True)
            time.sleep(every)


def _why_no_page(pid: int) -> str:
    if not Path(f"/proc/{pid}").exists():
        return f"There is no process {pid}, and none of that number has left a status file."
    return (
        f"Process {pid} has no status file: it has no DistributedDataParallel of fastddp yet, or it is another user's, "
        "or in another container."
    )


def _refuse(message: str) -> typer.Exit:
    typer.echo(f"fastddp ps: {message}", err=True)
    return typer.Exit(1)
