"""What a run comes to: medians, ratios, the table on the screen and the JSON beside the picture."""

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from timeline import Timeline


@dataclass
class Record:
    """What one DDP did, block after block."""

    name: str
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    blocks_ms: list[list[float]] = field(default_factory=list)
    timeline: Timeline | None = None

    @property
    def step_ms(self) -> list[float]:
        """The steps that count. The first block warms up: DDP orders its buckets anew after the first step."""
        return [time for block in self.blocks_ms[1:] or self.blocks_ms for time in block]

    @property
    def median_ms(self) -> float:
        """Half of the steps took longer."""
        return statistics.median(self.step_ms)

    def halves_ratio(self) -> float | None:
        """The odd blocks' median over the even blocks': what a ratio shows where nothing differs but the moment."""
        odd = [time for block in self.blocks_ms[1::2] for time in block]
        even = [time for block in self.blocks_ms[2::2] for time in block]
        return statistics.median(odd) / statistics.median(even) if odd and even else None


@dataclass(frozen=True)
class Equality:
    """How the parameters of both models compare after the same steps."""

    bitwise: bool
    largest_difference: float
    parameters: int


@dataclass(frozen=True)
class Run:
    """What was run, and how it came out; ``records`` holds fastddp and then torch's DDP."""

    setting: dict[str, Any]
    tokens_a_step: int
    records: Sequence[Record]
    equality: Equality

    @property
    def ratio(self) -> float:
        """Time of a step under fastddp, relative to torch's DDP."""
        ours, theirs = self.records
        return ours.median_ms / theirs.median_ms

    def tokens_a_second(self, record: Record) -> float:
        """All ranks together."""
        return self.tokens_a_step / record.median_ms * 1e3


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which a part, 0 to 1, of all values lies."""
    return sorted(values)[round(part * (len(values) - 1))]


def print_report(console: Console, run: Run) -> None:
    """The table, and below it what it says in words."""
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
    row("training loss, last step", *(f"{r.losses[-1]:.4f}" for r in run.records))
    row("validation loss", *(f"{r.validation[0][1]:.4f} → {r.validation[-1][1]:.4f}" for r in run.records))
    row("collectives hidden behind backward", *(f"{r.timeline.overlap:.0%}" for r in run.records if r.timeline))
    console.print()
    console.print(table)
    console.print(verdict(run))


def verdict(run: Run) -> Panel:
    """Two sentences: how fast, and whether equal."""
    text = Text(f"A step under fastddp takes {run.ratio:.2f} of the time of torch's DDP")
    noise = run.records[1].halves_ratio()
    if noise is not None:
        text.append(f" (torch's DDP against itself: {noise:.2f})")
    text.append(".\n")
    count = f"{run.equality.parameters:,} parameters"
    if run.equality.bitwise:
        text.append(f"All {count} are bitwise equal, on all ranks.", style="green")
    else:
        text.append(
            f"The {count} are NOT bitwise equal: they differ by up to {run.equality.largest_difference:.2e}.",
            style="bold red",
        )
    return Panel.fit(text, border_style="green" if run.equality.bitwise else "red")


def write_json(path: Path, run: Run) -> None:
    """All figures of the run, with what they were measured on."""
    ours, theirs = run.records
    figures = {
        "machine": {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__},
        "setting": run.setting,
        "ratio": run.ratio,
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
        "timeline": record.timeline.as_dict() if record.timeline else None,
    }
