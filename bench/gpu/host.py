"""What each gradient costs the host: a backward of very many tiny gradients, where the host is the limit.

The host's time is that of `loss.backward()` from call to return, with the device idle before. Nothing in it waits for
the device. What a DDP adds to the plain model's time, divided by the number of gradients, is its cost of one of them:
its hook, its share of the pack and of the collective's start. `drain_us` is what the device still has to do when
backward returns; as long as it is small against the time itself, the device kept up and was not waited for.
"""

from __future__ import annotations

import statistics
import time

import torch

from bench import harness
from bench.cases import Batch, case_named
from bench.gpu.contestants import GpuStep, modes
from bench.gpu.results import Run

_CASE = "500x32sq"
_WARMUP = 6


def measure(run: Run) -> None:
    """Adds a row for each mode."""
    model, batch_of = case_named(_CASE).build(run.device)
    gradients = len(list(model.parameters()))
    contestants = modes()
    steps = [mode.prepare(model) for mode in contestants]
    rounds = len(steps) * (1 if run.quick else 4)
    issued: list[list[float]] = [[] for _ in steps]
    drained: list[list[float]] = [[] for _ in steps]
    for _, number, index in harness.turns(len(steps), range(-_WARMUP, rounds)):
        seconds, rest = time_backward(steps[index], batch_of(0, number), run.device)
        if number >= 0:
            issued[index].append(seconds)
            drained[index].append(rest)
    samples = dict(zip((mode.name for mode in contestants), issued, strict=True))
    for mode, rests in zip(contestants, drained, strict=True):
        own = samples[mode.name]
        run.results.add(
            "host",
            case=_CASE,
            contestant=mode.name,
            gradients=gradients,
            rounds=len(own),
            **harness.Percentiles.of(own).columns("backward_us", 1e6),
            drain_us=1e6 * statistics.median(rests),
            added_us_per_gradient=1e6 * harness.paired_difference(own, samples[mode.plain]) / gradients,
        )
    columns = {"contestant": "{contestant}", "median": "{median_backward_us:.0f}", "p10": "{p10_backward_us:.0f}"}
    columns |= {"p90": "{p90_backward_us:.0f}", "device still busy": "{drain_us:.0f}"}
    columns |= {"added a gradient": "{added_us_per_gradient:.2f}"}
    title = f"Host's time of a backward with {gradients} gradients of 32 x 32, µs"
    run.out.print(harness.row_table(title, columns.items(), run.results.of_kind("host")))


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
