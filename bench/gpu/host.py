"""What each gradient costs the host: a backward of very many tiny gradients, where the host is the limit.

The host's time is that of `loss.backward()` from call to return, with the device idle before. Nothing in it waits for
the device. What a DDP adds to the plain model's time, divided by the number of gradients, is its cost of one of them:
its hook, its share of the pack and of the collective's start. `drain_us` is what the device still has to do when
backward returns; as long as it is small against the time itself, the device kept up and was not waited for.
"""

from __future__ import annotations

import gc
import statistics
import time

import torch

from bench import harness
from bench.cases import CASES, Batch
from bench.gpu import timing
from bench.gpu.contestants import GpuStep, Mode, modes
from bench.gpu.results import Run

_CASE = "500x32sq"
_WARMUP = 6


def measure(run: Run) -> None:
    """Adds a row for each mode."""
    case = next(case for case in CASES if case.name == _CASE)
    model, batch_of = case.build(run.device)
    gradients = len(list(model.parameters()))
    contestants = modes()
    steps = [mode.prepare(model) for mode in contestants]
    rounds = len(steps) * (1 if run.quick else 4)
    issued: list[list[float]] = [[] for _ in steps]
    drained: list[list[float]] = [[] for _ in steps]
    with timing.no_collection():
        for round_index in range(-_WARMUP, rounds):
            batch = batch_of(0, round_index)
            for index in harness.round_order(len(steps), max(round_index, 0)):
                seconds, rest = time_backward(steps[index], batch, run.device)
                if round_index >= 0:
                    issued[index].append(seconds)
                    drained[index].append(rest)
            gc.collect()
    samples = dict(zip((mode.name for mode in contestants), issued, strict=True))
    for mode, rests in zip(contestants, drained, strict=True):
        _add(run, mode, samples, rests, gradients)
    run.out.print(host_table(run.results.of_kind("host")))


def time_backward(step: GpuStep, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Seconds from the call of backward to its return, and from there until the device is idle."""
    step.clear()
    loss = step.module(*batch)
    torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    loss.backward()
    returned = time.perf_counter()
    torch.accelerator.synchronize(device)
    return returned - begin, time.perf_counter() - returned


def _add(run: Run, mode: Mode, samples: dict[str, list[float]], drained: list[float], gradients: int) -> None:
    own, plain = samples[mode.name], samples[mode.plain]
    percentiles = harness.Percentiles.of(own)
    added = statistics.median(one - other for one, other in zip(own, plain, strict=True))
    run.results.add(
        "host",
        case=_CASE,
        contestant=mode.name,
        gradients=gradients,
        rounds=len(own),
        backward_us=1e6 * percentiles.median,
        backward_p10_us=1e6 * percentiles.p10,
        backward_p90_us=1e6 * percentiles.p90,
        drain_us=1e6 * statistics.median(drained),
        added_us_per_gradient=1e6 * added / gradients,
    )


def host_table(rows: list[harness.Row]) -> object:
    times = ("backward_us", "backward_p10_us", "backward_p90_us", "drain_us")
    cells = [
        [row["contestant"], *(f"{row[name]:.0f}" for name in times), f"{row['added_us_per_gradient']:.2f}"]
        for row in rows
    ]
    title = f"Host's time of a backward with {rows[0]['gradients']} gradients of 32 x 32, µs"
    columns = ["contestant", "median", "p10", "p90", "device still busy", "added a gradient"]
    return harness.table(title, columns, cells)
