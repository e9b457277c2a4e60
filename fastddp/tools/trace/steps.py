"""Where steps begin and end, on the host and on the device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fastddp.tools.trace.intervals import Floats, Integers
from fastddp.tools.trace.names import FORWARD, PROFILER_STEP
from fastddp.tools.trace.recording import NONE, NamedRange, Recording, TraceError
from fastddp.tools.trace.report import StepMark


@dataclass(frozen=True)
class Steps:
    """Complete steps of one rank; arrays of one length, ms."""

    mark: StepMark
    numbers: tuple[int, ...]  # the profiler's, or counted from 0
    numbered: bool  # by the profiler: the same on all ranks
    host_start: Floats
    host_end: Floats
    start: Floats  # on the device, which lags the host; on the CPU, the host's
    end: Floats
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def length(self) -> Floats:
        """Of each step."""
        return self.end - self.start

    def at_host(self, moment: float) -> int | None:
        """The index of the step that the host was in."""
        (index,) = _places(self.host_start, self.host_end, np.array([moment]))
        return None if index == NONE else int(index)

    def that_launched(self, launched: Floats, start: Floats) -> Integers:
        """Indices of the steps of activities, by launch if known, as one may run in a later step; NONE: none."""
        by_host = _places(self.host_start, self.host_end, launched)
        return np.where(np.isfinite(launched), by_host, _places(self.start, self.end, start))


def _places(starts: Floats, ends: Floats, moments: Floats) -> Integers:
    """The index of the interval (sorted, disjoint) in which each moment lies; NONE: in none."""
    index = np.searchsorted(starts, moments, side="right") - 1
    index[(index >= 0) & ~(moments < ends[index])] = NONE
    return index


class DeviceClock:
    """When a device reaches what the host had launched at some moment; at once, if no device computes.

    Note [The main stream]
    A device's step begins on the stream that computes most. Other streams often run early: a batch copied ahead, on its
    own stream, is launched in one step and runs while the device is in the step before.
    """

    def __init__(self, recording: Recording) -> None:
        activities = recording.activities
        known = np.isfinite(activities.launched) & activities.of("compute", "copy", "pack", "unpack")
        main = known & (activities.lane == _main_stream(recording))
        self._behind = recording.on_device and bool(main.any())
        by_launch = np.flatnonzero(main)[np.argsort(activities.launched[main], kind="stable")]
        self._launched = activities.launched[by_launch]
        self._next_start = np.minimum.accumulate(activities.start[by_launch][::-1])[::-1]
        # fastddp's kernels may wait for collectives on their own streams, so they say nothing about backward.
        computes = (known & activities.of("compute")) | (main & activities.of("copy"))
        backward = np.flatnonzero(computes)[np.argsort(activities.launched[computes], kind="stable")]
        self._backward_launched = activities.launched[backward]
        self._backward_end = np.maximum.accumulate(activities.end[backward])

    def begins(self, moment: float) -> float:
        """The start of the main stream's first activity launched from then on."""
        if not self._behind:
            return moment
        index = int(np.searchsorted(self._launched, moment, side="left"))
        if index < len(self._launched):
            return float(self._next_start[index])
        return max(moment, float(self._backward_end[-1])) if len(self._backward_end) else moment

    def done(self, moment: float) -> float:
        """The end of all computation launched before."""
        index = int(np.searchsorted(self._backward_launched, moment, side="left")) - 1
        return float(self._backward_end[index]) if self._behind and index >= 0 else moment


def _main_stream(recording: Recording) -> int:
    """The lane whose kernels compute for the longest; without any, that of the first copy."""
    activities = recording.activities
    kernels = activities.of("compute") if activities.of("compute").any() else activities.of("copy", "pack", "unpack")
    busy = np.bincount(activities.lane[kernels], weights=activities.end[kernels] - activities.start[kernels])
    return int(busy.argmax()) if busy.size else NONE


def find_steps(recording: Recording, clock: DeviceClock, step_range: str | None = None) -> Steps:
    """Steps by the first of these marks in a trace: ``ProfilerStep#``, ``fastddp.step``, forwards of the wrapper.

    The profiler's steps are the user's. By the other marks, a step lasts from one moment to the next. What lies before
    the first moment and after the last is left out. The user's own ranges come before all marks (``step_range``).
    TraceError: there is no such range.
    """
    if step_range is not None:
        return _own(step_range, recording, clock)
    profiled = {
        int(number): range_
        for range_ in recording.ranges_named(PROFILER_STEP)
        if (number := range_.text.removeprefix(PROFILER_STEP)).isdecimal()
    }
    if profiled:
        return _steps("ProfilerStep#", list(profiled), True, _ends(profiled.values()), clock)
    note = "Steps are counted from one forward of the wrapper to the next; several in a step count each."
    marks: tuple[tuple[StepMark, list[NamedRange], tuple[str, ...]], ...] = (
        ("fastddp.step", recording.ranges_of("step"), ()),
        ("forward", recording.ranges_named(FORWARD), (note,)),
    )
    for mark, ranges, notes in marks:
        moments = [range_.start for range_ in ranges]
        if len(moments) >= 2:
            return _steps(mark, range(len(moments) - 1), False, list(pairwise(moments)), clock, notes)
    return _from_one(recording)


def _own(name: str, recording: Recording, clock: DeviceClock) -> Steps:
    """The user's ranges of this name, which a number may follow: for "train" also "train 12", not "train_model"."""
    whole = re.compile(re.escape(name) + r"[^A-Za-z]*")
    found = [range_ for range_ in recording.ranges if whole.fullmatch(range_.text)]
    if not found:
        raise TraceError(
            f"{recording.source} has no range {name!r}, which --step-range says is a step. Put "
            f'torch.cuda.nvtx.range("{name}") around a step for Nsight Systems, and '
            f'torch.profiler.record_function("{name}") for torch.profiler.'
        )
    (lane, _), *_ = Counter(range_.lane for range_ in found).most_common(1)
    ranges = [range_ for range_ in found if range_.lane == lane]
    counted = [re.findall(r"\d+", range_.text[len(name) :]) for range_ in ranges]
    numbers = [int(number) for one in counted if len(one) == 1 for number in one]
    is_numbered = len(set(numbers)) == len(ranges)
    return _steps("--step-range", numbers if is_numbered else range(len(ranges)), is_numbered, _ends(ranges), clock)


def _ends(ranges: Iterable[NamedRange]) -> list[tuple[float, float]]:
    return [(range_.start, range_.end) for range_ in ranges]


REMEDIES = {
    "torch.profiler": "Record several, and call profile.step().",
    "Nsight Systems": (
        "Record several. Under torch's DDP, nsys profile --pytorch=autograd-nvtx marks them, or "
        "torch.autograd.profiler.emit_nvtx() in the script; --step-range NAME takes a range of the script's own."
    ),
}


def _from_one(recording: Recording) -> Steps:
    """The whole recording as one step."""
    activities, shown = recording.activities, recording.on_timeline
    begun = activities.start[shown].tolist()
    if not recording.on_device or not begun:
        begun += [range_.start for range_ in recording.ranges[:1]]
    begin = min(begun)
    end = float(activities.end[shown].max(initial=begin))
    note = f"The trace marks no second step, so all of it counts as one. {REMEDIES[recording.recorder]}"
    always = np.array([-np.inf]), np.array([np.inf])
    return Steps("nothing", (0,), False, *always, np.array([begin]), np.array([end]), (note,))


def _steps(
    mark: StepMark,
    numbers: Sequence[int],
    numbered: bool,
    on_host: Sequence[tuple[float, float]],
    clock: DeviceClock,
    notes: tuple[str, ...] = (),
) -> Steps:
    host_start, host_end = np.array(on_host, dtype=float).T
    start, end = np.array([[clock.begins(moment) for moment in step] for step in on_host], dtype=float).T
    return Steps(mark, tuple(numbers), numbered, host_start, host_end, start, end, notes)
