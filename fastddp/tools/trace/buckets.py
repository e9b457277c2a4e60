"""When each bucket of a rank was ready, travelled, and held the step up."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastddp.tools.trace.collectives import ALL_REDUCE
from fastddp.tools.trace.intervals import Floats, Integers, length_between, open_between, union
from fastddp.tools.trace.names import FORWARD, OF_NO_BUCKET, PREFIX, Name
from fastddp.tools.trace.recording import NONE, Recording
from fastddp.tools.trace.report import Wrapper
from fastddp.tools.trace.steps import DeviceClock, Steps

SHARED = (
    "A step holds buckets of several wrappers, which have the same numbers: the times of a bucket are those of the one "
    "that is ready last in a step, and what is exposed is that of all of them."
)
SEVERAL = (
    "A step holds several windows, in each of which buckets travel: the times of a bucket are those of the last one in "
    "a step, and what is exposed is that of all of them."
)
GUESSED = (
    "Buckets of torch's DDP have no names in a trace: they are guessed from the order of the allreduces of a step, and "
    "other allreduces of the script would be counted as buckets."
)


@dataclass(frozen=True)
class Runs:
    """Collectives of one rank, in the order of their starts; arrays of one length."""

    activity: Integers  # index into the recording's activities
    start: Floats
    end: Floats
    step: Integers  # NONE: none
    bucket: Integers  # NONE: none's
    kind: Integers  # index into kinds
    kinds: tuple[str, ...]
    bytes: Integers  # NONE: unknown
    launched: Floats  # NaN: unknown


@dataclass(frozen=True)
class BucketTimes:
    """Arrays of shape (steps, buckets), ms on the recording's clock; NaN: not in this step."""

    start: Floats  # of the first of the bucket's collectives
    end: Floats  # of the last
    ready: Floats  # when the last of its gradients came
    half: Floats  # when half of its gradients had come
    exposed: Floats  # ms in which it travels and nothing computes, divided among all buckets and kinds that travel
    exposed_kinds: Floats  # (steps, kinds): the same, of other collectives
    last_parameter: NDArray[np.object_]  # str | None


def wrapper_of(recording: Recording) -> Wrapper:
    """Whose buckets these are."""
    if any(range_.name is not None for range_ in recording.ranges):
        return "fastddp"
    return "torch DDP" if recording.ranges_named(FORWARD) else "unknown"


def runs_of(recording: Recording, steps: Steps) -> Runs:
    """All collectives, by bucket."""
    activities = recording.activities
    chosen = np.flatnonzero(activities.of("collective"))
    chosen = chosen[np.argsort(activities.start[chosen], kind="stable")]
    start, end = activities.start[chosen], activities.end[chosen]
    launched, noted = activities.launched[chosen], activities.bytes[chosen]
    step = steps.that_launched(launched if recording.on_device else np.full(len(chosen), np.nan), start)
    names = [*(range_.name for range_ in recording.ranges), None]  # the last for NONE
    launchers = [names[place] for place in activities.range[chosen]]
    operations = [recording.collectives[about].operation for about in activities.about[chosen]]
    if wrapper_of(recording) == "torch DDP":
        counts = np.array([one == ALL_REDUCE for one in operations], dtype=bool)
        bucket = np.full(len(step), NONE)
        for number in np.unique(step[step != NONE]):
            own = np.flatnonzero((step == number) & counts)
            bucket[own] = np.arange(len(own))
    else:
        bucket = np.array([_bucket(name) for name in launchers], dtype=np.int64)
        bucket[bucket >= _number_of_buckets(recording)] = NONE  # PowerSGD's last tick, after all buckets
    of_kind = [
        PREFIX + name.what if name is not None and PREFIX + name.what in OF_NO_BUCKET else operation
        for name, operation in zip(launchers, operations, strict=True)
    ]
    kinds = tuple(dict.fromkeys(of_kind))
    kind = np.array([kinds.index(one) for one in of_kind], dtype=np.int64)
    named = np.array([NONE if name is None or name.bytes is None else name.bytes for name in launchers], dtype=np.int64)
    return Runs(chosen, start, end, step, bucket, kind, kinds, np.where(noted == NONE, named, noted), launched)


def _bucket(name: Name | None) -> int:
    """The bucket whose collective is launched there. PowerSGD's of tick k count as bucket k's."""
    if name is None or name.what != "collective":
        return NONE
    found = name.tick if name.bucket is None else name.bucket
    return NONE if found is None else found


def _number_of_buckets(recording: Recording) -> int:
    named = [range_.name for range_ in recording.ranges if range_.name and range_.name.bucket is not None]
    # Names of gradients do not say how many buckets there are. Names that do are preferred.
    named = [name for name in named if name.of is not None] or named
    return max((name.bucket for name in named if name.bucket is not None), default=NONE) + 1


def note_on_windows(recording: Recording, steps: Steps) -> str | None:
    """What to say if buckets travel more than once in a step."""
    several: set[int] = set()
    shared: set[int] = set()  # one number, other parameters; so may be one step, in which buckets are rebuilt
    for (step, _), ready in _readies(recording, steps).items():
        if len(ready) > 1:
            several.add(step)
        if len({(name.first, name.last) for _, name in ready}) > 1:
            shared.add(step)
    if len(shared) > 1 or len(shared) == len(steps) == 1:
        return SHARED
    return SEVERAL if several else None


def _readies(recording: Recording, steps: Steps) -> dict[tuple[int, int], list[tuple[float, Name]]]:
    """By step and bucket: when it was ready, on the host, in the order of time."""
    found: defaultdict[tuple[int, int], list[tuple[float, Name]]] = defaultdict(list)
    for range_ in recording.ranges_of("ready"):
        name, step = range_.name, steps.at_host(range_.start)
        if name is not None and name.bucket is not None and step is not None:
            found[step, name.bucket].append((range_.start, name))
    return found


def bucket_times(recording: Recording, steps: Steps, clock: DeviceClock, runs: Runs, compute: Floats) -> BucketTimes:
    """For all steps and buckets."""
    count = max(_number_of_buckets(recording), int(runs.bucket.max(initial=NONE)) + 1)
    shape = (len(steps), count)
    start, end = np.full(shape, np.nan), np.full(shape, np.nan)
    belongs = np.flatnonzero((runs.step != NONE) & (runs.bucket != NONE))
    first_launch = np.full(shape, np.nan)
    # If a bucket is ready more than once, only launches in the last window count.
    last = {place: ready[-1][0] for place, ready in _readies(recording, steps).items() if len(ready) > 1}
    for i in belongs:
        place = int(runs.step[i]), int(runs.bucket[i])
        if runs.launched[i] < last.get(place, -np.inf):
            continue
        start[place] = np.fmin(start[place], runs.start[i])
        end[place] = np.fmax(end[place], runs.end[i])
        first_launch[place] = np.fmin(first_launch[place], runs.launched[i])
    ready, half, last_parameter = _arrivals(recording, steps, clock, shape)
    _complete(ready, half, first_launch, clock)
    return BucketTimes(start, end, ready, half, *_exposed(runs, steps, compute, shape), last_parameter)


def _complete(ready: Floats, half: Floats, first_launch: Floats, clock: DeviceClock) -> None:
    """Fill in times that no name tells: a bucket leaves with its last gradient, and its gradients come evenly."""
    for place in np.argwhere(np.isnan(ready) & np.isfinite(first_launch)):
        ready[tuple(place)] = clock.done(float(first_launch[tuple(place)]))
    for step, bucket in np.argwhere(np.isnan(half) & np.isfinite(ready)):
        earlier = ready[step][ready[step] < ready[step, bucket]]
        if earlier.size:
            half[step, bucket] = (earlier.max() + ready[step, bucket]) / 2


def _arrivals(
    recording: Recording, steps: Steps, clock: DeviceClock, shape: tuple[int, int]
) -> tuple[Floats, Floats, NDArray[np.object_]]:
    ready, half = np.full(shape, np.nan), np.full(shape, np.nan)
    last_parameter = np.full(shape, None, dtype=object)
    came: defaultdict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for range_ in recording.ranges:
        name, step = range_.name, steps.at_host(range_.start)
        if name is None or name.bucket is None or step is None or name.bucket >= shape[1]:
            continue
        place = (step, name.bucket)
        if name.what == "gradient" and name.parameter is not None:
            came[place].pop(name.parameter, None)  # the last one counts, in the order in which they come
            came[place][name.parameter] = range_.start
        elif name.what == "ready":
            ready[place] = clock.done(range_.start)
            if came[place]:
                last_parameter[place] = next(reversed(came[place]))
                half[place] = clock.done([*came[place].values()][(len(came[place]) - 1) // 2])
    return ready, half, last_parameter


def _exposed(runs: Runs, steps: Steps, compute: Floats, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """Exposed times of buckets, and of the kinds of other collectives."""
    exposed = np.zeros((shape[0], shape[1] + len(runs.kinds)))
    owner = np.where(runs.bucket == NONE, shape[1] + runs.kind, runs.bucket)
    owners = np.unique(owner)
    sets = [union(runs.start[owner == one], runs.end[owner == one]) for one in owners]
    if sets:
        travels = np.concatenate(sets)
        whose = np.repeat(owners, [len(intervals) for intervals in sets])
        moments, travelling = open_between(travels, np.concatenate([steps.start, steps.end]))
        alone = np.diff(moments) - length_between(compute, moments[:-1], moments[1:])
        each = np.concatenate([[0.0], np.cumsum(np.maximum(alone, 0.0) / np.maximum(travelling, 1))])
        for step, edges in enumerate(zip(steps.start, steps.end, strict=True)):
            shares = np.diff(each[np.searchsorted(moments, np.clip(travels, *edges))])[:, 0]
            np.add.at(exposed[step], whose, shares)
    return exposed[:, : shape[1]], exposed[:, shape[1] :]


def facts_of(recording: Recording) -> dict[int, Name]:
    """What fastddp's names say of each bucket: the most frequent name, because buckets may be rebuilt meanwhile."""
    found: defaultdict[int, Counter[Name]] = defaultdict(Counter)
    for range_ in recording.ranges_of("ready"):
        if range_.name is not None and range_.name.bucket is not None:
            found[range_.name.bucket][range_.name] += 1
    return {bucket: names.most_common(1)[0][0] for bucket, names in found.items()}
