"""What the device can do at best: a plain copy of much memory, and a large matrix product."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench import harness
from bench.gpu import machine, timing
from bench.gpu.results import Run

_COPY_BYTES = 2**30
_MATRIX = 8192
_WARMUP = 5
_ROUNDS = 30


def copy_gb_per_s(run: Run) -> harness.Percentiles:
    """GB/s of a copy within the device's memory: bytes read plus bytes written."""
    source = timing.random_tensor(_copy_bytes(run) // 4, torch.float32, run.device)
    destination = torch.empty_like(source)
    seconds = _time(run, lambda: destination.copy_(source))
    # The other way round: the slowest tenth of the times are the lowest tenth of the rates.
    return harness.Percentiles.of([2 * source.nbytes / one / 1e9 for one in seconds])


def _copy_bytes(run: Run) -> int:
    return 2**24 if run.quick else _COPY_BYTES


def _time(run: Run, call: Callable[[], object]) -> list[float]:
    """One behind the other without a pause, as far as the device is concerned."""
    for _ in range(_WARMUP):
        call()
    timers = [timing.DeviceTimer(run.device) for _ in range(5 if run.quick else _ROUNDS)]
    for timer in timers:
        timer.start()
        call()
        timer.stop()
    return [timer.seconds() for timer in timers]


def measure(run: Run) -> None:
    """Adds a row for each ceiling, and the state of the GPU under load. Matrices hold normally distributed numbers."""
    _add(run, f"copy of {_copy_bytes(run) / 2**20:g} MiB", "GB/s, read and written", copy_gb_per_s(run))
    size = 1024 if run.quick else _MATRIX
    left, right = (torch.randn(size, size, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    seconds = _time(run, lambda: torch.mm(left, right, out=product))
    multiplied = harness.Percentiles.of([2 * size**3 / one / 1e12 for one in seconds])
    _add(run, f"bf16 matrix product, {size} x {size} x {size}", "TFLOP/s", multiplied)
    for _ in range(200):
        torch.mm(left, right, out=product)
    run.results.add("state", when="under load", **machine.state(run.device))
    torch.accelerator.synchronize(run.device)
    columns = {"what": "{what}", "unit": "{unit}", "median": "{median:.1f}", "p10": "{p10:.1f}", "p90": "{p90:.1f}"}
    run.out.print(harness.row_table("Ceilings", columns.items(), run.results.of_kind("ceiling"), left=2))


def _add(run: Run, what: str, unit: str, rates: harness.Percentiles) -> None:
    run.results.add("ceiling", what=what, unit=unit, median=rates.median, p10=rates.p10, p90=rates.p90)
