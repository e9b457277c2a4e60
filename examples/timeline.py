"""One training step as torch.profiler saw it on this rank, as bars: computation, and the collectives beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

Interval = tuple[float, float]

PHASES = ("forward", "backward", "optimizer")  # the ranges that the training step records
WAIT = "wait"  # the end of backward, when all gradients are computed and some are still on their way
COLLECTIVE = "collective"


@dataclass(frozen=True)
class Bar:
    """Something that took time, in milliseconds since the step began. Bars of one row never overlap."""

    kind: str
    row: int  # 0 is computation; each thread or stream that runs collectives has one of its own
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The bars of one step, how long collectives ran in it, and how much of that was hidden by computation."""

    bars: list[Bar]
    collectives_ms: float
    hidden_ms: float

    @property
    def end(self) -> float:
        """When the step was over."""
        return max(bar.end for bar in self.bars)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return 1 + max(bar.row for bar in self.bars)


def read_timelines(events: Iterable[FunctionEvent]) -> list[Timeline]:
    """Each step in a profile that has the phases under their names in PHASES."""
    events = list(events)
    phases = zip(*(sorted(interval(e) for e in events if is_phase(e, name)) for name in PHASES), strict=True)
    return [read_step(events, *step) for step in phases]


def read_step(events: list[FunctionEvent], forward: Interval, backward: Interval, optimizer: Interval) -> Timeline:
    """The step with these phases."""
    begin, end = forward[0], optimizer[1]
    inside = [event for event in events if begin <= interval(event)[0] <= end]
    collectives = [event for event in inside if is_collective(event)]
    computing = union(interval(event) for event in inside if is_computing(event))
    last_gradient = min(backward[1], max((stop for start, stop in computing if start < backward[1]), default=end))

    computation = {
        "forward": forward,
        "backward": (backward[0], last_gradient),
        WAIT: (last_gradient, backward[1]),
        "optimizer": optimizer,
    }
    bars = [Bar(kind, 0, start - begin, stop - begin) for kind, (start, stop) in computation.items()]
    rows = {key: row for row, key in enumerate(sorted({row_key(event) for event in collectives}), start=1)}
    for event in collectives:
        start, stop = interval(event)
        bars.append(Bar(COLLECTIVE, rows[row_key(event)], start - begin, stop - begin))
    busy = union(interval(event) for event in collectives)
    return Timeline(bars, total(busy), common(busy, computing))


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """The step of median length."""
    return sorted(timelines, key=lambda timeline: timeline.end)[len(timelines) // 2]


def overlap(timelines: Sequence[Timeline]) -> float:
    """The part of all steps' collectives, 0 to 1, that hid behind computation."""
    busy = sum(timeline.collectives_ms for timeline in timelines)
    return sum(timeline.hidden_ms for timeline in timelines) / busy if busy else 0.0


def interval(event: FunctionEvent) -> Interval:
    """When an event took place, in milliseconds."""
    return event.time_range.start / 1e3, event.time_range.end / 1e3


def is_phase(event: FunctionEvent, name: str) -> bool:
    """Whether the event is one of the ranges of the training step; the profiler repeats them on a GPU's timeline."""
    return event.name == name and event.device_type == DeviceType.CPU


def is_collective(event: FunctionEvent) -> bool:
    """Whether the event is a collective at work: a task of gloo's worker threads, or a kernel of NCCL."""
    if event.device_type == DeviceType.CUDA:
        return event.name.startswith("ncclDevKernel")
    return event.name.startswith("gloo:")


def is_computing(event: FunctionEvent) -> bool:
    """Whether the event is computation of its own: a function of autograd's graph, or any other kernel on a GPU."""
    if event.device_type == DeviceType.CUDA:
        return not event.is_user_annotation and not event.name.startswith("nccl")
    return event.name.startswith("autograd::engine::evaluate_function")


def row_key(event: FunctionEvent) -> tuple[int, int]:
    """The thread or stream that ran a collective."""
    return event.thread, event.device_resource_id


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap; sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """The length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def common(some: list[Interval], others: list[Interval]) -> float:
    """The length of the overlap of two unions."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in some for begin, stop in others)
