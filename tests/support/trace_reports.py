"""Reports as ``fastddp trace`` makes them, without a trace: what tests of tables, pages and pictures show."""

from __future__ import annotations

from dataclasses import replace

from fastddp.times.split import Split
from fastddp.tools.trace.report import BucketReport, Idle, Interval, RankReport, Report, Timeline
from fastddp.tools.trace.split import mean

LANES = ("thread 4711 (backward)", "stream 7 (compute)", "stream 13 (nccl)")
EVIL = "<script>x()</script>\"'&amp;<b>$x$\x1b\ud800\u2028"


def report(
    name: str = "run", ranks: int = 2, buckets: int = 6, bandwidth: float = 3.0, parameter: str = "blocks.{}.weight"
) -> Report:
    """Steps whose backward computes 6 ms a bucket of 25 MiB; the bus moves ``bandwidth`` MiB a ms."""
    timelines = tuple(timeline(rank, buckets, bandwidth) for rank in range(ranks))
    splits = [Split(*(timeline.length * part for part in (0.4, 0.3, 0.2, 0.1))) for timeline in timelines]
    steps = [tuple(split.step * (0.97 + 0.003 * number) for number in range(20)) for split in splits]
    return Report(
        name=name,
        recorder="torch.profiler",
        wrapper="fastddp",
        world_size=ranks,
        ranks=tuple(RankReport(i, f"traces/rank{i}.json", steps[i], splits[i], 1.5) for i in range(ranks)),
        split=mean(splits),
        buckets=tuple(bucket_report(number, timelines[0], parameter) for number in range(buckets)),
        timelines=timelines,
        stragglers=(f"Rank {ranks - 1} joins most collectives last: the others wait 1.9 ms a step for it.",),
        advice=("Buckets of 10 MiB would start the first collective 3.6 ms earlier.", "16 bits would halve it."),
        notes=("The first 2 steps were left out: buckets are rebuilt in them.",),
        step_mark="fastddp.step",
        collectives=(),
        idle=Idle(on_device=True, host=0.0, data=0.0, launched=0.0, unknown=0.0),
        warnings=(),
    )


def of_torch(name: str = "before") -> Report:
    """A run of torch's DDP: buckets have no names, and little is known of them."""
    run = report(name, buckets=5, bandwidth=2.0)
    unknown = dict.fromkeys(("first", "last", "ready", "delay", "last_rank", "last_parameter"))
    buckets = tuple(replace(bucket, **unknown) for bucket in run.buckets)  # type: ignore[arg-type]
    return replace(run, wrapper="torch DDP", buckets=buckets, stragglers=(), advice=())


def empty() -> Report:
    lists = dict.fromkeys(("ranks", "buckets", "timelines", "stragglers", "advice", "notes"), ())
    none = {"wrapper": "unknown", "world_size": None, "split": mean([Split(0, 0, 0, 0)]), "step_mark": "nothing"}
    return replace(report("empty"), **lists, **none)  # type: ignore[arg-type]


def evil() -> Report:
    """Everything that can come from a file or an argument is hostile."""
    run = report(EVIL, buckets=2, parameter=EVIL)
    drawn = [tuple(replace(interval, name=EVIL) for interval in timeline.intervals) for timeline in run.timelines]
    timelines = tuple(Timeline(rank, 12, (EVIL,) * 3, intervals, 100.0) for rank, intervals in enumerate(drawn))
    ranks = tuple(replace(rank, source=EVIL) for rank in run.ranks)
    buckets = tuple(replace(bucket, wire=EVIL) for bucket in run.buckets)
    words = {"stragglers": (EVIL,), "advice": (EVIL, EVIL), "notes": (EVIL,)}
    return replace(run, timelines=timelines, ranks=ranks, buckets=buckets, **words)  # type: ignore[arg-type]


def with_many_ranks(ranks: int, *timelines: Timeline) -> Report:
    return replace(report(ranks=ranks, buckets=1), timelines=timelines)


def with_many_intervals(count: int) -> Timeline:
    step = 100.0 / count
    kernels = (Interval(1, i * step, (i + 0.9) * step, "compute", f"elementwise_kernel<{i}>") for i in range(count))
    last = Interval(2, 40.0, 90.0, "collective", "ncclDevKernel_AllReduce", 0)
    return Timeline(0, 3, LANES, (*kernels, last), 100.0)


def timeline(rank: int, buckets: int, bandwidth: float) -> Timeline:
    """One step: forward, a backward in which a bucket is packed and sent after each 6 ms, unpack, optimizer."""
    intervals = [Interval(0, 0.0, 12.0, "forward", "DistributedDataParallel.forward")]
    now, bus_free = 12.0, 0.0
    for bucket in range(buckets):
        until = now + 6 + 0.1 * rank
        start = max(until + 0.5, bus_free)
        bus_free = start + mebibytes(bucket) / bandwidth
        intervals += [
            Interval(1, now, until, "compute", "ampere_sgemm_128x64_tn"),
            Interval(1, until, until + 0.4, "pack", f"fastddp.pack bucket={bucket}", bucket),
            Interval(2, start, bus_free, "collective", "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", bucket),
            Interval(1, bus_free, bus_free + 0.3, "unpack", f"fastddp.unpack bucket={bucket}", bucket),
        ]
        now = until + 0.4
    intervals.append(Interval(0, now, bus_free, "wait", "fastddp.wait", buckets - 1))
    return Timeline(rank, 12, LANES, tuple(intervals), bus_free + 4.2)


def mebibytes(bucket: int) -> float:
    return 1.0 if bucket == 0 else 25.0


def bucket_report(bucket: int, timeline: Timeline, parameter: str) -> BucketReport:
    pack, collective = (i for i in timeline.intervals if i.what in ("pack", "collective") and i.bucket == bucket)
    duration, count = collective.end - collective.start, round(mebibytes(bucket) * 2**20)
    first, last, exposed = parameter.format(2 * bucket), parameter.format(2 * bucket + 1), 0.5 * bucket
    times = pack.start, collective.start - pack.start, collective.start, duration
    speed = count / duration / 1e6
    return BucketReport(bucket, first, last, count, "float32", *times, speed, exposed, bucket % 2, first, exposed)
