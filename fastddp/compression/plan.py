"""The decision about each bucket, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastddp.compression.choice import LEAST_GAIN, PLAIN, Choice, Load


@dataclass(frozen=True)
class CompressedBucket:
    """How one bucket travels."""

    number: int
    """As in ``model.bucket_plan()``."""
    bytes: int
    """Of its gradients."""
    choice: str
    """One of the candidates."""
    seconds: float
    """The predicted time of its exchange, from encoding to decoding; NaN if nothing was tried."""
    plain_seconds: float
    """The same without compression."""
    reason: str
    """Why, in a few words."""


@dataclass(frozen=True)
class CompressionPlan:
    """How the gradients of each bucket travel, and why; the same on all ranks. ``print`` shows it as a table."""

    buckets: tuple[CompressedBucket, ...]
    """In the order of their collectives."""
    error_budget: float
    """That of the state."""
    predicted_seconds: float
    """From the beginning of a forward until all gradients are averaged, predicted from measurements; NaN if nothing was
    tried."""
    plain_seconds: float
    """The same without compression."""
    measured_seconds: float | None
    """The median time of steps under the plan, on the slowest rank; None: not known yet, or nothing is compressed."""
    measured_plain_seconds: float
    """The same of steps before the plan."""
    reason: str
    """Why, in a sentence."""

    @property
    def compresses(self) -> bool:
        """Whether any bucket is compressed."""
        return any(bucket.choice != PLAIN for bucket in self.buckets)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("bucket", "MiB", "travels as", "ms", "plain ms", "because")]
        for bucket in self.buckets:
            milliseconds = [_milliseconds(seconds) for seconds in (bucket.seconds, bucket.plain_seconds)]
            size = f"{bucket.bytes / 2**20:.3g}"
            lines.append((str(bucket.number), size, bucket.choice, *milliseconds, bucket.reason))
        return f"{_table(lines)}\n{self.reason}"


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.3g}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(row.rstrip() for row in rows)


def plan_of(
    loads: Sequence[Load],
    sizes: Sequence[int],
    choice: Choice,
    *,
    error_budget: float,
    measured_plain_seconds: float,
) -> CompressionPlan:
    """The plan that ``choice`` makes.

    Args:
        loads: the buckets.
        sizes: bytes of their gradients.
        choice: see :func:`fastddp.compression.choice.choose`.
        error_budget: the budget that candidates had to keep.
        measured_plain_seconds: of the steps before the plan.
    """
    buckets = tuple(
        CompressedBucket(number, size, name, load.seconds[name], load.seconds[PLAIN], _reason(load, name, choice))
        for number, (load, size, name) in enumerate(zip(loads, sizes, choice.of_buckets, strict=True))
    )
    return CompressionPlan(
        buckets,
        error_budget,
        choice.end,
        choice.plain_end,
        measured_seconds=None,
        measured_plain_seconds=measured_plain_seconds,
        reason=_reason_of_all(loads, choice),
    )


def kept_plain(
    sizes: Sequence[int], reason: str, *, error_budget: float, measured_plain_seconds: float
) -> CompressionPlan:
    """The plan of a model for which no exchange was tried."""
    nan = float("nan")
    buckets = tuple(
        CompressedBucket(number, size, PLAIN, nan, nan, "nothing was tried") for number, size in enumerate(sizes)
    )
    return CompressionPlan(buckets, error_budget, nan, nan, None, measured_plain_seconds, reason)


def _reason(load: Load, name: str, choice: Choice) -> str:
    cheapest = min(load.seconds, key=lambda other: load.seconds[other])
    saved = 1e3 * (load.seconds[PLAIN] - load.seconds[name])
    if name != PLAIN:
        beside = "" if name == cheapest else f"; {cheapest} would gain the step nothing more"
        return f"takes {saved:.3g} ms less{beside}"
    if [*load.seconds] == [PLAIN]:
        return "gradients of its dtype are few: only those of the dtype with most bytes are compressed"
    if cheapest == PLAIN:
        return "nothing that the error budget allows is faster"
    if choice.compresses:
        return f"hidden behind backward: {cheapest} would not let the step end earlier"
    return "compression gains the step too little"


def _reason_of_all(loads: Sequence[Load], choice: Choice) -> str:
    if choice.compresses:
        return (
            f"Compressed: gradients are predicted to be averaged {1e3 * choice.end:.3g} ms after a step begins, "
            f"{100 * choice.gain:.0f} % sooner than the {1e3 * choice.plain_end:.3g} ms without compression."
        )
    ready = max((load.ready for load in loads), default=0.0)
    return (
        f"Plain: compression would gain less than {100 * LEAST_GAIN:.0f} % of a step. Gradients are ready after "
        f"{1e3 * ready:.3g} ms and averaged after {1e3 * choice.plain_end:.3g} ms."
    )
