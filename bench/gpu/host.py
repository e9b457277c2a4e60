"""What each gradient costs the host: a backward of very many tiny gradients, where the host is the limit.

The host's time is that of `loss.backward()` from call to return, with the device idle before; and, since the model
without a DDP pays the beginning too, from the moment when the first gradient has come. Nothing in it waits for the
device. What a DDP adds to the plain model's time, divided by the number of gradients, is its cost of one of them: its
hook, its share of the pack and of the collective's start. `drain_us` is what the device still has to do when backward
returns; as long as it is small against the time itself, the device kept up and was not waited for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import nn

from bench import harness
from bench.cases import Batch, case_named
from bench.gpu.alone import work
from bench.gpu.contestants import GpuStep, modes
from bench.gpu.models import cases
from bench.gpu.results import Run
from bench.gpu.step import lonely_group

_CASE = "500x32sq"
_WARMUP = 6


class Clock:
    """When the first gradient of a backward had come, by the host's clock."""

    def __init__(self, module: nn.Module) -> None:
        self.first = 0.0
        # What is registered last is used last, so its gradient comes first.
        *_, last = module.parameters()
        last.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        self.first = time.perf_counter()


@dataclass
class Samples:
    """Seconds of one contestant's backwards."""

    backward: list[float] = field(default_factory=list)
    from_first: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)


def measure(run: Run) -> None:
    """Adds a row for each mode."""
    with lonely_group(run.device):
        _measure(run)


def _measure(run: Run) -> None:
    case = cases(quick=True)[0] if run.quick else case_named(_CASE)
    model, batch_of = case.build(run.device)
    gradients = len(list(model.parameters()))
    contestants = modes(seldom=False)
    steps = [mode.prepare(model) for mode in contestants]
    clocks = [Clock(step.module) for step in steps]
    rounds = range(-2, 1) if run.quick else range(-_WARMUP, 3 * len(steps))
    samples = [Samples() for _ in steps]
    for _, number, index in harness.turns(len(steps), rounds):
        times = time_backward(steps[index], clocks[index], batch_of(0, number), run.device)
        if number >= 0:
            for kept, seconds in zip(vars(samples[index]).values(), times, strict=True):
                kept.append(seconds)
    by_name = dict(zip((mode.name for mode in contestants), samples, strict=True))
    for mode, step in zip(contestants, steps, strict=True):
        own, plain = by_name[mode.name], by_name[mode.plain]
        run.results.add(
            "host",
            case=case.name,
            contestant=mode.name,
            gradients=gradients,
            rounds=len(own.backward),
            **harness.Percentiles.of(own.backward).columns("backward_us", 1e6),
            **harness.Percentiles.of(own.from_first).columns("from_first_us", 1e6),
            **harness.Percentiles.of(own.drain).columns("drain_us", 1e6),
            added_us_per_gradient=1e6 * harness.paired_difference(own.backward, plain.backward) / gradients,
            **work(step, lambda number: batch_of(0, number), run.device),
        )
    columns = {"contestant": "{contestant}", "backward": "{median_backward_us:.0f}", "p90": "{p90_backward_us:.0f}"}
    columns |= {"from the first gradient": "{median_from_first_us:.0f}", "device still busy": "{median_drain_us:.0f}"}
    columns |= {"added a gradient": "{added_us_per_gradient:.2f}", "launches": "{launches}"}
    title = f"Host's time of a backward with {gradients} gradients, µs: {case.about}"
    run.out.print(harness.row_table(title, columns.items(), run.results.of_kind("host")))


def time_backward(step: GpuStep, clock: Clock, batch: Batch, device: torch.device) -> tuple[float, float, float]:
    """Seconds of backward, of its part from the first gradient on, and from its return until the device is idle."""
    step.clear()
    loss = step.module(*batch)
    torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    loss.backward()
    returned = time.perf_counter()
    torch.accelerator.synchronize(device)
    return returned - begin, returned - clock.first, time.perf_counter() - returned
