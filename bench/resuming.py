"""Long benches, a cell at a time: rows are written after each, and what is there already need not be measured again.

    add_options(parser, "wire")
    check(options, parser)
    results = opened(options)
    results.measure_if_missing(cell, measure, "resnet50", 2)

A cell is a string that says all that was chosen for it; each row has it in its column `cell`. What counts as there are
cells of the commit that is checked out, if nothing in the working tree differs from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness


class Results:
    """The rows of one file, or of none.

    Raises ValueError where `path` is to be resumed and holds something else than rows.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.rows: list[harness.Row] = []
        self._path = path
        if path is not None and resume and path.exists():
            self.rows = still_valid(_load(path), harness.environment("", torch.device("cpu"), 1))

    def __contains__(self, cell: str) -> bool:
        return any(row["cell"] == cell for row in self.rows)

    def measure_if_missing(self, cell: str, measure: Callable[..., Sequence[harness.Row]], *arguments: Any) -> None:
        """Adds what `measure` returns for these arguments, and writes the file; nothing where the cell is there."""
        if cell in self:
            return
        self.rows += [{"cell": cell} | row for row in measure(*arguments)]
        if self._path is not None:
            harness.write_json(self._path, self.rows)


def add_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Where rows go, one for each cell and `what`, and whether those that are there stay."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write a row for each cell and {what}")
    parser.add_argument(
        "--resume", action="store_true", help="leave out cells that are in --json already, of the same commit"
    )


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program where there is nothing to resume."""
    if options.resume and options.json is None:
        parser.error("--resume takes --json, which says what is there")


def opened(options: argparse.Namespace) -> Results:
    """What those options name; ends the program where the file holds something else."""
    try:
        return Results(options.json, options.resume)
    except ValueError as error:
        sys.exit(f"--json: {error}")


def still_valid(rows: Sequence[harness.Row], now: harness.Row) -> list[harness.Row]:
    """Those that would come out again: of `now`'s commit, without changes to it then and now.

    >>> rows = [{"commit": "a", "dirty": False}, {"commit": "a", "dirty": True}, {"commit": "b", "dirty": False}]
    >>> still_valid(rows, {"commit": "a", "dirty": False})
    [{'commit': 'a', 'dirty': False}]
    >>> still_valid(rows, {"commit": "a", "dirty": True})
    []
    """
    return [row for row in rows if row["commit"] == now["commit"] and row["dirty"] is now["dirty"] is False]


def _load(path: Path) -> list[harness.Row]:
    try:
        rows = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): move it away, or leave out --resume") from None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"cell", "commit", "dirty"} <= row.keys() for row in rows
    ):
        raise ValueError(f"{path} does not hold rows of cells: move it away, or leave out --resume")
    return rows
