"""The picture of a run: losses and step times of both DDPs, the stop of a rank, and 8 bits beside plain gradients."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")  # a file, no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from report import PATIENCE, Record, Run, Stall

# Colour, style and width. The second curve of a panel is drawn over the first.
OURS, THEIRS, EIGHT = ("#d1495b", "-", 3.2), ("#22333b", "--", 1.1), ("#003f88", "--", 1.3)
SPANS = {"step": "#72a65c", "waits": "#d9d9d9", "stopped": "#d1495b"}
LEGEND = {"step": "trains", "waits": "waits in backward", "stopped": "stopped"}
Look = tuple[str, str, float]
SMOOTHED_STEPS = 10
ROW, GAP, REPORT_ROWS = 0.8, 0.9, 1.0  # a bar's height, the space between the two DDPs, the report's height; in rows
LINE = 155  # characters of the report
SHOWN_RANKS = 4


def draw(path: Path, title: str, run: Run, stalls: Sequence[Stall], eight: Record | None) -> None:
    """Write the picture as a PNG. Without stalls, and so without a second rank, only its first panel."""
    rows = 3 if stalls and eight else 1
    figure = plt.figure(figsize=(11, 4.2 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2, width_ratios=(2.4, 1))
    figure.suptitle(title, fontsize=13)
    same = "1. The same training, twice: two curves that are one"
    draw_losses(figure.add_subplot(grid[0, 0]), run.records, (OURS, THEIRS), same)
    draw_step_times(figure.add_subplot(grid[0, 1]), run)
    if stalls and eight:
        draw_stalls(figure.add_subplot(grid[1, :]), stalls)
        plain = run.records[0]
        beside = "3. Gradients of 8 bits: the loss beside plain's, of one seed"
        draw_losses(figure.add_subplot(grid[2, 0]), (plain, eight), (OURS, EIGHT), beside)
        draw_bytes(figure.add_subplot(grid[2, 1]), (plain, eight))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_losses(axes: Axes, records: Sequence[Record], looks: Sequence[Look], title: str) -> None:
    """Training loss as lines and validation loss as marks."""
    for record, (colour, style, width) in zip(records, looks, strict=True):
        smooth = running_mean(record.losses)
        label = f"{record.name}, training (mean of {SMOOTHED_STEPS} steps)"
        axes.plot(range(1, len(smooth) + 1), smooth, color=colour, linestyle=style, linewidth=width, label=label)
    for record, (colour, _, width) in zip(records, looks, strict=True):
        at, losses = zip(*record.validation, strict=True)
        label = f"{record.name}, validation (at the end {losses[-1]:.4f})"
        axes.plot(at, losses, "o", color=colour, markersize=4 + width, fillstyle="none", label=label)
    axes.set(xlabel="step", ylabel="loss, nats a byte", xlim=(0, None))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def running_mean(values: Sequence[float]) -> list[float]:
    """Each value's mean with those just before it."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [fmean(window) for window in windows]


def draw_step_times(axes: Axes, run: Run) -> None:
    """Which part of all steps took no longer than that."""
    for record, (colour, style, width) in zip(run.records, (OURS, THEIRS), strict=True):
        label = f"{record.name}\nmedian {record.median_ms:.1f} ms"
        axes.ecdf(record.step_ms, color=colour, linestyle=style, linewidth=width, label=label)
    axes.set_xlim(0, 2 * max(record.median_ms for record in run.records))  # which leaves room for the legend
    axes.set(xlabel="milliseconds a step", ylabel="part of the steps that took no longer", ylim=(0, 1.02))
    axes.set_title("Step times" + (run.other_work and f" ({run.other_work})"), loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def draw_stalls(axes: Axes, stalls: Sequence[Stall]) -> None:
    """What each rank did before, during and after the stop, and what was said."""
    y, ticks, labels = 0.0, [], []
    for stall in stalls:
        begin = stall.stop.begin
        watch = f", Watch(patience={PATIENCE:g})" if stall.report else ""
        axes.text(-0.95, y - 0.5, f"Under {stall.name}{watch}", fontsize=10, fontweight="bold")
        for rank, spans in enumerate(stall.spans[:SHOWN_RANKS]):
            axes.broken_barh(
                [(span.begin - begin, span.end - span.begin) for span in spans],
                (y - ROW / 2, ROW),
                facecolors=[SPANS[span.kind] for span in spans],
                edgecolor="white",
                linewidth=0.3,
            )
            ticks.append(y)
            labels.append(f"rank {rank}")
            y += 1
        y = write_report(axes, stall, y) + GAP
    axes.set_yticks(ticks, labels)
    axes.set_ylim(y - 0.6, -1.1)
    axes.set_xlim(-1.0, max(stall.seconds for stall in stalls) + 0.7)
    axes.set_xlabel("seconds since rank 1 was stopped")
    axes.set_title("2. Another process stops rank 1: who says so?", loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=colour, label=LEGEND[kind]) for kind, colour in SPANS.items()]
    axes.legend(handles=handles, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)


def write_report(axes: Axes, stall: Stall, y: float) -> float:
    """The report below the bars, and when it came; gives the row below it."""
    if stall.report is None or stall.seconds_to_report is None:
        said = "(no report)" if stall.said.strip() else "(nothing on stderr)"
        axes.text(-0.95, y - 0.3, said, fontsize=8, family="monospace", va="top")
        return y
    at = stall.seconds_to_report
    axes.plot([at, at], [-ROW / 2, y - 0.4], color="black", linewidth=1.4)
    axes.text(at, -ROW / 2 - 0.05, f" report, {at:.1f} s", fontsize=9, va="bottom", ha="center")
    axes.text(-0.95, y - 0.3, shortened(stall.report), fontsize=8, family="monospace", va="top")
    return y + REPORT_ROWS


def shortened(report: dict[str, object]) -> str:
    """The headline and the first cause, as the report has them."""
    lines = re.sub(r" \(\d{4}-\d\d-\d\d [^)]*\)", "", str(report["message"])).splitlines()[:2]
    return "\n".join(textwrap.fill(line, LINE, subsequent_indent="    ") for line in lines)


def draw_bytes(axes: Axes, records: Sequence[Record]) -> None:
    """What arrives in a step."""
    megabytes = [record.bytes_a_step / 1e6 for record in records]
    bars = axes.bar(
        [record.name for record in records], megabytes, color=[colour for colour, *_ in (OURS, EIGHT)], width=0.6
    )
    axes.bar_label(bars, [f"{size:.2f} MB" if size else "not by TCP" for size in megabytes])
    axes.set(ylabel="megabytes that arrive at a rank, a step")
    axes.margins(y=0.12)
    axes.set_title("Bytes", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
