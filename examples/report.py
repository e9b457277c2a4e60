"""The results of a run: medians, ratios, what the screen shows and the JSON beside the picture."""

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

STOPPED_RANK = 1
PATIENCE = 2.0  # seconds without progress before fastddp reports; ten by default
FEWEST_ROUNDS = 5  # with fewer, an interval would say nothing


@dataclass
class Record:
    """What one DDP did, block after block."""

    name: str
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    blocks_ms: list[list[float]] = field(default_factory=list)
    bytes_arrived: int = 0  # at this rank, in all steps

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

    def tokens_a_second(self, tokens_a_step: int) -> float:
        """In the median step."""
        return tokens_a_step / self.median_ms * 1e3

    @property
    def bytes_a_step(self) -> float:
        """How many arrive at this rank; 0 if they do not come by TCP, as NCCL's between GPUs of a machine."""
        return self.bytes_arrived / len(self.losses)

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
class Span:
    """What a rank did for a while, in seconds of the machine's clock."""

    kind: str  # "step", "waits": a step in which it waits for the stopped rank, or "stopped"
    begin: float
    end: float


@dataclass(frozen=True)
class Stall:
    """What happened under one DDP while another process stopped a rank."""

    name: str
    spans: list[list[Span]]  # of each rank
    said: str  # to stderr, by all ranks
    report: dict[str, Any] | None  # a fastddp.StallReport
    reported_at: float | None

    @property
    def stop(self) -> Span:
        """When the rank was stopped."""
        return next(span for spans in self.spans for span in spans if span.kind == "stopped")

    @property
    def seconds(self) -> float:
        """For how long the rank was stopped."""
        return self.stop.end - self.stop.begin

    @property
    def seconds_to_report(self) -> float | None:
        """From the stop."""
        return None if self.reported_at is None else self.reported_at - self.stop.begin

    @property
    def named(self) -> list[int]:
        """The ranks that the report names as the first cause."""
        return self.report["causes"][0]["ranks"] if self.report else []


@dataclass(frozen=True)
class Run:
    """Training under both DDPs; ``records`` holds fastddp and then torch's DDP."""

    setting: dict[str, Any]
    tokens_a_step: int  # of all ranks together
    records: Sequence[Record]
    equality: Equality
    load_before: float  # how many other processes wanted a core in the minute before the run

    @property
    def other_work(self) -> str:
        """The load of the machine if it blurs times; else empty."""
        cores = len(os.sched_getaffinity(0))
        return f"load {self.load_before:.1f} on {cores} cores" if self.load_before > cores / 2 else ""

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


def median_of(blocks: Sequence[Sequence[float]]) -> float:
    """The median of all steps of some blocks."""
    return statistics.median(time for block in blocks for time in block)


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which a part, 0 to 1, of all values lies."""
    return sorted(values)[round(part * (len(values) - 1))]


def print_report(console: Console, run: Run) -> None:
    """Print the table, and below it the verdict in words."""
    ours, theirs = run.records
    table = table_of(ours, theirs)
    row = table.add_row
    row("step, median", *(f"{r.median_ms:.1f} ms" for r in run.records))
    spans = ((quantile(r.step_ms, 0.1), quantile(r.step_ms, 0.9)) for r in run.records)
    row("step, 10 % to 90 %", *(f"{low:.1f} to {high:.1f} ms" for low, high in spans))
    row("tokens a second", *(f"{r.tokens_a_second(run.tokens_a_step):,.0f}" for r in run.records))
    add_losses(table, ours, theirs)
    console.print(table)
    console.print(verdict(run))


def table_of(first: Record, second: Record) -> Table:
    """An empty table with a column for each."""
    table = Table(box=box.SIMPLE_HEAVY)
    table.add_column("")
    table.add_column(first.name, justify="right", style="bold")
    table.add_column(second.name, justify="right")
    return table


def add_losses(table: Table, *records: Record) -> None:
    """Two rows."""
    table.add_row("training loss, last 20 steps", *(f"{statistics.fmean(r.losses[-20:]):.4f}" for r in records))
    table.add_row("validation loss", *(f"{r.validation[0][1]:.4f} → {r.validation[-1][1]:.4f}" for r in records))


def verdict(run: Run) -> Panel:
    """How fast, how sure, and whether equal."""
    text = Text(f"A step under fastddp takes {run.ratio:.2f} of the time of torch's DDP")
    noise = run.records[1].halves_ratio()
    if noise is not None and len(run.records[0].counted_blocks) >= FEWEST_ROUNDS:
        low, high = run.ratio_interval()
        text.append(f" (95 %: {low:.2f} to {high:.2f}; torch's DDP against itself: {noise:.2f})")
    text.append(".\n")
    if run.other_work:
        text.append(f"Other work on this machine ({run.other_work}) blurs that.\n", "yellow")
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


def print_stalls(console: Console, ours: Stall, theirs: Stall) -> None:
    """Print what was said under each DDP."""
    for stall in (ours, theirs):
        title = f"stderr under [bold]{stall.name}[/], rank {STOPPED_RANK} stopped for {stall.seconds:.1f} s"
        text = Text(stall.said.strip()) if stall.said.strip() else Text("(nothing)", style="dim")
        console.print(Panel(text, title=title, title_align="left"))
    if ours.seconds_to_report is not None:
        named = ", ".join(map(str, ours.named)) or "none"
        console.print(
            f"fastddp named rank {named} {ours.seconds_to_report:.1f} s after the stop (Watch(patience={PATIENCE:g})). "
            f"torch's DDP {'wrote what is above' if theirs.said.strip() else 'said nothing'} in {theirs.seconds:.1f} s."
        )
    else:
        console.print(f"fastddp made no report within {ours.seconds:.1f} s.", style="red")


def print_eight_bits(console: Console, eight: Record, plain: Record) -> None:
    """Print what arrived and what was learnt, with 8 bits and without."""
    table = table_of(eight, plain)
    if eight.bytes_arrived:
        table.add_row("bytes that arrive at a rank, a step", *(f"{r.bytes_a_step:,.0f}" for r in (eight, plain)))
    add_losses(table, eight, plain)
    console.print(table)
    console.print("Rounding parts the two losses a little: upwards with one --seed, downwards with another.")
    if eight.bytes_arrived:
        part = eight.bytes_a_step / plain.bytes_a_step
        console.print(f"With 8 bits {part:.2f} of the bytes travel, by the kernel's count of what came by TCP.")


def write_json(path: Path, run: Run, stalls: Sequence[Stall], eight: Record | None) -> None:
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
        "fastddp": record_figures(run, ours),
        "torch": record_figures(run, theirs),
        "stalls": [{**asdict(stall), "seconds": stall.seconds, "named": stall.named} for stall in stalls],
        "eight_bits": eight and record_figures(run, eight),
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


def record_figures(run: Run, record: Record) -> dict[str, Any]:
    """The figures of one DDP."""
    return {
        "median_step_ms": record.median_ms,
        "p10_step_ms": quantile(record.step_ms, 0.1),
        "p90_step_ms": quantile(record.step_ms, 0.9),
        "tokens_a_second": record.tokens_a_second(run.tokens_a_step),
        "bytes_a_step": record.bytes_a_step,
        "losses": record.losses,
        "validation_losses": record.validation,
        "blocks_ms": record.blocks_ms,
    }
