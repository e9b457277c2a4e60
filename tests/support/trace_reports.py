"""Reports as ``fastddp trace`` makes them, without a trace: what tests of tables, pages and pictures show."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import fmean

from fastddp.trace.report import BucketReport, Idle, Interval, RankReport, Report, Split, Timeline

LANES = ("thread 4711 (backward)", "stream 7 (compute)", "stream 13 (nccl)")
FORWARD_MS, OPTIMIZER_MS, OPERATION_MS = 12.0, 4.0, 0.8


def report(
    name: str = "run",
    ranks: int = 2,
    buckets: int = 6,
    bandwidth: float = 3.0,
    seed: int = 0,
    parameter: str = "blocks.{}.weight",
) -> Report:
    """A step whose backward computes 6 ms a bucket of 25 MiB; the bus moves ``bandwidth`` MiB a ms."""
    timelines = tuple(timeline(rank, buckets, bandwidth, seed) for rank in range(ranks))
    splits = [split(timeline) for timeline in timelines]
    return Report(
        name=name,
        recorder="torch.profiler",
        wrapper="fastddp",
        world_size=ranks,
        ranks=tuple(rank_report(rank, splits[rank], seed) for rank in range(ranks)),
        split=mean(splits),
        buckets=tuple(bucket_report(number, timelines[0], parameter) for number in range(buckets)),
        timelines=timelines,
        stragglers=(f"Rank {ranks - 1} joins most collectives last: the others wait 1.9 ms a step for it.",),
        advice=(
            "Buckets of 10 MiB instead of 25 MiB would start the first collective 3.6 ms earlier: bucket_cap_mb=10.",
            "A wire of 16 bits would halve what travels: register_comm_hook(None, comm_hooks.bf16_compress_hook).",
        ),
        notes=("The first 2 steps were left out: buckets are rebuilt in them.",),
        step_mark="fastddp.step",
        collectives=(),
        idle=Idle(on_device=True, host=0.0, data=0.0, launched=0.0, unknown=0.0),
        warnings=(),
    )


def empty() -> Report:
    """A run of which nothing is known."""
    return Report(
        name="empty",
        recorder="torch.profiler",
        wrapper="unknown",
        world_size=None,
        ranks=(),
        split=Split(0, 0, 0, 0),
        buckets=(),
        timelines=(),
        stragglers=(),
        advice=(),
        notes=(),
        step_mark="nothing",
        collectives=(),
        idle=Idle(on_device=False, host=0.0, data=0.0, launched=0.0, unknown=0.0),
        warnings=(),
    )


def timeline(rank: int, buckets: int, bandwidth: float, seed: int) -> Timeline:
    """One step: forward, a backward in which a bucket is packed and sent after each 6 ms, unpack, optimizer."""
    chance = random.Random(1000 * seed + rank)
    intervals = [Interval(0, 0.0, FORWARD_MS, "forward", "DistributedDataParallel.forward")]
    intervals += operations(0.3, FORWARD_MS, "ampere_sgemm_128x64_tn", chance)
    now, bus_free = FORWARD_MS, 0.0
    for bucket in range(buckets):
        until = now + 6 * chance.uniform(0.9, 1.1)
        intervals += operations(now, until, "ampere_sgemm_128x64_nt", chance)
        intervals.append(Interval(1, until, until + 0.4, "pack", f"fastddp.pack bucket={bucket}", bucket))
        start = max(until + 0.5, bus_free)
        bus_free = start + size_of(bucket) / bandwidth * chance.uniform(0.95, 1.05)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        intervals.append(Interval(2, start, bus_free, "collective", name, bucket))
        intervals.append(Interval(1, bus_free, bus_free + 0.3, "unpack", f"fastddp.unpack bucket={bucket}", bucket))
        now = until + 0.4
    intervals.append(Interval(0, now, bus_free, "wait", "fastddp.wait", buckets - 1))
    intervals += operations(bus_free + 0.5, bus_free + OPTIMIZER_MS, "multi_tensor_apply_kernel", chance)
    return Timeline(rank, 12, LANES, tuple(intervals), bus_free + OPTIMIZER_MS + 0.2)


def operations(start: float, end: float, name: str, chance: random.Random) -> list[Interval]:
    """Compute, with small gaps."""
    intervals = []
    while start < end:
        stop = min(end, start + OPERATION_MS * chance.uniform(0.2, 2.0))
        intervals.append(Interval(1, start, stop, "compute", name))
        start = stop + 0.02
    return intervals


def size_of(bucket: int) -> float:
    """MiB; the first one is small."""
    return 1.0 if bucket == 0 else 25.0


def split(timeline: Timeline) -> Split:
    """By the definitions, on a grid of 10 µs."""
    moments = round(timeline.length * 100)
    computes, communicates = bytearray(moments), bytearray(moments)
    for interval in timeline.intervals:
        if interval.what in ("collective", "compute", "pack", "unpack"):
            marks = communicates if interval.what == "collective" else computes
            first, last = round(interval.start * 100), min(moments, round(interval.end * 100))
            marks[first:last] = b"\1" * (last - first)
    counts = [0, 0, 0, 0]
    for one, other in zip(computes, communicates, strict=True):
        counts[2 * one + other] += 1
    idle, exposed, compute, overlapped = (count / 100 for count in counts)
    return Split(compute, overlapped, exposed, idle)


def mean(splits: Sequence[Split]) -> Split:
    """Part by part."""
    return Split(*(fmean(getattr(split, part.name) for split in splits) for part in fields(Split)))


def rank_report(rank: int, split: Split, seed: int) -> RankReport:
    """Twenty steps around the mean."""
    chance = random.Random(1000 * seed + rank)
    steps = tuple(split.step * chance.uniform(0.97, 1.03) for _ in range(20))
    return RankReport(rank, f"traces/rank{rank}.json", steps, split, chance.uniform(0.1, 2.0))


def bucket_report(bucket: int, timeline: Timeline, parameter: str) -> BucketReport:
    """What the timeline shows of a bucket."""
    (collective,) = (i for i in timeline.intervals if i.what == "collective" and i.bucket == bucket)
    (pack,) = (i for i in timeline.intervals if i.what == "pack" and i.bucket == bucket)
    duration = collective.end - collective.start
    count = round(size_of(bucket) * 2**20)
    exposed = max(0.0, collective.end - timeline.length + 9) if bucket else 0.0
    return BucketReport(
        bucket=bucket,
        first=parameter.format(2 * bucket),
        last=parameter.format(2 * bucket + 1),
        bytes=count,
        wire="float32",
        ready=pack.start,
        delay=collective.start - pack.start,
        start=collective.start,
        duration=duration,
        bus_gb_per_s=count / duration / 1e6,
        exposed=exposed,
        last_rank=bucket % 2,
        last_parameter=parameter.format(2 * bucket),
        mean_exposed=exposed,
    )


def of_torch(name: str = "before") -> Report:
    """A run of torch's DDP: buckets have no names, and little is known of them."""
    run = report(name, buckets=5, bandwidth=2.0, seed=1)
    unknown = dict.fromkeys(("first", "last", "ready", "delay", "last_rank", "last_parameter"))
    buckets = tuple(replace(bucket, **unknown) for bucket in run.buckets)  # type: ignore[arg-type]
    return replace(run, wrapper="torch DDP", buckets=buckets, stragglers=(), advice=())


def with_many_intervals(count: int) -> Timeline:
    """A timeline with this number of short kernels."""
    step = 100.0 / count
    kernels = (Interval(1, i * step, (i + 0.9) * step, "compute", f"elementwise_kernel<{i}>") for i in range(count))
    return Timeline(0, 3, LANES, (*kernels, Interval(2, 40.0, 90.0, "collective", "ncclDevKernel_AllReduce", 0)), 100.0)
