"""What the times of `bench.pays` say: verdicts against bf16, the tables and the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bench import harness

Verdict = Literal["faster", "slower", "same", "never"]

BASELINE = "bf16"
AGAIN = f"{BASELINE}-again"
IN_TWO_LEVELS = "-nodes"  # at the end of what is exchanged in two levels

_RED = "[bold red]{}[/]"
_STYLES = {"faster": "[green]{}[/]", "slower": _RED, "never": _RED, "same": "{}"}
_COLOURS = {"faster": "#b7e1b5", "slower": "#f28e82", "never": "#f28e82", "same": "#eeeeee", "baseline": "#bcd4ec"}


# ------------------------------------------------------------------------------------------------------------ verdicts


def noise_floor(again: Sequence[float], baseline: Sequence[float]) -> float:
    """By how much a ratio of medians may be off: what the baseline, measured against itself, says round by round.

    The larger of two: how far the median of its ratios is from 1, and what a median of so many ratios that scatter like
    these is off itself, which is 1.253 standard errors, twice; their deviation is taken from the middle half of them.

    >>> round(noise_floor([10.2, 10.2, 10.2, 10.2], [10.0, 10.0, 10.0, 10.0]), 3)
    0.02
    >>> round(noise_floor([9.0, 11.0, 9.0, 11.0], [10.0, 10.0, 10.0, 10.0]), 3)
    0.186
    """
    ratios = [one / other for one, other in zip(again, baseline, strict=True)]
    off = abs(statistics.median(ratios) - 1)
    if len(ratios) < 2:
        return off
    quarters = statistics.quantiles(ratios, n=4, method="inclusive")
    deviation = (quarters[2] - quarters[0]) / 1.349
    return max(off, 2 * 1.253 * deviation / math.sqrt(len(ratios)))


def verdict(ratio: float | None, floor: float) -> Verdict:
    """Of a time, as its ratio to the baseline's; None: it never came.

    >>> verdict(0.9, 0.02), verdict(1.015, 0.02), verdict(1.03, 0.02), verdict(None, 0.02)
    ('faster', 'same', 'slower', 'never')
    """
    if ratio is None:
        return "never"
    if abs(ratio - 1) <= floor:
        return "same"
    return "faster" if ratio < 1 else "slower"


def judged_steps(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """The rows of one cell with how each contestant fares against bf16: `ratio_to_bf16`, `noise_floor`, `verdict`.

    >>> rows = [{"wire": "bf16", "samples_ms": [10.0, 10.2]}, {"wire": "bf16-again", "samples_ms": [10.0, 10.2]},
    ...         {"wire": "int8", "samples_ms": [12.0, 12.2]}]
    >>> [(row["wire"], row["ratio_to_bf16"], row["verdict"]) for row in judged_steps(rows)]
    [('bf16', 1.0, 'same'), ('bf16-again', 1.0, 'same'), ('int8', 1.198039, 'slower')]
    """
    samples = {row["wire"]: row["samples_ms"] for row in rows}
    floor = noise_floor(samples[AGAIN], samples[BASELINE])
    ratios = {wire: harness.paired_ratio(times, samples[BASELINE]) for wire, times in samples.items()}
    return [
        row
        | {
            "ratio_to_bf16": round(ratios[row["wire"]], 6),
            "noise_floor": round(floor, 6),
            "verdict": verdict(ratios[row["wire"]], floor),
        }
        for row in rows
    ]


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Of each step, the mean of the last `window` losses, or of those that there are.

    >>> smoothed([4.0, 2.0, 3.0], 2)
    [4.0, 3.0, 2.5]
    """
    return [statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]


def first_step_at(losses: Sequence[float], target: float) -> int | None:
    """From 0, the first whose loss is at most the target; None: there is none.

    >>> first_step_at([4.0, 3.0, 2.5, 2.6], 2.5), first_step_at([4.0, 3.0], 2.5)
    (2, None)
    """
    return next((step for step, loss in enumerate(losses) if loss <= target), None)


def judged_trainings(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """The rows of one cell with how each setting fares against bf16, by `seconds_to_loss`; null: it never got there.

    The noise floor is that of one pair of runs: how far the second one of bf16 is off.

    >>> times = {"bf16": 10.0, "bf16-again": 10.1, "int8": 8.0, "powersgd1": None}
    >>> rows = judged_trainings([{"wire": wire, "seconds_to_loss": time} for wire, time in times.items()])
    >>> [row["verdict"] for row in rows], rows[2]["ratio_to_bf16"], rows[0]["noise_floor"]
    (['same', 'same', 'faster', 'never'], 0.8, 0.01)
    """
    times = {row["wire"]: row["seconds_to_loss"] for row in rows}
    floor = abs(times[AGAIN] / times[BASELINE] - 1)
    result = []
    for row in rows:
        seconds = row["seconds_to_loss"]
        ratio = None if seconds is None else seconds / times[BASELINE]
        columns = {"noise_floor": round(floor, 6), "verdict": verdict(ratio, floor)}
        result.append(row | {"ratio_to_bf16": None if ratio is None else round(ratio, 6)} | columns)
    return result


# -------------------------------------------------------------------------------------------------- tables and picture


Line = tuple[list[str], dict[str, harness.Row]]  # a heading in two parts, and the rows by column


def _lines(rows: Sequence[harness.Row]) -> list[Line]:
    """Of a table: a cell each, and its rows in two levels in a line of their own below."""
    result: dict[tuple[str, bool], Line] = {}
    for row in rows:
        nodes = row["wire"].endswith(IN_TWO_LEVELS)
        what = row["task"] if row["kind"] == "training" else f"{row['model']} x{row['batch']}"
        where = "in two levels" if nodes else f"{row['world_size']} ranks, {row['rate']}"
        line = result.setdefault((row["cell"], nodes), ([what, where], {}))
        line[1][row["wire"].removesuffix(IN_TWO_LEVELS)] = row
    return list(result.values())


def _columns(lines: Sequence[Line]) -> list[str]:
    """All there are; what is no wire of its own comes last."""
    found = dict.fromkeys(wire for _, by_column in lines for wire in by_column)
    last = [wire for wire in (AGAIN, "torch", "alone") if wire in found]
    return [wire for wire in found if wire not in last] + last


def _number(row: harness.Row) -> str:
    if row["kind"] == "training":
        return "never" if row["seconds_to_loss"] is None else f"{row['seconds_to_loss']:.4g}"
    return f"{row['median_ms']:.4g}"


def _cells(rows: Sequence[harness.Row], kind: str, marks: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line a cell; each number as the mark of its verdict has it."""
    lines = _lines([row for row in rows if row["kind"] == kind])
    wires = _columns(lines)
    cells = []
    for heading, found in lines:
        numbers = [marks[found[w]["verdict"]].format(_number(found[w])) if w in found else "-" for w in wires]
        cells.append([*heading, *numbers, f"{next(iter(found.values()))['noise_floor']:.1%}"])
    return ["model x batch", "network", *wires, "noise"], cells


_TITLES = {
    "step": "median ms of a step (forward and backward); red: slower than bf16 by more than the noise; green: faster",
    "training": "seconds to the loss at which bf16 ends, plus 2 %; red: later than with bf16, or never; green: earlier",
}


def tables(rows: Sequence[harness.Row]) -> list[Any]:
    """One for each kind of rows: a line a cell, a column a wire. Red: slower than bf16; green: faster."""
    found = {kind: _cells(rows, kind, _STYLES) for kind in _TITLES}
    return [harness.table(_TITLES[kind], *table, left=2) for kind, table in found.items() if table[1]]


def markdown(rows: Sequence[harness.Row], kind: str) -> str:
    """The table of one kind for a page: what loses in bold, with ▲; what wins with ▼.

    >>> row = {"kind": "step", "cell": "c", "model": "m", "batch": 1, "world_size": 2, "rate": "1gbit"}
    >>> row |= {"noise_floor": 0.01}
    >>> rows = [row | {"wire": "bf16", "median_ms": 2.0, "verdict": "same"},
    ...         row | {"wire": "int8", "median_ms": 3.0, "verdict": "slower"}]
    >>> print(markdown(rows, "step"))
    | model x batch | network | bf16 | int8 | noise |
    |---|---|---|---|---|
    | m x1 | 2 ranks, 1gbit | 2 | **3** ▲ | 1.0% |
    """
    headings, cells = _cells(rows, kind, {"faster": "{} ▼", "slower": "**{}** ▲", "never": "**{}** ▲", "same": "{}"})
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, *cells]).replace(
        "\n", "\n" + "|---" * len(headings) + "|\n", 1
    )


def draw(path: Path, rows: Sequence[harness.Row]) -> None:
    """A map for each kind of rows: a line a cell, a column a wire; red loses to bf16, green wins."""
    kinds = [kind for kind in ("step", "training") if any(row["kind"] == kind for row in rows)]
    counts = [len(_lines([row for row in rows if row["kind"] == kind])) for kind in kinds]
    size = (12.5, 0.42 * sum(counts) + 1.5 * len(kinds))
    with harness.picture(path, len(kinds), 1, size, height_ratios=[count + 2 for count in counts]) as axes:
        for place, kind in zip(axes[:, 0], kinds, strict=True):
            _draw_map(place, [row for row in rows if row["kind"] == kind])


def _draw_map(axes: Any, rows: Sequence[harness.Row]) -> None:
    from matplotlib.patches import Rectangle

    lines = _lines(rows)
    wires = _columns(lines)
    for height, (_, found) in enumerate(lines):
        for column, row in ((column, found[wire]) for column, wire in enumerate(wires) if wire in found):
            is_baseline = row["wire"] == BASELINE
            colour = _COLOURS["baseline" if is_baseline else row["verdict"]]
            axes.add_patch(Rectangle((column, height), 1, 1, facecolor=colour, edgecolor="white"))
            ratio = "" if is_baseline or row["ratio_to_bf16"] is None else f"\n{row['ratio_to_bf16']:.2f}"
            axes.text(column + 0.5, height + 0.5, _number(row) + ratio, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, len(wires)), ylim=(len(lines), 0))
    axes.set_xticks([place + 0.5 for place in range(len(wires))], wires, rotation=20, ha="left", fontsize=8)
    axes.set_yticks(
        [place + 0.5 for place in range(len(lines))], [", ".join(heading) for heading, _ in lines], fontsize=8
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    what = "ms of a step" if rows[0]["kind"] == "step" else "seconds to bf16's last loss plus 2 %"
    axes.set_title(
        f"{what}, and below it the ratio to bf16; red: slower than bf16, green: faster", loc="left", fontsize=9
    )
