"""Pure functions that choose each bucket's exchange by times and errors.

The model is that of :mod:`fastddp.planning.model`: exchanges run one after the other. A bucket's exchange starts when
its last gradient is ready and the exchange before has ended. Times are seconds from the beginning of the step.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastddp.errors import see

LEAST_GAIN = 0.03
"""The part of a step that compression must gain. Predictions are no finer than this."""
SLACK = 0.01
"""The part of the step with the cheapest choice that is given up for more exact buckets."""
NOISE = 0.03
"""Steps count as slower only if they are slower by more than this part."""

PLAIN = "plain"
_POWERSGD = re.compile(r"powersgd([1-9]|[12]\d|3[0-2])")
_ERRORS = {PLAIN: 0.0, "bf16": 2.0**-8, "int8": 1 / 254, "fp8": 1 / 28}
_UNBOUNDED = 1.0
NAMES = f"{', '.join(map(repr, _ERRORS))} or 'powersgdN' with N vectors, 1 to 32"


def error_of(candidate: str) -> float:
    """By how much one rounding may change a value, as a part of the largest magnitude beside it.

    For 8-bit numbers that is the largest in the block; for bf16, the number itself. PowerSGD has no such bound: its
    factors may leave out all of a value, which then comes in later steps.

    Raises:
        ValueError: there is no candidate of this name.

    >>> error_of("plain"), error_of("bf16"), error_of("powersgd4")
    (0.0, 0.00390625, 1.0)
    """
    if candidate in _ERRORS:
        return _ERRORS[candidate]
    if vectors_of(candidate) is None:
        raise ValueError(f"There is no candidate {candidate!r}: candidates are {NAMES}." + see("FD024"))
    return _UNBOUNDED


def vectors_of(candidate: str) -> int | None:
    """PowerSGD's rank; None: the candidate is not PowerSGD."""
    found = _POWERSGD.fullmatch(candidate)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Cost:
    """The time of one bucket's exchange, from encoding to decoding."""

    latency: float
    """Seconds, whatever travels."""
    per_element: float
    """Seconds."""

    def seconds(self, elements: int) -> float:
        """For a bucket of so many elements."""
        return self.latency + elements * self.per_element


def cost_of(sizes: Sequence[int], samples: Sequence[Sequence[float]]) -> Cost:
    """The line through the medians of two sizes, but neither latency nor slope is negative.

    The line always meets the larger size, since large sizes make up a step's time.

    >>> cost_of([10, 110], [[1.0, 2.0, 9.0], [4.0, 4.0, 4.0]])
    Cost(latency=1.8, per_element=0.02)
    """
    (small, large), (less, more) = sizes, [statistics.median(seconds) for seconds in samples]
    per_element = min(max((more - less) / (large - small), 0.0), more / large)
    return Cost(more - per_element * large, per_element)


@dataclass(frozen=True)
class Load:
    """A bucket, as the choice sees it."""

    ready: float
    """When its last gradient is final on the last rank."""
    seconds: Mapping[str, float]
    """What its exchange takes, for each candidate that may carry the bucket; plain is one of them."""


@dataclass(frozen=True)
class Choice:
    """The candidate chosen for each bucket, and the predicted times."""

    of_buckets: tuple[str, ...]
    end: float
    """When the last exchange ends."""
    plain_end: float
    """When it would end if nothing were compressed."""

    @property
    def gain(self) -> float:
        """The time gained, as a part of the step without compression."""
        return (self.plain_end - self.end) / self.plain_end if self.plain_end > 0 else 0.0

    @property
    def compresses(self) -> bool:
        """Whether any bucket is compressed."""
        return any(name != PLAIN for name in self.of_buckets)


def end_of(loads: Sequence[Load], of_buckets: Sequence[str]) -> float:
    """When the last exchange ends."""
    end = 0.0
    for load, name in zip(loads, of_buckets, strict=True):
        end = max(end, load.ready) + load.seconds[name]
    return end


def behind_backward(loads: Sequence[Load]) -> list[Load]:
    """The loads as if nothing could be hidden behind backward: every bucket is ready when the last one is.

    >>> behind_backward([Load(1.0, {"plain": 0.1}), Load(2.0, {"plain": 0.3})])[0]
    Load(ready=2.0, seconds={'plain': 0.1})
    """
    last = max((load.ready for load in loads), default=0.0)
    return [dataclasses.replace(load, ready=last) for load in loads]


def allowed(candidates: Sequence[str], error_budget: float) -> list[str]:
    """The candidates within the budget, and plain, the most exact first."""
    return sorted({name for name in candidates if error_of(name) <= error_budget} | {PLAIN}, key=_by_error)


def _by_error(candidate: str) -> tuple[float, int]:
    return error_of(candidate), -(vectors_of(candidate) or 0)


def choose(loads: Sequence[Load]) -> Choice:
    """For each bucket the cheapest candidate that is of use.

    The cheapest candidate for every bucket ends the step first, since a later end of one exchange never leads to an
    earlier end of the next. But a bucket that is hidden behind backward need not be compressed. So each bucket, from
    the first on, gets the most exact candidate with which the step ends no later, within :data:`SLACK`. If all this
    gains less than :data:`LEAST_GAIN` of the step, nothing is compressed.
    """
    plain = [PLAIN for _ in loads]
    plain_end = end_of(loads, plain)
    chosen = [min(load.seconds, key=lambda name: (load.seconds[name], _by_error(name))) for load in loads]
    latest = end_of(loads, chosen) * (1 + SLACK)
    for bucket, load in enumerate(loads):
        for name in sorted(load.seconds, key=_by_error):
            tried = [*chosen[:bucket], name, *chosen[bucket + 1 :]]
            if _by_error(name) < _by_error(chosen[bucket]) and end_of(loads, tried) <= latest:
                chosen = tried
                break
    choice = Choice(tuple(chosen), end_of(loads, chosen), plain_end)
    return choice if choice.gain >= LEAST_GAIN else Choice(tuple(plain), plain_end, plain_end)


def is_slower(after: float, before: float) -> bool:
    """Whether steps of ``after`` seconds are slower than those of ``before``, by more than noise."""
    return after > before * (1 + NOISE)


def median(values: Sequence[float]) -> float:
    """The median of the values that are not NaN; -1 if there are none."""
    return statistics.median([value for value in values if not math.isnan(value)] or [-1.0])
