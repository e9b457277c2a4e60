"""The times in the logging data of torch's DDP, for the steps that torch's logger samples, on the CPU."""

from __future__ import annotations

import math
import time

from fastddp._C import StepTimes

_FIRST = 10
_DEFAULT_RATE = 100
_INTERVALS = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)
_MOMENTS = (
    "forward_compute_time_start",
    "backward_compute_time_start",
    "backward_comm_time_start",
    "backward_compute_time_end",
    "backward_comm_time_end",
)
_NS = 1e6  # in a ms


class LoggedTimes:
    """Which steps are sampled (each of the first ten, then every ``rate``-th), and their times."""

    def __init__(self) -> None:
        self.rate = _DEFAULT_RATE
        self.samples = 0
        self._forward_began = self._forward_ended = 0  # ns since 1970, of the step that runs
        self._stamps = (0, 0)  # of the step before
        self._timed = 0  # samples that had times
        self._last: tuple[float, float] | None = None  # identifies the last one
        self._values: dict[str, int] = dict.fromkeys(
            (*_INTERVALS, *(f"avg_{name}" for name in _INTERVALS), *_MOMENTS), 0
        )

    def samples_after(self, steps: int) -> bool:
        """Whether step number ``steps``, counted from 1, is sampled."""
        return 0 < steps <= _FIRST or (steps > 0 and steps % self.rate == 0)

    def step_begins(self) -> None:
        """The next forward is the first one of a step."""
        self._stamps = (self._forward_began, self._forward_ended)
        self._forward_began = 0

    def forward_runs(self) -> None:
        """A forward has begun, for the reducer first. Else gradients could seem to come before it ends."""
        self._forward_began = self._forward_began or time.time_ns()

    def forward_ends(self) -> None:
        """The last forward of a step ends now; its backward follows."""
        self._forward_ended = time.time_ns()

    def add(self, times: StepTimes | None) -> None:
        """Count the step before the current one; ``times`` are the newest ones, which may be older."""
        self.samples += 1
        self._values.update(dict.fromkeys((*_INTERVALS, *_MOMENTS), 0))
        if times is None or (times.computed, times.end) == self._last:
            return
        self._last = (times.computed, times.end)
        began, backward = self._stamps
        computed = began + round(times.computed * _NS)
        starts = [bucket.start for bucket in times.buckets if not math.isnan(bucket.start)]
        ends = [bucket.end for bucket in times.buckets if not math.isnan(bucket.end)]
        if not starts or not ends:
            return
        sent, received = began + round(min(starts) * _NS), began + round(max(ends) * _NS)
        self._timed += 1
        moments = (began, backward, sent, computed, received)
        intervals = (backward - began, computed - backward, received - sent, max(0, computed - sent))
        self._values.update(zip(_MOMENTS, moments, strict=True))
        for name, interval in zip(_INTERVALS, intervals, strict=True):
            before = self._values[f"avg_{name}"]
            self._values[name] = interval
            self._values[f"avg_{name}"] = (interval + before * (self._timed - 1)) // self._timed

    def as_dict(self) -> dict[str, int]:
        """In ns (moments: since 1970), under torch's names; 0: not known."""
        return dict(self._values)
