"""The table of docs/faults.md, of rows that are kept: `python -m bench.faults --table FILE`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from bench.faults.entries import FAULTS, Fault
from bench.harness import Row

HEAD = (
    "| what one rank does | runs of which fastddp names rank, cause and parameter | as | after s, median and most "
    "| torch's DDP, within 20 s |\n|---|---|---|---|---|"
)


def lines(rows: Sequence[Row]) -> list[str]:
    """A line a fault, and the head."""
    return [HEAD] + [_line(fault, [row for row in rows if row.get("fault") == fault.name]) for fault in FAULTS]


def _line(fault: Fault, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row["implementation"] == "fastddp"]
    torchs = [row for row in rows if row["implementation"] == "torch"]
    right = f"{sum(row['right'] for row in own)} of {len(own)}"
    cells = [fault.about, right, _kinds(own), _seconds(own), _of_torch(fault, torchs)]
    return f"| {' | '.join(cells)} |"


def _kinds(rows: Iterable[Row]) -> str:
    """What it was called, the most frequent first; without a report, that there was an error."""
    called = [row["findings"][0][0] if row["findings"] else row["by"] for row in rows]
    names = sorted(set(called), key=lambda name: (-called.count(name), name))
    return ", ".join("no word" if name == "nothing" else f"`{name}`" if "error" not in name else name for name in names)


def _seconds(rows: Iterable[Row]) -> str:
    taken = [row["seconds"] for row in rows if row["seconds"] is not None and row["by"] != "soft report"]
    return f"{statistics.median(taken):.1f}, {max(taken):.1f}" if taken else ""


def _of_torch(fault: Fault, rows: Sequence[Row]) -> str:
    if not rows:
        return "not run"
    if fault.is_harmless:
        return "no word" if all(row["right"] for row in rows) else "an error"
    said = ["names it" if row["right"] else "an error" if row["by"] == "error" else "nothing" for row in rows]
    return ", ".join(dict.fromkeys(said))
