"""Where the time of every n-th step went, without a profiler: from events on the device or the host's clock.

The report knows when things began and ended: the forward, each bucket's collectives, the traffic outside of buckets
(which parameters ranks used, sparse gradients), and the backward. It does not know whether a device was busy in
between, so the time that :mod:`fastddp.times.split` calls idle counts as compute here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastddp._C import StepTimes
from fastddp.times.rank_times import Delay, RankHistory, RankTimes
from fastddp.times.split import Split


@dataclass(frozen=True)
class BucketTimes:
    """One bucket. Times in ms since the step's first forward began; NaN on another device than the first parameter's.

    An exchange of several collectives (16-bit sums over gloo, PowerSGD) counts from the start of the first to the end
    of the last, which may travel with the next bucket's first.
    """

    bucket: int
    """Its number in ``model.bucket_plan()``."""
    first: str
    """Name of its first parameter."""
    last: str
    """Name of its last parameter."""
    bytes: int
    """Of its gradients."""
    ready: float
    """When its last gradient has come on this rank."""
    start: float
    """Of its first collective."""
    end: float
    """Of its last collective: all ranks have joined, and the sum is here."""


@dataclass(frozen=True)
class StepReport:
    """One step of this rank, from its first forward to the end of its backward, in ms."""

    split: Split
    """Of the time from its first forward to the end of its backward."""
    outside: float
    """From the end of backward to the next step's forward: optimizer, data."""
    buckets: tuple[BucketTimes, ...]
    """In the order of their numbers."""
    ranks: tuple[RankTimes, ...] = ()
    """Of all ranks, in the last step whose times have come; empty if ranks are not compared, or not yet."""
    delays: tuple[Delay, ...] = ()
    """What makes every step longer: slow ranks, or the network."""
    rank: int = 0
    """The number of this rank."""

    @classmethod
    def of(
        cls, times: StepTimes, bucket_ends: Sequence[tuple[str, str, int]], history: RankHistory | None, rank: int
    ) -> StepReport:
        """The report of a step that the reducer has sampled.

        Args:
            times: of this rank.
            bucket_ends: each bucket's first and last parameter, and its bytes.
            history: of all ranks, if they are compared.
            rank: the number of this rank.
        """
        buckets = [
            BucketTimes(index, *ends, found.ready, found.start, found.end)
            for index, (ends, found) in enumerate(zip(bucket_ends, times.buckets, strict=True))
        ]
        ranks, delays = (history.ranks, history.delays) if history is not None else ((), ())
        return cls(split_of(times), times.next - times.end, tuple(buckets), ranks, delays, rank)

    @property
    def slowest(self) -> BucketTimes | None:
        """The bucket that ended last, for which backward waits."""
        return max((b for b in self.buckets if not math.isnan(b.end)), key=lambda bucket: bucket.end, default=None)

    def __str__(self) -> str:
        """As a line for a log."""
        split = self.split
        text = (
            f"step {split.step:.1f} ms: compute only {split.compute:.1f}, overlapped {split.overlapped:.1f}, "
            f"exposed {split.exposed:.1f}; outside {self.outside:.1f}"
        )
        slowest = self.slowest
        if slowest is not None:
            text += (
                f"; last was bucket {slowest.bucket} ({slowest.first} ... {slowest.last}), "
                f"{slowest.end - slowest.start:.1f} ms from {slowest.start:.1f} on"
            )
        return "; ".join([text, *map(str, self.delays)])

    def scalars(self, prefix: str = "fastddp/") -> dict[str, float]:
        """Names and values in ms, for ``SummaryWriter.add_scalar`` and its like.

        Where ranks are compared, ``late_ms`` is of the last rank to come, and ``network_ms`` what the network takes.

        Args:
            prefix: with which names begin.
        """
        split = self.split
        values = {
            "step_ms": split.step,
            "compute_only_ms": split.compute,
            "overlapped_ms": split.overlapped,
            "exposed_ms": split.exposed,
            "outside_ms": self.outside,
        }
        known = [rank for rank in self.ranks if not math.isnan(rank.late)]
        if known:
            values["late_ms"] = max(rank.late for rank in known)
            values["network_ms"] = min(rank.exposed for rank in known)
        return {prefix + name: value for name, value in values.items()}

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """The report in Prometheus' text format, as gauges in seconds.

        Only rank 0 writes the gauges of all ranks (``fastddp_rank_late_seconds``), so that they occur once if all ranks
        of a job export.

        Args:
            labels: added to each sample.
        """
        given = dict(labels or {})
        lines = []
        for name, value in self.scalars("fastddp_").items():
            name = name.removesuffix("_ms") + "_seconds"
            lines += [f"# TYPE {name} gauge", f"{name}{_labels(given)} {value / 1e3:.9g}"]
        lines.append("# TYPE fastddp_bucket_seconds gauge")
        for bucket in self.buckets:
            of_bucket = {**given, "bucket": str(bucket.bucket), "first": bucket.first}
            lines.append(f"fastddp_bucket_seconds{_labels(of_bucket)} {(bucket.end - bucket.start) / 1e3:.9g}")
        if self.ranks and self.rank == 0:
            lines.append("# TYPE fastddp_rank_late_seconds gauge")
            for rank in self.ranks:
                labelled = _labels({**given, "rank": str(rank.rank)})
                lines.append(f"fastddp_rank_late_seconds{labelled} {rank.late / 1e3:.9g}")
        return "\n".join(lines) + "\n"


def split_of(times: StepTimes) -> Split:
    """Where the time from the first forward to the end of backward went. A wait for parameters is exposed."""
    rest = (times.rest_start, times.rest_end)
    communication = merged([*((bucket.start, bucket.end) for bucket in times.buckets), rest])
    before = sum(max(0.0, min(end, times.computed) - start) for start, end in communication)
    after = sum(max(0.0, min(end, times.end) - max(start, times.computed)) for start, end in communication)
    exposed = after + min(before, times.blocked)
    overlapped = before + after - exposed
    exposed += times.gather_before
    return Split(times.end - overlapped - exposed, overlapped, exposed, idle=0.0)


def merged(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the intervals, in order and without overlaps; intervals with a NaN are left out."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(pair for pair in intervals if not any(map(math.isnan, pair))):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{value.translate(_ESCAPED)}"' for key, value in labels.items()) + "}"
