"""What the final losses of `bench.training` say: verdicts, the table and the picture."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import harness

UNCOMPRESSED = "uncompressed"  # what all others are compared with
NUDGED = "nudged"  # likewise, with each first parameter moved by one rounding: what any change does in the end
# With a sharded optimizer, with the hook that is named; rounded: parameters travel in bf16.
SHARDED = ("sharded", "sharded-int8", "sharded-rounded", "sharded-int8-rounded")
UNNOTICED = ("bf16", "fp16", "int8", "fp8", *SHARDED)  # what nobody should notice
LOSSES = ("training_loss", "evaluation_loss")
CLOSE = 0.02  # what a loss may be above that without compression to be called close


# ------------------------------------------------------------------------------------------------------------ verdicts


@dataclass(frozen=True)
class Verdict:
    """A setting's final losses against those without compression, seed by seed."""

    mean: float
    deviation: float  # of the seeds; 0 of a single one
    uncompressed: float  # the mean without compression
    largest_difference: float  # of a seed, from the same seed without compression
    spread: float  # the largest loss without compression less the smallest
    finite: bool

    @classmethod
    def of(cls, losses: Sequence[float], uncompressed: Sequence[float]) -> Verdict:
        """Of the same seeds in the same order."""
        mean, finite = statistics.fmean(losses), all(map(math.isfinite, losses))
        deviation = 0.0 if len(losses) == 1 else statistics.stdev(losses) if finite else math.nan
        return cls(
            mean,
            deviation,
            statistics.fmean(uncompressed),
            max(abs(loss - other) for loss, other in zip(losses, uncompressed, strict=True)),
            max(uncompressed) - min(uncompressed),
            finite,
        )

    @property
    def ratio(self) -> float:
        """Of the means."""
        return self.mean / self.uncompressed

    @property
    def in_spread(self) -> bool:
        """Whether compression changed the mean by no more than the seeds differ anyway."""
        return self.finite and abs(self.mean - self.uncompressed) <= self.spread

    @property
    def close(self) -> bool:
        """Whether the mean is lower than without compression, or at most 2 % higher."""
        return self.finite and self.ratio <= 1 + CLOSE


def by_setting(rows: Sequence[harness.Row]) -> dict[str, list[harness.Row]]:
    """One task's rows, in the order of their seeds."""
    groups = harness.grouped(rows, "setting")
    return {setting: sorted(runs, key=lambda row: row["seed"]) for (setting,), runs in groups.items()}


def verdicts(rows: Sequence[harness.Row], loss: str) -> dict[str, Verdict]:
    """One task's settings, by one of the two losses."""
    losses = {setting: [row[loss] for row in runs] for setting, runs in by_setting(rows).items()}
    return {setting: Verdict.of(values, losses[UNCOMPRESSED]) for setting, values in losses.items()}


def failures(rows: Sequence[harness.Row]) -> list[str]:
    """What must not be, in words."""
    result = []
    for (task,), mine in harness.grouped(rows, "task").items():
        settings = by_setting(mine)
        for setting, runs in settings.items():
            if not all(row["ranks_agree"] for row in runs):
                result.append(f"{setting} on {task}: ranks end with different parameters")
            if not all(math.isfinite(row[loss]) for row in runs for loss in LOSSES):
                result.append(f"{setting} on {task}: a loss is not a number")
        digests = {name: [row["parameters_digest"] for row in runs] for name, runs in settings.items()}
        if mine[0]["world_size"] <= 2 and digests.get("torch", digests[UNCOMPRESSED]) != digests[UNCOMPRESSED]:
            result.append(f"{UNCOMPRESSED} on {task}: not bitwise what torch's DDP trains")
        if len(settings[UNCOMPRESSED]) > 1:  # a single seed has no spread
            for loss in LOSSES:
                for setting, verdict in verdicts(mine, loss).items():
                    if setting in UNNOTICED and not verdict.in_spread:
                        result.append(f"{setting} on {task}: the {loss.replace('_', ' ')} is not in the spread")
    return result


def exit_if_wrong(rows: Sequence[harness.Row]) -> None:
    """Ends the program with 1, and says why, if something is as it must not be."""
    wrong = failures(rows)
    if wrong:
        sys.exit("\n".join(wrong))


# -------------------------------------------------------------------------------------------------- table and picture


def task_table(rows: Sequence[harness.Row]) -> Any:
    """One task: mean and standard deviation over the seeds, and both verdicts."""
    first, settings = rows[0], by_setting(rows)
    seeds = len(settings[UNCOMPRESSED])
    starts = {row["powersgd_start"] for row in rows} - {None}
    title = (
        f"{first['task']}: {first['task_about']}. {first['world_size']} ranks, {first['steps']} steps, {seeds} seeds; "
        f"training loss of the last {first['final_window']} steps"
        + "".join(f"; PowerSGD from step {start} on" for start in sorted(starts))
    )
    columns = ["setting"]
    for loss in LOSSES:
        columns += [f"{loss.split('_')[0]} loss", "ratio", "Δ seed", "in spread", f"≤ +{CLOSE:.0%}"]
    judged = [verdicts(rows, loss) for loss in LOSSES]
    cells = []
    for setting, runs in settings.items():
        cell = [setting]
        for verdict in (each[setting] for each in judged):
            cell += [f"{verdict.mean:.4f} ± {verdict.deviation:.4f}", f"{verdict.ratio:.3f}"]
            cell += [f"{verdict.largest_difference:.4f}"]
            cell += ["-" if seeds == 1 else _YES[verdict.in_spread], _YES[verdict.close]]
        cells.append([*cell, f"{statistics.fmean(row['evaluation_accuracy'] for row in runs):.1%}"])
    return harness.table(title, [*columns, "accuracy"], cells)


_YES = {True: "yes", False: "NO"}
_COLOURS = ["black", "#999999", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#882255", "#b8a800"]


def draw(path: Path, rows: Sequence[harness.Row]) -> None:
    """A column for each task: the training losses above, each seed's final losses below."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no screen
    import matplotlib.pyplot as plt

    tasks = harness.grouped(rows, "task")
    figure, axes = plt.subplots(2, len(tasks), figsize=(6.5 * len(tasks), 8.5), layout="constrained", squeeze=False)
    for column, mine in enumerate(tasks.values()):
        _draw_curves(axes[0][column], mine)
        _draw_final(axes[1][column], mine)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_curves(axes: Any, rows: Sequence[harness.Row]) -> None:
    """Means over the seeds; without compression also from the lowest to the highest seed."""
    from matplotlib.ticker import LogFormatter

    first = rows[0]
    for (setting, runs), colour in zip(by_setting(rows).items(), itertools.cycle(_COLOURS)):
        curves = list(zip(*(row["curve"] for row in runs), strict=True))
        steps = [first["curve_window"] * (place + 0.5) for place in range(len(curves))]
        means = [statistics.fmean(losses) for losses in curves]
        plain = setting == UNCOMPRESSED
        axes.plot(steps, means, color=colour, linewidth=3 if plain else 1.2, label=setting)
        if plain:
            band = ([min(losses) for losses in curves], [max(losses) for losses in curves])
            axes.fill_between(steps, *band, color=colour, alpha=0.12, linewidth=0, label="its seeds")
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.set_title(
        f"{first['task']}: mean of {len(runs)} seeds, each point of {first['curve_window']} steps", loc="left"
    )
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(LogFormatter(minor_thresholds=(1.5, 0.4)))
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _draw_final(axes: Any, rows: Sequence[harness.Row]) -> None:
    """A mark a seed; the spread without compression is shaded."""
    settings = by_setting(rows)
    places = range(len(settings))
    for loss, mark, colour, shift in zip(LOSSES, "os", (_COLOURS[2], _COLOURS[4]), (-0.12, 0.12), strict=True):
        mean = statistics.fmean(row[loss] for row in settings[UNCOMPRESSED])
        losses = {setting: [row[loss] / mean for row in runs] for setting, runs in settings.items()}
        axes.axhspan(min(losses[UNCOMPRESSED]), max(losses[UNCOMPRESSED]), color=colour, alpha=0.15, linewidth=0)
        for place, values in zip(places, losses.values(), strict=True):
            label = f"final {loss.replace('_', ' ')}, a seed" if place == 0 else None
            axes.plot([place + shift] * len(values), values, mark, color=colour, fillstyle="none", label=label)
    axes.set_xticks(places, list(settings), rotation=30, ha="right")
    axes.set(ylabel="loss / mean loss without compression")
    axes.set_title(f"{rows[0]['task']}: shaded is the spread of the seeds without compression", loc="left", fontsize=10)
    axes.grid(alpha=0.25, axis="y")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.28))
