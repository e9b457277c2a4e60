"""Where rows go: onto the screen, and into a file that is whole after each one. They survive the end of the run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import harness

# What a row's line shows of it, as far as the row has it: what was measured, and what came out.
_SHOWN = (
    "what made_of case operation number gradient_dtype wire_dtype rank gradient_mib contestant median unit median_us "
    "median_ms added_ms median_backward_us median_from_first_us supports_tensor_alloc used_before_mib "
    "used_after_wrap_mib used_after_step_mib added_us_per_gradient fraction_of_copy launches launches_per_call "
    "connections exposed_ms overlapped_ms peak_mib steady_mib uploads periods result error"
)


class Results:
    """The rows of one section, beside those that a file already has of the others."""

    def __init__(self, path: Path | None, section: str) -> None:
        self.section = section
        self._begin = time.monotonic()
        self.rows: list[harness.Row] = []
        self._path = path
        self._others = [row for row in read(path) if row["section"] != section]

    def add(self, kind: str, **columns: Any) -> harness.Row:
        """Appends a row, prints a line of it, and writes the file anew."""
        row: harness.Row = {"section": self.section, "kind": kind}
        row |= {name: _rounded(value) for name, value in columns.items()}
        self.rows.append(row)
        print(f"{time.monotonic() - self._begin:5.1f} s {line(row)}", flush=True)
        if self._path is not None:
            # In one step: a file that was cut off while being written would lose the rows before, too.
            unfinished = self._path.with_suffix(".unfinished")
            harness.write_json(unfinished, [*self._others, *self.rows])
            unfinished.replace(self._path)
        return row

    def of_kind(self, kind: str) -> list[harness.Row]:
        """This section's rows of one kind, in the order in which they were added."""
        return [row for row in self.rows if row["kind"] == kind]


def line(row: harness.Row) -> str:
    """A row in one line, without what is the same for a whole section."""
    shown = [f"{name}={row[name]}" for name in _SHOWN.split() if row.get(name) is not None]
    return " ".join([f"[{row['section']}] {row['kind']}:", *shown])


def _rounded(value: Any) -> Any:
    """Six digits of a float, which is more than any measurement has; None for what JSON has no number for."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def read(path: Path | None) -> list[harness.Row]:
    """The rows of a file; none where there is no file."""
    if path is None or not path.exists():
        return []
    rows: list[harness.Row] = json.loads(path.read_text())
    return rows


def wrong(rows: list[harness.Row]) -> list[harness.Row]:
    """The rows in which something was computed wrong."""
    return [row for row in rows if row.get("result") == "WRONG"]


@dataclass
class Run:
    """What every section is given."""

    device: torch.device
    results: Results
    quick: bool
    deadline: float
    out: Console = field(default_factory=harness.console)

    def out_of_time(self) -> bool:
        """Whether what has not begun should be left out."""
        return time.monotonic() > self.deadline

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """What is done within this context takes no time from what is measured."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.deadline += time.monotonic() - begin

    def skip(self, what: str) -> None:
        """Records that there was no time for something."""
        self.results.add("skipped", what=what)
        self.out.print(f"out of time: {what} not measured", highlight=False)
