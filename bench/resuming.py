"""Long benches, a cell at a time: rows are written after each, and what is there already need not be measured again.

A cell is a string that says all that was chosen for it; each row has it in its column `cell`. What counts as there are
cells of the commit that is checked out, if nothing in the working tree differs from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness


class Results:
    """The rows of one file, or of none."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.rows: list[harness.Row] = []
        self._path = path
        if path is not None and resume and path.exists():
            now = harness.environment("", torch.device("cpu"), 1)
            self.rows = still_valid(json.loads(path.read_text()), now)

    def measure_if_missing(self, cell: str, measure: Callable[..., Sequence[harness.Row]], *arguments: Any) -> None:
        """Adds what `measure` returns for these arguments, and writes the file; nothing where the cell is there."""
        if any(row["cell"] == cell for row in self.rows):
            return
        self.rows += [{"cell": cell} | row for row in measure(*arguments)]
        if self._path is not None:
            harness.write_json(self._path, self.rows)


def still_valid(rows: Sequence[harness.Row], now: harness.Row) -> list[harness.Row]:
    """Those that would come out again: of `now`'s commit, without changes to it then and now.

    >>> rows = [{"commit": "a", "dirty": False}, {"commit": "a", "dirty": True}, {"commit": "b", "dirty": False}]
    >>> still_valid(rows, {"commit": "a", "dirty": False})
    [{'commit': 'a', 'dirty': False}]
    >>> still_valid(rows, {"commit": "a", "dirty": True})
    []
    """
    return [row for row in rows if row["commit"] == now["commit"] and row["dirty"] is now["dirty"] is False]
