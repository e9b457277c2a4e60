"""What ``fastddp trace`` finds out: the numbers that tables, pages and files show. Times are ms from a step's start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastddp.split import Split

Recorder = Literal["torch.profiler", "Nsight Systems"]
Wrapper = Literal["fastddp", "torch DDP", "unknown"]  # whose buckets these are; of torch's DDP they are guessed
# What marks steps; "nothing": all of the trace is one.
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
    """One step of one rank: that with the median time."""

    rank: int
    step: int
    lanes: tuple[str, ...]  # threads and streams
    intervals: tuple[Interval, ...]
    length: float


@dataclass(frozen=True)
class BucketReport:
    """One bucket: medians over steps, of the slowest rank where ranks differ. None: the trace does not say."""

    bucket: int
    first: str | None  # parameter; buckets of torch's DDP have no names
    last: str | None
    bytes: int | None
    wire: str | None
    ready: float | None  # when the last of its gradients came on the last rank
    delay: float | None  # from there to the start of its collective
    start: float
    duration: float
    bus_gb_per_s: float | None  # 10⁹ bytes a second; an allreduce moves 2 (n - 1) / n of its bytes over the bus
    exposed: float  # its share of the step's exposed communication
    last_rank: int | None  # on which its last gradient came latest, in most steps
    last_parameter: str | None
    mean_exposed: float  # over ranks and steps: those of all buckets add up to no more than the run's


@dataclass(frozen=True)
class CollectiveReport:
    """Collectives of a kind, those of buckets and others apart; a step, means over ranks and steps. None: not known."""

    kind: str  # all_reduce, all_gather, ...
    of_buckets: bool
    count: float
    total: float  # ms; what ranks wait for each other in it included
    median: float  # ms, of one
    bytes: float | None  # that go in on a rank
    bus_gb_per_s: float | None  # median, from when the last rank has joined
    exposed: float  # ms; their share, as a bucket's


@dataclass(frozen=True)
class Idle:
    """What a step's idle time is spent on, ms, mean over ranks and steps; they add up to it."""

    on_device: bool  # otherwise nothing is launched, and what is neither data nor unknown is code that is no operator
    host: float  # the host had not launched yet what came next
    data: float  # ... since it waited for the next batch
    launched: float  # what came next was launched, and had not begun
    unknown: float


@dataclass(frozen=True)
class RankReport:
    """One rank."""

    rank: int
    source: str  # the file
    step_ms: tuple[float, ...]  # of each step
    split: Split  # means over steps, so that the four add up
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
    collectives: tuple[CollectiveReport, ...]  # the one with most exposed time first
    idle: Idle
    warnings: tuple[str, ...]  # what is missing from all of this: read before anything else
