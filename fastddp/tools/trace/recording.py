"""What any recorder recorded of one rank: activities in compact arrays, and ranges. Times are ms."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastddp.tools.trace import names
from fastddp.tools.trace.collectives import OTHER, Collective
from fastddp.tools.trace.intervals import Floats, Integers
from fastddp.tools.trace.names import Name
from fastddp.tools.trace.report import Recorder

Kind = Literal["compute", "copy", "pack", "unpack", "collective", "wait", "launch", "forward"]
KINDS: tuple[Kind, ...] = ("compute", "copy", "pack", "unpack", "collective", "wait", "launch", "forward")
NONE = -1

# What a host does in ranges of fastddp. Launching a collective, or waiting for it, is not compute.
_ON_HOST: dict[str, Kind] = {
    "pack": "pack",
    "unpack": "unpack",
    "project": "compute",
    "wait": "wait",
    "collective": "launch",
    "gather": "launch",
    "await": "wait",
}
# In NVTX these are starts and ends, which cross the ranges that threads push and pop. They launch nothing.
_ACROSS = frozenset({"step", "window"})


class TraceError(Exception):
    """A file that cannot be read as a trace; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class NamedRange:
    """A range of fastddp, or one that marks steps."""

    lane: int
    start: float
    end: float
    text: str

    @property
    def name(self) -> Name | None:
        """What it is about, if it is fastddp's."""
        return names.parse(self.text)


@dataclass(frozen=True)
class Activities:
    """Arrays of one length, not sorted."""

    kind: NDArray[np.int8]  # index into KINDS
    lane: Integers  # index into Recording.lanes
    start: Floats
    end: Floats
    name: Integers  # index into Recording.names
    launched: Floats  # when the host launched it; NaN: unknown, or the host did it itself
    range: Integers  # index into Recording.ranges: the innermost of fastddp that launched it; NONE: none
    about: Integers  # index into Recording.collectives; NONE: no collective
    bytes: Integers  # that go into a collective on this rank; NONE: unknown
    sequence: Integers  # a collective's number in its group; NONE: unknown

    def of(self, *kinds: Kind) -> NDArray[np.bool_]:
        """Which ones are of these kinds."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in kinds])


@dataclass(frozen=True)
class Recording:
    """One rank."""

    source: str  # the file
    recorder: Recorder
    rank: int | None
    world_size: int | None
    host: str | None  # whose clock it is
    origin_ns: int  # of all times, on that clock
    on_device: bool  # kernels compute, not operators
    lanes: tuple[str, ...]
    names: tuple[str, ...]
    collectives: tuple[Collective, ...]  # each once
    activities: Activities
    ranges: tuple[NamedRange, ...]  # by start
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # about what is missing

    @property
    def on_timeline(self) -> NDArray[np.bool_]:
        """Which activities make up steps: the device's, or on the CPU all."""
        if not self.on_device:
            return np.ones(len(self.activities.start), dtype=bool)
        return self.activities.of("compute", "copy", "pack", "unpack", "collective")

    def ranges_of(self, what: str) -> list[NamedRange]:
        """Ranges ``fastddp.WHAT``, by start."""
        return [range_ for range_ in self.ranges if range_.name is not None and range_.name.what == what]

    def ranges_named(self, start: str) -> list[NamedRange]:
        """Ranges whose text begins like this, by start."""
        return [range_ for range_ in self.ranges if range_.text.startswith(start)]


class Builder:
    """Makes a recording from events in any order, in 60 bytes an activity."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, tuple[int, str]] = {}  # number and name
        self._names: dict[str, int] = {}
        self._kind, self._lane, self._name = array("b"), array("i"), array("i")
        self._start, self._end = array("d"), array("d")
        self._correlation = array("q")
        self._collectives: dict[Collective, int] = {}
        self._facts: dict[int, tuple[int, int, int]] = {}  # of collectives, by activity: about, bytes, sequence
        self._launch_correlation, self._launch_lane, self._launch_time = array("q"), array("i"), array("d")
        self._ranges: list[NamedRange] = []
        self._operator_lane, self._operator_name = array("i"), array("i")
        self._operator_start, self._operator_end = array("d"), array("d")
        self.on_device = False  # set once a device's activity was added

    def lane(self, key: Hashable, name: str) -> int:
        """The number of a thread or stream; the first name it gets stays."""
        return self._lanes.setdefault(key, (len(self._lanes), name))[0]

    def add(
        self,
        kind: Kind,
        lane: int,
        start: float,
        end: float,
        name: str,
        correlation: int = NONE,
        size: int = NONE,
        sequence: int = NONE,
        about: Collective | None = None,
    ) -> None:
        """Add an activity; ``size``: bytes that go into a collective; ``sequence``: its number in its group."""
        if kind == "collective":
            number = self._collectives.setdefault(about or Collective(OTHER), len(self._collectives))
            self._facts[len(self._kind)] = (number, size, sequence)
        self._kind.append(KINDS.index(kind))
        self._lane.append(lane)
        self._start.append(start)
        self._end.append(end)
        self._name.append(self._names.setdefault(name, len(self._names)))
        self._correlation.append(correlation)

    def add_operator(self, lane: int, start: float, end: float, name: str) -> None:
        """Add an operator of a host. It counts if no device computes, and if it is outermost in its thread."""
        self._operator_lane.append(lane)
        self._operator_start.append(start)
        self._operator_end.append(end)
        self._operator_name.append(self._names.setdefault(name, len(self._names)))

    def add_launch(self, correlation: int, lane: int, time: float) -> None:
        """Add the host's call that launched this correlation's activities."""
        self._launch_correlation.append(correlation)
        self._launch_lane.append(lane)
        self._launch_time.append(time)

    def add_range(self, lane: int, start: float, end: float, text: str) -> None:
        """Add a range."""
        self._ranges.append(NamedRange(lane, start, end, text))

    def add_collectives_of_host(self) -> None:
        """Add what only ranges tell: each lasts from its launch to its bucket's next, or until the host has waited."""
        begun: dict[int | None, NamedRange] = {}
        for number, range_ in enumerate(sorted(self._ranges, key=lambda range_: range_.start)):
            name = range_.name
            if name is None or name.bucket is None or name.what not in ("collective", "wait"):
                continue
            if (launch := begun.pop(name.bucket, None)) and (name.what == "wait" or name.collective):
                correlation = NONE - 1 - number  # a device's are positive
                self.add_launch(correlation, launch.lane, launch.start)
                lane = self.lane(("messages", launch.lane), "messages between ranks")
                self.add("collective", lane, launch.start, range_.end, launch.text, correlation)
            if name.what == "collective":
                begun[name.bucket] = range_

    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._kind and not self._ranges and not self._operator_lane

    def finish(
        self,
        source: str,
        recorder: Recorder,
        rank: int | None = None,
        world_size: int | None = None,
        host: str | None = None,
        origin_ns: int = 0,
        notes: Sequence[str] = (),
        warnings: Sequence[str] = (),
    ) -> Recording:
        """The whole recording."""
        self._ranges.sort(key=lambda range_: (range_.start, -range_.end))
        if not self.on_device:
            self._add_outermost_operators()
        self._add_what_hosts_do()
        return Recording(
            source,
            recorder,
            rank,
            world_size,
            host,
            origin_ns,
            self.on_device,
            tuple(name for _, name in self._lanes.values()),
            tuple(self._names),
            tuple(self._collectives),
            self._activities(),
            tuple(self._ranges),
            tuple(notes),
            tuple(warnings),
        )

    def _add_what_hosts_do(self) -> None:
        for range_ in self._ranges:
            kind = _ON_HOST.get(range_.name.what) if range_.name else None
            if range_.text == names.FORWARD:
                kind = "forward"
            if kind in ("pack", "unpack", "compute") and self.on_device:
                continue  # its kernels do it
            if kind is not None:
                self.add(kind, range_.lane, range_.start, range_.end, range_.text)

    def _add_outermost_operators(self) -> None:
        lanes, texts = np.array(self._operator_lane), tuple(self._names)
        starts, ends = np.array(self._operator_start), np.array(self._operator_end)
        for lane in np.unique(lanes):
            own = np.flatnonzero(lanes == lane)
            own = own[np.lexsort((-ends[own], starts[own]))]
            reach = np.maximum.accumulate(np.concatenate([[-np.inf], ends[own][:-1]]))
            for i in own[starts[own] >= reach]:
                self.add("compute", int(lane), float(starts[i]), float(ends[i]), texts[self._operator_name[i]])

    def _activities(self) -> Activities:
        kind = np.array(self._kind, dtype=np.int8)
        lane, name = np.array(self._lane, dtype=np.int64), np.array(self._name, dtype=np.int64)
        start, end = np.array(self._start), np.array(self._end)
        launched, range_ = self._launches(np.array(self._correlation, dtype=np.int64))
        self._label(kind, range_)
        facts = np.full((3, len(kind)), NONE)
        facts[:, list(self._facts)] = np.array(list(self._facts.values()), dtype=np.int64).reshape(-1, 3).T
        return Activities(kind, lane, start, end, name, launched, range_, *facts)

    def _label(self, kind: NDArray[np.int8], ranges: Integers) -> None:
        """Kernels launched in pack and unpack get that kind."""
        compute = kind == KINDS.index("compute")
        for what in ("pack", "unpack"):
            those = [i for i, range_ in enumerate(self._ranges) if range_.name and range_.name.what == what]
            kind[compute & np.isin(ranges, those)] = KINDS.index(what)

    def _launches(self, correlations: Integers) -> tuple[Floats, Integers]:
        """When each activity was launched, and in which range."""
        known = np.array(self._launch_correlation, dtype=np.int64)
        times, lanes = np.array(self._launch_time), np.array(self._launch_lane, dtype=np.int64)
        order = np.argsort(known, kind="stable")
        launched, ranges = np.full(len(correlations), np.nan), np.full(len(correlations), NONE)
        if len(known) == 0:
            return launched, ranges
        place = order[np.minimum(np.searchsorted(known[order], correlations), len(known) - 1)]
        found = (correlations != NONE) & (known[place] == correlations)
        launched[found] = times[place[found]]
        ranges[found] = self._innermost(lanes[place[found]], times[place[found]])
        return launched, ranges

    def _innermost(self, lanes: Integers, times: Floats) -> Integers:
        """The innermost range of fastddp that each lane is in at each time."""
        found = np.full(len(lanes), NONE)
        for lane in np.unique(lanes):
            own = [(i, range_) for i, range_ in enumerate(self._ranges) if range_.lane == lane]
            moments, inside = _changes([(r.start, r.end, i) for i, r in own if r.name and r.name.what not in _ACROSS])
            here = lanes == lane
            found[here] = inside[np.searchsorted(moments, times[here], side="right")]
        return found


def _changes(ranges: list[tuple[float, float, int]]) -> tuple[Floats, Integers]:
    """The moments when the innermost range changes, and its number; ``ranges``: nested (start, end, number), by start.

    The second array is one longer: its element i holds before moment i.
    """
    moments: list[float] = []
    inside = [NONE]
    stack: list[tuple[float, int]] = []

    def close_until(time: float) -> None:
        while stack and stack[-1][0] <= time:
            moments.append(stack.pop()[0])
            inside.append(stack[-1][1] if stack else NONE)

    for start, end, number in ranges:
        close_until(start)
        moments.append(start)
        inside.append(number)
        # Against roundings and damage: a nested range ends within its outer one.
        stack.append((min(end, stack[-1][0]) if stack else end, number))
    close_until(float("inf"))
    return np.array(moments), np.array(inside, dtype=np.int64)
