"""What ``fastddp trace`` finds out: the numbers in tables, pages and files. Times are ms from a step's start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastddp.times.split import Split

Recorder = Literal["torch.profiler", "Nsight Systems"]
Wrapper = Literal["fastddp", "torch DDP", "unknown"]  # whose buckets these are; torch DDP's are guessed
# What marks steps; "nothing": the whole trace is one step.
StepMark = Literal["--step-range", "ProfilerStep#", "fastddp.step", "forward", "nothing"]
What = Literal["forward", "compute", "copy", "pack", "collective", "wait", "unpack"]


@dataclass(frozen=True)
class Interval:
    """Something on a lane of a timeline."""

    lane: int  # index into Timeline.lanes
    start: float
    end: float
    what: What
    name: str  # as recorded
    bucket: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One step of one rank: the one of median length."""

    rank: int
    step: int
    lanes: tuple[str, ...]  # threads and streams
    intervals: tuple[Interval, ...]
    length: float


@dataclass(frozen=True)
class BucketReport:
    """One bucket: medians over steps; if ranks differ, the slowest rank's. None: the trace does not say."""

    bucket: int
    first: str | None  # parameter; buckets of torch's DDP have no names
    last: str | None
    bytes: int | None
    wire: str | None
    ready: float | None  # when the last of its gradients came on the last rank
    delay: float | None  # from `ready` to the start of its collective
    start: float
    duration: float
    bus_gb_per_s: float | None  # 10⁹ bytes a second; an allreduce moves 2 (n - 1) / n of its bytes over the bus
    exposed: float  # its share of the step's exposed communication
    last_rank: int | None  # where its last gradient came latest in most steps
    last_parameter: str | None
    mean_exposed: float  # over ranks and steps; all buckets' add up to at most the run's


@dataclass(frozen=True)
class CollectiveReport:
    """Collectives of one kind in a step, buckets' and others apart: means over ranks and steps. None: not known."""

    kind: str  # all_reduce, all_gather, ...
    of_buckets: bool
    count: float
    total: float  # ms; with the time that ranks wait for each other
    median: float  # ms, of one
    bytes: float | None  # that go in on a rank
    bus_gb_per_s: float | None  # median, from when the last rank has joined
    exposed: float  # ms; their share, as a bucket's


@dataclass(frozen=True)
class Idle:
    """The parts of a step's idle time, which add up to it; ms, means over ranks and steps."""

    on_device: bool  # otherwise nothing is launched, and `host` is code outside operators
    host: float  # the host had not launched the next activity yet
    data: float  # ... because it waited for the next batch
    launched: float  # the next activity was launched, and had not begun
    unknown: float


@dataclass(frozen=True)
class RankReport:
    """One rank."""

    rank: int
    source: str  # the file
    step_ms: tuple[float, ...]  # of each step
    split: Split  # means over steps, so that the parts add up
    waits_ms: float | None  # a step, median: how long this rank's collectives ran before the last rank joined them


@dataclass(frozen=True)
class Report:
    """One run."""

    name: str
    recorder: Recorder
    wrapper: Wrapper
    world_size: int | None
    ranks: tuple[RankReport, ...]
    split: Split  # mean over ranks
    buckets: tuple[BucketReport, ...]
    timelines: tuple[Timeline, ...]  # a rank each
    stragglers: tuple[str, ...]  # sentences
    advice: tuple[str, ...]  # sentences with numbers, the most profitable first
    notes: tuple[str, ...]  # what the trace lacks, what was guessed, what was left out
    step_mark: StepMark
    collectives: tuple[CollectiveReport, ...]  # the most exposed first
    idle: Idle
    warnings: tuple[str, ...]  # what is missing from the report: to be read first
