"""What the DDP paper found, next to what `bench.paper` measured: the sentences and the tables.

The paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", PVLDB 13(12), 2020.
"about" stands before numbers of it that were not compared with its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import harness

HERE = "gloo on the CPU, ranks in two network namespaces, a cable of the rate given, few cores for all ranks"
THERE = "V100 GPUs, 8 a server, NCCL or gloo, 100 Gbit/s between servers; ResNet-50 and BERT"


@dataclass(frozen=True)
class Figure:
    """One of the paper's, by what it measures."""

    name: str  # as on the command line
    about: str
    found: str  # by the paper
    differs: str  # here, besides HERE and THERE
    columns: tuple[str, ...]  # of the table, besides contestant and setting
    setting: str | None = None  # the column that is varied


FIGURES = {
    figure.name: figure
    for figure in (
        Figure(
            "6",
            "where a step's time goes, and what it saves to exchange during backward",
            "On 32 GPUs backward, with the exchange in it, is most of a step. Exchanging during backward makes "
            "ResNet-50 and BERT 38.0 % and 35.2 % faster over NCCL, 26.8 % and 21.5 % over gloo, where the wire is the "
            "limit.",
            "What backward computes is that of the same module without DDP, in the same rounds; exposed is what DDP's "
            "backward takes more. Without overlap there is one bucket, which is complete when backward is.",
            ("forward_ms", "backward_alone_ms", "exposed_ms", "optimizer_ms", "step_ms", "saved_by_overlap"),
        ),
        Figure(
            "7",
            "a step by the size of its buckets (figures 7 and 8: two numbers of ranks)",
            "On 16 and 32 GPUs the best sizes lie in the middle: about 10 to 25 MB for ResNet-50 over NCCL, about "
            "50 MB for BERT, about 5 MB over gloo. A bucket for each gradient is slowest or close to it.",
            "2 and 4 ranks. Size 0 is a bucket for each gradient.",
            ("buckets", "step_ms", "ratio_to_25_mib"),
            "bucket_cap_mb",
        ),
        Figure(
            "9",
            "a step by the number of ranks, each with the same work: measured, then predicted",
            "Up to 256 GPUs. NCCL's steps take about twice as long on 256 as on one, gloo's about 3 times (ResNet-50) "
            "and about 6 times (BERT) as long.",
            "Up to 8 ranks are measured, which share the cores: so the step without DDP grows too, and efficiency is "
            "its time, on as many ranks, over that with DDP. What is predicted (`fastddp plan`) comes from a profile "
            "of two ranks, which compute as long as those two did.",
            ("alone_ms", "step_ms", "efficiency", "predicted_low_ms", "predicted_high_ms"),
            "world_size",
        ),
        Figure(
            "10",
            "an iteration where gradients are exchanged only in each n-th (no_sync)",
            "With an exchange in each 8th iteration on 256 GPUs, an iteration of ResNet-50 takes about 38 % less over "
            "NCCL and about 57 % less over gloo. (Figure 11: with large batches the model then learns worse.)",
            "2 ranks. What it does to learning is not measured here.",
            ("step_ms", "saved"),
            "every",
        ),
        Figure(
            "12",
            "a step whose buckets are dealt to one to three process groups in turn",
            "1, 3 and 5 groups on up to 32 GPUs. Over NCCL ResNet-50 gains nothing; BERT on 16 GPUs is about 33 % "
            "faster with 3 groups than with one. Over gloo 3 groups are faster than one.",
            "torch: a communication hook deals buckets in turn. fastddp: its lanes, of which it has two by itself "
            "where buckets are large; here their number is forced.",
            ("step_ms", "ratio_to_one_group"),
            "groups",
        ),
    )
}


def beside(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """The rows of one cell with what compares them, by their figure.

    >>> rows = [{"figure": "10", "contestant": "torch", "every": n, "step_ms": ms} for n, ms in ((1, 8.0), (4, 5.0))]
    >>> [row["saved"] for row in beside(rows)]
    [0.0, 0.375]
    >>> rows = [{"figure": "7", "contestant": "torch", "bucket_cap_mb": cap, "step_ms": cap / 5} for cap in (5, 25)]
    >>> [row["ratio_to_25_mib"] for row in beside(rows)]
    [0.2, 1.0]
    >>> rows = [{"figure": "12", "contestant": "torch", "groups": n, "step_ms": 6.0 / n} for n in (1, 2)]
    >>> [row["ratio_to_one_group"] for row in beside(rows)]
    [1.0, 0.5]
    >>> rows = [{"figure": "6", "contestant": name, "overlap": overlap, "step_ms": ms}
    ...         for name, overlap, ms in (("torch", True, 6.0), ("torch", False, 8.0))]
    >>> [row["saved_by_overlap"] for row in beside(rows)]
    [0.25, None]
    """

    def other(row: harness.Row, **columns: Any) -> float | None:
        """The step of the same contestant with another setting."""
        wanted = {"contestant": row["contestant"]} | columns
        return next((r["step_ms"] for r in rows if wanted.items() <= r.items()), None)

    result = []
    for row in rows:
        if row["figure"] == "6":
            plain = other(row, overlap=False) if row["overlap"] else None
            row = row | {"saved_by_overlap": None if plain is None else round(1 - row["step_ms"] / plain, 4)}
        elif row["figure"] == "7":
            row = row | {"ratio_to_25_mib": _ratio(row["step_ms"], other(row, bucket_cap_mb=25))}
        elif row["figure"] == "10":
            each = other(row, every=1)
            row = row | {"saved": None if each is None else round(1 - row["step_ms"] / each, 4)}
        elif row["figure"] == "12":
            row = row | {"ratio_to_one_group": _ratio(row["step_ms"], other(row, groups=1))}
        result.append(row)
    return result


def _ratio(time: float, other: float | None) -> float | None:
    return None if other is None else round(time / other, 4)


_IN_PERCENT = ("saved", "saved_by_overlap", "efficiency")


def cell_text(column: str, value: Any) -> str:
    """As the tables have it.

    >>> cell_text("saved", 0.375), cell_text("step_ms", 12.3456), cell_text("world_size", 256), cell_text("saved", None)
    ('37.5%', '12.35', '256', '-')
    """
    if value is None:
        return "-"
    if column in _IN_PERCENT:
        return f"{100 * value:.1f}%"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figure_tables(rows: Sequence[harness.Row], figure: Figure) -> list[Any]:
    """One for each case and network."""
    result = []
    mine = [row for row in rows if row["figure"] == figure.name]
    where = ("case", "rate") if figure.name == "9" else ("case", "world_size", "rate")
    for place in dict.fromkeys(tuple(row[column] for column in where) for row in mine):
        chosen = [row for row in mine if tuple(row[column] for column in where) == place]
        on = ", ".join(
            f"{value} ranks" if column == "world_size" else value for column, value in zip(where, place, strict=True)
        )
        left = ["contestant"] + ([figure.setting] if figure.setting else ["overlap"])
        columns = [*left, *figure.columns]
        cells = [[cell_text(column, row.get(column)) for column in columns] for row in chosen]
        result.append(harness.table(f"figure {figure.name}, {on}", columns, cells, left=1))
    return result


def words(figure: Figure) -> str:
    """What a reader of the tables has to know."""
    return f"Figure {figure.name}: {figure.about}.\n  The paper: {figure.found}\n  Here: {figure.differs}"
