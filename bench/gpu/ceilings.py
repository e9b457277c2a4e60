"""What the device can do at best: a plain copy of much memory."""

from __future__ import annotations

import torch

from bench import harness
from bench.gpu import timing
from bench.gpu.results import Run

_COPY_BYTES = 2**30
_WARMUP = 5
_ROUNDS = 30


def copy_gb_per_s(run: Run) -> float:
    """GB/s of copies within the device's memory that follow each other without a pause; adds a row.

    Bytes read plus bytes written.
    """
    source = timing.random_tensor((2**24 if run.quick else _COPY_BYTES) // 4, torch.float32, run.device)
    destination = torch.empty_like(source)
    for _ in range(_WARMUP):
        destination.copy_(source)
    timers = [timing.DeviceTimer(run.device) for _ in range(5 if run.quick else _ROUNDS)]
    for timer in timers:
        timer.start()
        destination.copy_(source)
        timer.stop()
    # The other way round: the slowest tenth of the times are the lowest tenth of the rates.
    rates = harness.Percentiles.of([2 * source.nbytes / timer.seconds() / 1e9 for timer in timers])
    what, unit = f"copy of {source.nbytes / 2**20:g} MiB", "GB/s, read and written"
    run.results.add("ceiling", what=what, unit=unit, median=rates.median, p10=rates.p10, p90=rates.p90)
    return rates.median
