"""Time on the device, and caches that are cold when it begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench import harness

# Several times the L2 of any GPU.
_FLUSH_BYTES = 256 * 2**20
# The host's time for a call varies: how much longer than last time the device is kept busy before it.
_HEAD_START = 2.0
_HEAD_START_SECONDS = 1e-4

WARMUP_ROUNDS = 3


class DeviceTimer:
    """The time that the current stream takes from start to stop."""

    def __init__(self, device: torch.device) -> None:
        self._start = torch.Event(device=device, enable_timing=True)
        self._end = torch.Event(device=device, enable_timing=True)

    def start(self) -> None:
        """The time begins when the current stream gets here."""
        self._start.record()

    def stop(self) -> None:
        """It ends when the current stream gets here."""
        self._end.record()

    def started(self) -> bool:
        """Whether the device has got as far as start."""
        return bool(self._start.query())

    def seconds(self) -> float:
        """Waits for the device to get as far as stop."""
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


class CacheFlush:
    """Keeps the device busy, and leaves nothing in its L2 of what was there before.

    It reads: what a write leaves in the cache would have to be written back within the call that is timed next.
    """

    def __init__(self, device: torch.device) -> None:
        self._unrelated = torch.rand(_FLUSH_BYTES // torch.float32.itemsize, device=device)
        self._timer = DeviceTimer(device)
        self._pass_seconds = min(self._time_one_pass() for _ in range(5))

    def _time_one_pass(self) -> float:
        self._timer.start()
        self._unrelated.sum()
        self._timer.stop()
        return max(self._timer.seconds(), 1e-6)

    def __call__(self, seconds: float) -> None:
        """Puts so many seconds of reading on the current stream; at least one pass."""
        for _ in range(max(1, math.ceil(seconds / self._pass_seconds))):
            self._unrelated.sum()


@dataclass
class CallSamples:
    """One contestant's calls: the device's and the host's seconds, and how often the host was ahead."""

    device_seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    ahead: list[bool] = field(default_factory=list)

    @property
    def host_ahead(self) -> float:
        """The share of calls which the host had issued as a whole before the device began with them."""
        return sum(self.ahead) / len(self.ahead)


def time_calls(
    calls: Sequence[Callable[[], object]], rounds: int, flush: CacheFlush, device: torch.device
) -> list[CallSamples]:
    """Times each call once a round, in an order that changes from round to round, with cold caches.

    The device reads unrelated memory before each call, for longer than the host takes to issue it: otherwise a call
    that is many launches, or one after much work in Python, would be measured at the speed of the host.
    """
    samples = [CallSamples() for _ in calls]
    timer = DeviceTimer(device)
    host_seconds = [0.0] * len(calls)
    for _, number, index in harness.turns(len(calls), range(-WARMUP_ROUNDS, rounds)):
        torch.accelerator.synchronize(device)
        flush(_HEAD_START * host_seconds[index] + _HEAD_START_SECONDS)
        timer.start()
        begin = time.perf_counter()
        calls[index]()
        host_seconds[index] = time.perf_counter() - begin
        ahead = not timer.started()
        timer.stop()
        seconds = timer.seconds()
        if number >= 0:
            samples[index].device_seconds.append(seconds)
            samples[index].host_seconds.append(host_seconds[index])
            samples[index].ahead.append(ahead)
    return samples


def random_tensor(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Never zeros: some devices move and multiply those faster."""
    return torch.empty(elements, device=device).uniform_(1, 2).to(dtype)
