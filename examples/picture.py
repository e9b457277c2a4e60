"""The picture of a run: both loss curves, and one step under each DDP on a common clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")  # a file, no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from timeline import COLLECTIVE, WAIT, Timeline

BAR_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72a65c",
    WAIT: "#d9d9d9",
    COLLECTIVE: "#e8853d",
    "optimizer": "#9d7bb5",
}
LEGEND = {
    "forward": "forward",
    "backward": "backward computes",
    WAIT: "backward waits for collectives",
    COLLECTIVE: "collective",
    "optimizer": "optimizer",
}
CURVES = (("#d1495b", "-", 3.2), ("#22333b", "--", 1.1))  # colour, style, width: the second is drawn over the first
SMOOTHED_STEPS = 10
ROW, GAP = 0.8, 0.7  # the height of a bar, and the space between the two DDPs, in rows


@dataclass(frozen=True)
class Curve:
    """What one DDP did: the loss of each step, the validation loss after some, and one step's timeline."""

    name: str
    losses: Sequence[float]
    validation: Sequence[tuple[int, float]]
    timeline: Timeline


def draw(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write the picture as a PNG."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 8.5), height_ratios=(3, 2.4), layout="constrained")
    figure.suptitle(title, fontsize=13)
    draw_losses(above, curves)
    draw_timelines(below, curves)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Training loss as lines and validation loss as marks."""
    axes.plot(range(1, len(curves[0].losses) + 1), curves[0].losses, color=CURVES[0][0], linewidth=0.8, alpha=0.25)
    for curve, (colour, style, width) in zip(curves, CURVES, strict=True):
        smooth = running_mean(curve.losses)
        label = f"{curve.name}, training (mean of {SMOOTHED_STEPS} steps)"
        axes.plot(range(1, len(smooth) + 1), smooth, color=colour, linestyle=style, linewidth=width, label=label)
    for curve, (colour, _, width) in zip(curves, CURVES, strict=True):
        at, losses = zip(*curve.validation, strict=True)
        axes.plot(
            at, losses, "o", color=colour, markersize=4 + width, fillstyle="none", label=f"{curve.name}, validation"
        )
    axes.set(xlabel="step", ylabel="loss, nats a byte", xlim=(0, None))
    axes.set_title("Loss: two curves that are one", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def running_mean(values: Sequence[float]) -> list[float]:
    """Each value's mean with those just before it."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [fmean(window) for window in windows]


def draw_timelines(axes: Axes, curves: Sequence[Curve]) -> None:
    """One step of each DDP, one above the other: computation on top, collectives below it."""
    y, ticks, labels = 0.0, [], []
    for curve in curves:
        timeline = curve.timeline
        axes.text(0, y - 0.55, f"{curve.name}: {timeline.end:.1f} ms", fontsize=10, fontweight="bold")
        for row in range(timeline.rows):
            bars = [bar for bar in timeline.bars if bar.row == row]
            axes.broken_barh(
                [(bar.start, bar.end - bar.start) for bar in bars],
                (y - ROW / 2, ROW),
                facecolors=[BAR_COLOURS[bar.kind] for bar in bars],
                edgecolor="white",
                linewidth=0.6,
            )
            ticks.append(y)
            labels.append("computation" if row == 0 else f"collectives {row}")
            y += 1
        y += GAP
    axes.set_yticks(ticks, labels)
    axes.set_ylim(y - GAP - 0.4, -1.0)
    axes.set_xlim(0, max(curve.timeline.end for curve in curves) * 1.01)
    axes.set_xlabel("milliseconds since the step began, on rank 0")
    axes.set_title("One step, of median length: what the collectives overlap", loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=colour, label=LEGEND[kind]) for kind, colour in BAR_COLOURS.items()]
    axes.legend(handles=handles, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
