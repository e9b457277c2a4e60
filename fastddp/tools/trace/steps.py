"""Where steps begin and end, on the host and on the device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
        (index,) = _places(self.host_start, self.host_end, np.array([moment]))
        return None if index == NONE else int(index)

    def that_launched(self, launched: Floats, start: Floats) -> Integers:
        """Indices of the steps that activities belong to; NONE: none.

        A collective runs when its turn comes, maybe in a later step: where it is known when the host launched it, that
        decides.
        """
        by_host = _places(self.host_start, self.host_end, launched)
        return np.where(np.isfinite(launched), by_host, _places(self.start, self.end, start))


def _places(starts: Floats, ends: Floats, moments: Floats) -> Integers:
    """Of disjoint intervals in their order, the index of that in which each moment lies; NONE: in none."""
    index = np.searchsorted(starts, moments, side="right") - 1
    index[(index >= 0) & ~(moments < ends[index])] = NONE
    return index


class DeviceClock:
    """When a device comes to what a host had launched until some moment. Where no device computes: at once.

    Note [The main stream]
    A device's step begins on the stream that computes most. What other streams run is often early: a batch that is
    copied ahead, on a stream of its own, is launched in one step and runs while the device is in the step before.
    """

    def __init__(self, recording: Recording) -> None:
        activities = recording.activities
        known = np.isfinite(activities.launched) & activities.of("compute", "copy", "pack", "unpack")
        main = known & (activities.lane == _main_stream(recording))
        self._behind = recording.on_device and bool(main.any())
        by_launch = np.flatnonzero(main)[np.argsort(activities.launched[main], kind="stable")]
        self._launched = activities.launched[by_launch]
        self._next_start = _suffix_minimum(activities.start[by_launch])
        # Kernels of fastddp's may wait for collectives on streams of their own: they say nothing about backward.
        computes = (known & activities.of("compute")) | (main & activities.of("copy"))
        backward = np.flatnonzero(computes)[np.argsort(activities.launched[computes], kind="stable")]
        self._backward_launched = activities.launched[backward]
        self._backward_end = np.maximum.accumulate(activities.end[backward])

    def begins(self, moment: float) -> float:
        """The first activity of the main stream that was launched from then on."""
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


def _main_stream(recording: Recording) -> int:
    """The lane whose kernels compute for the longest; without any, that of the first copy."""
    activities = recording.activities
    kernels = activities.of("compute") if activities.of("compute").any() else activities.of("copy", "pack", "unpack")
    busy = np.bincount(activities.lane[kernels], weights=activities.end[kernels] - activities.start[kernels])
    return int(busy.argmax()) if busy.size else NONE


def _suffix_minimum(values: Floats) -> Floats:
    return np.minimum.accumulate(values[::-1])[::-1]


def find_steps(recording: Recording, clock: DeviceClock, step_range: str | None = None) -> Steps:
    """Steps by the first that a trace has: ``ProfilerStep#``, ``fastddp.step``, forwards of the wrapper.

    The profiler's are what the user calls a step. Of the others, a moment is the beginning of a step that ends at the
    next; what lies before the first and behind the last is left out.

    Args:
        recording: one rank's.
        clock: of its device.
        step_range: what names of the user's own ranges begin with that are steps; they are believed before all others.

    Raises:
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
        return _ranged("ProfilerStep#", tuple(profiled), True, tuple(profiled.values()), clock)
    openings = [range_.start for range_ in recording.ranges_of("step")]
    if len(openings) >= 2:
        return _between("fastddp.step", openings, clock)
    forwards = [range_.start for range_ in recording.ranges_named(FORWARD)]
    if len(forwards) >= 2:
        note = "Steps are counted from one forward of the wrapper to the next; several in a step count each."
        return _between("forward", forwards, clock, (note,))
    return _from_one(recording)


def _between(mark: StepMark, openings: list[float], clock: DeviceClock, notes: tuple[str, ...] = ()) -> Steps:
    return _steps(mark, range(len(openings) - 1), False, openings[:-1], openings[1:], clock, notes)


def _own(name: str, recording: Recording, clock: DeviceClock) -> Steps:
    """The user's ranges of this name, which may go on with a number: of "train", "train 12", and no "train_model"."""
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
    return _ranged("--step-range", numbers if is_numbered else range(len(ranges)), is_numbered, ranges, clock)


def _ranged(
    mark: StepMark, numbers: Sequence[int], numbered: bool, ranges: Sequence[NamedRange], clock: DeviceClock
) -> Steps:
    starts, ends = [range_.start for range_ in ranges], [range_.end for range_ in ranges]
    return _steps(mark, numbers, numbered, starts, ends, clock)


REMEDIES = {
    "torch.profiler": "Record several, and call profile.step().",
    "Nsight Systems": (
        "Record several. Under torch's DDP, nsys profile --pytorch=autograd-nvtx marks them, or "
        "torch.autograd.profiler.emit_nvtx() in the script; --step-range NAME takes a range of the script's own."
    ),
}


def _from_one(recording: Recording) -> Steps:
    """All that was recorded, whichever step it is of."""
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
    starts: Sequence[float],
    ends: Sequence[float],
    clock: DeviceClock,
    notes: tuple[str, ...] = (),
) -> Steps:
    begin = np.array([clock.begins(moment) for moment in starts], dtype=float)
    end = np.array([clock.begins(moment) for moment in ends], dtype=float)
    return Steps(mark, tuple(numbers), numbered, np.array(starts), np.array(ends), begin, end, notes)
