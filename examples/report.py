"""The results of a run: medians, ratios, the table on the screen and the JSON beside the picture."""

import json
import os
import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from timeline import Timeline, overlap

FEWEST_ROUNDS = 5  # with fewer, an interval would say nothing


@dataclass
class Record:
    """What one DDP did, block after block."""

    name: str
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    blocks_ms: list[list[float]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def counted_blocks(self) -> list[list[float]]:
        """The times that count. The first block warms up: DDP orders its buckets anew after the first step."""
        return self.blocks_ms[1:] or self.blocks_ms

    @property
    def step_ms(self) -> list[float]:
        """The times that count, step by step."""
        return [time for block in self.counted_blocks for time in block]

    @property
    def median_ms(self) -> float:
        """Half of the steps took longer."""
        return median_of(self.counted_blocks)

    def halves_ratio(self) -> float | None:
        """Every second block's median over the others': the ratio if nothing differs but the moment."""
        odd, even = self.counted_blocks[::2], self.counted_blocks[1::2]
        return median_of(odd) / median_of(even) if even else None


@dataclass(frozen=True)
class Equality:
    """How the parameters of both models compare after the same steps.

    With two ranks they must be equal bit by bit. With more, the order in which a collective adds up may depend on where
    in a bucket a gradient lies, and both DDPs need not form the same buckets.
    """

    bitwise: bool
    required: bool
    largest_difference: float
    parameters: int

    @property
    def holds(self) -> bool:
        """Whether the models compare as they must."""
        return self.bitwise or not self.required


@dataclass(frozen=True)
class Run:
    """What was run, and its results; ``records`` holds fastddp and then torch's DDP."""

    setting: dict[str, Any]
    tokens_a_step: int
    records: Sequence[Record]
    equality: Equality
    load_before: float  # how many other processes wanted a core in the minute before the run

    @property
    def ratio(self) -> float:
        """Time of a step under fastddp, relative to torch's DDP."""
        ours, theirs = self.records
        return ours.median_ms / theirs.median_ms

    def ratio_interval(self, samples: int = 400) -> tuple[float, float]:
        """The 95 % confidence interval of the ratio, from rounds that are drawn at random.

        A round is a block of steps under each DDP. The machine's moods last longer than a step, so we draw rounds, not
        steps (a block bootstrap).
        """
        ours, theirs = (record.counted_blocks for record in self.records)
        chance = random.Random(0)
        ratios = []
        for _ in range(samples):
            rounds = chance.choices(range(len(ours)), k=len(ours))
            ratios.append(median_of([ours[i] for i in rounds]) / median_of([theirs[i] for i in rounds]))
        return quantile(ratios, 0.025), quantile(ratios, 0.975)

    def tokens_a_second(self, record: Record) -> float:
        """All ranks together."""
        return self.tokens_a_step / record.median_ms * 1e3


def median_of(blocks: Sequence[Sequence[float]]) -> float:
    """The median of all steps of some blocks."""
    return statistics.median(time for block in blocks for time in block)


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which a part, 0 to 1, of all values lies."""
    return sorted(values)[round(part * (len(values) - 1))]


def print_report(console: Console, run: Run) -> None:
    """Print the table, and below it the verdict in words."""
    ours, theirs = run.records
    table = Table(box=box.SIMPLE_HEAVY, title="The same training, twice", title_style="bold")
    table.add_column("")
    table.add_column(ours.name, justify="right", style="bold")
    table.add_column(theirs.name, justify="right")

    def row(label: str, *cells: str) -> None:
        table.add_row(label, *cells)

    row("step, median", *(f"{r.median_ms:.1f} ms" for r in run.records))
    spans = ((quantile(r.step_ms, 0.1), quantile(r.step_ms, 0.9)) for r in run.records)
    row("step, 10 % to 90 %", *(f"{low:.1f} to {high:.1f} ms" for low, high in spans))
    row("tokens a second", *(f"{run.tokens_a_second(r):,.0f}" for r in run.records))
    row("training loss, last 20 steps", *(f"{statistics.fmean(r.losses[-20:]):.4f}" for r in run.records))
    row("validation loss", *(f"{r.validation[0][1]:.4f} → {r.validation[-1][1]:.4f}" for r in run.records))
    row("collectives hidden behind backward", *(f"{overlap(r.timelines):.0%}" for r in run.records))
    console.print()
    console.print(table)
    console.print(verdict(run))


def verdict(run: Run) -> Panel:
    """How fast, how sure, and whether equal."""
    text = Text(f"A step under fastddp takes {run.ratio:.2f} of the time of torch's DDP")
    noise = run.records[1].halves_ratio()
    if noise is not None and len(run.records[0].counted_blocks) >= FEWEST_ROUNDS:
        low, high = run.ratio_interval()
        text.append(f" (95 %: {low:.2f} to {high:.2f}; torch's DDP against itself: {noise:.2f})")
    text.append(".\n")
    cores = len(os.sched_getaffinity(0))
    if run.load_before > cores / 2:
        text.append(f"Other work on this machine (load {run.load_before:.1f} on {cores} cores) blurs that.\n", "yellow")
    count = f"{run.equality.parameters:,} parameters"
    if run.equality.bitwise:
        text.append(f"All {count} are bitwise equal, on all ranks.", style="green")
    else:
        text.append(f"The {count} differ by up to {run.equality.largest_difference:.2e}. ", style="bold")
        text.append(
            "They must be bitwise equal."
            if run.equality.required
            else "With more than two ranks the order of additions depends on where in a bucket a gradient lies."
        )
    return Panel.fit(text, border_style="green" if run.equality.holds else "red")


def write_json(path: Path, run: Run) -> None:
    """Write all figures of the run, with their machine."""
    ours, theirs = run.records
    figures = {
        "machine": {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__},
        "setting": run.setting,
        "load_before": run.load_before,
        "ratio": run.ratio,
        "ratio_95_percent": run.ratio_interval(),
        "torch_against_itself": theirs.halves_ratio(),
        "bitwise_equal": run.equality.bitwise,
        "largest_difference": run.equality.largest_difference,
        "parameters": run.equality.parameters,
        **{key: record_figures(run, record) for key, record in (("fastddp", ours), ("torch", theirs))},
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


def record_figures(run: Run, record: Record) -> dict[str, Any]:
    """The figures of one DDP."""
    return {
        "median_step_ms": record.median_ms,
        "p10_step_ms": quantile(record.step_ms, 0.1),
        "p90_step_ms": quantile(record.step_ms, 0.9),
        "tokens_a_second": run.tokens_a_second(record),
        "losses": record.losses,
        "validation_losses": record.validation,
        "blocks_ms": record.blocks_ms,
        "collectives_hidden": overlap(record.timelines),
        "timelines": [asdict(timeline) for timeline in record.timelines],
    }
