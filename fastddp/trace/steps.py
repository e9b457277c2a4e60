"""Where steps begin and end, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastddp.trace.intervals import Floats
from fastddp.trace.names import FORWARD, PROFILER_STEP
from fastddp.trace.recording import Recording
from fastddp.trace.report import StepMark


@dataclass(frozen=True)
class Steps:
    """Complete steps of one rank; arrays of one length, ms."""

    mark: StepMark
    numbers: tuple[int, ...]  # the profiler's, or counted from 0
    numbered: bool  # by the profiler: the same on all ranks
    host_start: Floats
    host_end: Floats
    start: Floats  # on the device, which runs behind the host; on the CPU, the host's
    end: Floats
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def length(self) -> Floats:
        """Of each."""
        return self.end - self.start

    def at_host(self, moment: float) -> int | None:
        """The index of the step that the host was in."""
        return _place(self.host_start, self.host_end, moment)


def _place(starts: Floats, ends: Floats, moment: float) -> int | None:
    index = int(np.searchsorted(starts, moment, side="right")) - 1
    return index if index >= 0 and moment < ends[index] else None


class DeviceClock:
    """When a device comes to what a host had launched until some moment. Where no device computes: at once."""

    def __init__(self, recording: Recording) -> None:
        activities = recording.activities
        known = np.isfinite(activities.launched) & activities.of("compute", "copy", "pack", "unpack")
        self._behind = recording.on_device and bool(known.any())
        by_launch = np.flatnonzero(known)[np.argsort(activities.launched[known], kind="stable")]
        self._launched = activities.launched[by_launch]
        self._next_start = _suffix_minimum(activities.start[by_launch])
        # Kernels of fastddp's may wait for collectives on streams of their own: they say nothing about backward.
        backward = by_launch[activities.of("compute", "copy")[by_launch]]
        self._backward_launched = activities.launched[backward]
        self._backward_end = np.maximum.accumulate(activities.end[backward])

    def begins(self, moment: float) -> float:
        """The first activity that was launched from then on."""
        if not self._behind:
            return moment
        index = int(np.searchsorted(self._launched, moment, side="left"))
        if index < len(self._launched):
            return float(self._next_start[index])
        return max(moment, float(self._backward_end[-1])) if len(self._backward_end) else moment

    def done(self, moment: float) -> float:
        """The end of all computation that was launched before."""
        index = int(np.searchsorted(self._backward_launched, moment, side="left")) - 1
        return float(self._backward_end[index]) if self._behind and index >= 0 else moment


def _suffix_minimum(values: Floats) -> Floats:
    return np.minimum.accumulate(values[::-1])[::-1]


def find_steps(recording: Recording, clock: DeviceClock) -> Steps:
    """Steps by the first that a trace has: ``ProfilerStep#``, ``fastddp.step``, forwards of the wrapper.

    The profiler's are what the user calls a step. Of the others, a moment is the beginning of a step that ends at the
    next; what lies before the first and behind the last is left out.
    """
    profiled = [
        (int(number), range_.start, range_.end)
        for range_ in recording.ranges_named(PROFILER_STEP)
        if (number := range_.text.removeprefix(PROFILER_STEP)).isdecimal()
    ]
    if profiled:
        return _profiled(profiled, clock)
    openings = [range_.start for range_ in recording.ranges_of("step")]
    if len(openings) >= 2:
        return _between("fastddp.step", openings, clock)
    forwards = [range_.start for range_ in recording.ranges_named(FORWARD)]
    if len(forwards) >= 2:
        note = "Steps are counted from one forward of the wrapper to the next; several in a step count each."
        return _between("forward", forwards, clock, (note,))
    begun = [range_.start for range_ in recording.ranges[:1]] + recording.activities.start.tolist()
    opening = min([*openings, *forwards] or begun)
    return _from_one(opening, recording, clock)


def _between(mark: StepMark, openings: list[float], clock: DeviceClock, notes: tuple[str, ...] = ()) -> Steps:
    return _steps(mark, range(len(openings) - 1), False, openings[:-1], openings[1:], clock, notes)


def _profiled(ranges: list[tuple[int, float, float]], clock: DeviceClock) -> Steps:
    numbers, starts, ends = zip(*ranges, strict=True)
    return _steps("ProfilerStep#", numbers, True, starts, ends, clock)


def _from_one(opening: float, recording: Recording, clock: DeviceClock) -> Steps:
    last = float(recording.activities.end.max(initial=opening))
    begin = np.array([clock.begins(opening)])
    note = "The trace marks no second step, so all of it counts as one. Record several, and call profile.step()."
    return Steps("nothing", (0,), False, np.array([opening]), np.array([last]), begin, np.array([last]), (note,))


def _steps(
    mark: StepMark,
    numbers: Sequence[int],
    numbered: bool,
    starts: Sequence[float],
    ends: Sequence[float],
    clock: DeviceClock,
    notes: tuple[str, ...] = (),
) -> Steps:
    begin = np.array([clock.begins(moment) for moment in starts], dtype=float)
    end = np.array([clock.begins(moment) for moment in ends], dtype=float)
    return Steps(mark, tuple(numbers), numbered, np.array(starts), np.array(ends), begin, end, notes)
