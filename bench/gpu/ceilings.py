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


def copy_gb_per_s(device: torch.device, rounds: int = _ROUNDS, copy_bytes: int = _COPY_BYTES) -> harness.Percentiles:
    """GB/s of a copy within the device's memory: bytes read plus bytes written."""
    source = timing.random_tensor(copy_bytes // 4, torch.float32, device)
    destination = torch.empty_like(source)
    seconds = _time(lambda: destination.copy_(source), rounds, device)
    # The other way round: the slowest tenth of the times are the lowest tenth of the rates.
    return harness.Percentiles.of([2 * copy_bytes / one / 1e9 for one in seconds])


def matmul_tflops(device: torch.device, rounds: int = _ROUNDS, size: int = _MATRIX) -> harness.Percentiles:
    """TFLOP/s of a square matrix product in bf16, of normally distributed numbers."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    seconds = _time(lambda: torch.mm(left, right, out=product), rounds, device)
    return harness.Percentiles.of([2 * size**3 / one / 1e12 for one in seconds])


def _time(call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """One behind the other without a pause, as far as the device is concerned."""
    for _ in range(_WARMUP):
        call()
    timers = [timing.DeviceTimer(device) for _ in range(rounds)]
    for timer in timers:
        timer.start()
        call()
        timer.stop()
    return [timer.seconds() for timer in timers]


def measure(run: Run) -> None:
    """Adds a row for each ceiling, and the state of the GPU under load."""
    rounds = 5 if run.quick else _ROUNDS
    size = 1024 if run.quick else _MATRIX
    copy_bytes = 2**24 if run.quick else _COPY_BYTES
    copied = copy_gb_per_s(run.device, rounds, copy_bytes)
    _add(run, f"copy of {copy_bytes / 2**20:g} MiB", "GB/s, read and written", copied)
    multiplied = matmul_tflops(run.device, rounds, size)
    _add(run, f"bf16 matrix product, {size} x {size} x {size}", "TFLOP/s", multiplied)

    left = torch.randn(size, size, device=run.device, dtype=torch.bfloat16)
    for _ in range(200):
        left @ left
    run.results.add("state", when="under load", **machine.state(run.device))
    torch.accelerator.synchronize(run.device)
    run.out.print(ceilings_table(run.results.of_kind("ceiling")))


def _add(run: Run, what: str, unit: str, rates: harness.Percentiles) -> None:
    run.results.add("ceiling", what=what, unit=unit, median=rates.median, p10=rates.p10, p90=rates.p90)


def ceilings_table(rows: list[harness.Row]) -> object:
    cells = [[row["what"], row["unit"], *(f"{row[column]:.1f}" for column in ("median", "p10", "p90"))] for row in rows]
    return harness.table("Ceilings", ["what", "unit", "median", "p10", "p90"], cells, left=2)
