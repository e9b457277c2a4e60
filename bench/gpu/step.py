"""A training step on one GPU: what each DDP adds to it when there is nobody to talk to."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from bench import harness
from bench.cases import Batch, Case
from bench.gpu import timing
from bench.gpu.alone import measure_alone
from bench.gpu.contestants import REFERENCE, GpuStep, Mode, modes
from bench.gpu.gradients import Expected
from bench.gpu.models import cases
from bench.gpu.results import Run

WARMUP = 4


@dataclass
class StepSamples:
    """Milliseconds of one contestant's steps: on the device, for the host, and until the host had issued everything."""

    device_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    issue_ms: list[float] = field(default_factory=list)


@contextmanager
def lonely_group(device: torch.device) -> Iterator[None]:
    """The default process group, with the device's usual backend and one rank."""
    backend = dist.get_default_backend_for_device(device)
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(run: Run) -> None:
    """Adds rows for the models' steps: of the modes that matter most first, then of the others."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    with lonely_group(run.device):
        for case in cases(run.quick):
            if run.out_of_time():
                run.skip(f"training step of {case.name}")
                continue
            measure_groups(run, case, [modes(seldom=False)], "step")
            gc.collect()  # a model of which nothing is left when the next one comes
        if not run.out_of_time() and not run.quick:
            plain_and_torch = [mode for mode in modes(seldom=False) if mode.name in ("plain", REFERENCE)]
            measure_groups(run, cases(run.quick)[0], [[*plain_and_torch, *modes(seldom=True)]], "step, seldom used")


def measure_groups(
    run: Run, case: Case, groups: Sequence[Sequence[Mode]], kind: str, rounds: int | None = None
) -> None:
    """Adds a row of this kind for each contestant, group by group, whose rows are written before the next one begins.

    All have the plain model and torch's DDP, which get a row in the first one; the others are compared with how these
    did beside them. A group whose turn comes too late is left out.
    """
    model, batch_of = case.build(run.device)
    alone: dict[str, harness.Row] = {}
    for number, contestants in enumerate(groups):
        new = [mode for mode in contestants if mode.name not in alone]
        if number > 0 and run.out_of_time():
            run.skip(f"{kind} of {case.name}: {', '.join(mode.name for mode in new)}")
            continue
        alone |= measure_alone(new, model, functools.partial(batch_of, 0), run.device, alone)
        _measure_together(run, case, model, functools.partial(batch_of, 0), contestants, kind, alone, rounds)
        gc.collect()
    rows = [row for row in run.results.of_kind(kind) if row["case"] == case.name]
    run.out.print(step_table(rows))


def _measure_together(
    run: Run,
    case: Case,
    model: nn.Module,
    batch: Callable[[int], Batch],
    contestants: Sequence[Mode],
    kind: str,
    alone: Mapping[str, harness.Row],
    rounds: int | None,
) -> None:
    steps = [mode.prepare(model) for mode in contestants]
    time_steps(steps, range(-WARMUP, 0), batch, run.device)
    reference = next(step for mode, step in zip(contestants, steps, strict=True) if mode.name == REFERENCE)
    expected = Expected.of(reference, batch(0))
    verdicts = [
        expected.verdict(step, batch(0), mode.hook.check if mode.hook else None)
        for mode, step in zip(contestants, steps, strict=True)
    ]
    time_steps(steps, range(-1, 0), batch, run.device)  # back to the algorithms that are not deterministic
    rounds = len(steps) if run.quick else rounds or 3 * len(steps)
    samples = time_steps(steps, range(rounds), batch, run.device)
    by_name = dict(zip((mode.name for mode in contestants), samples, strict=True))
    have_a_row = {row["contestant"] for row in run.results.of_kind(kind) if row["case"] == case.name}
    for mode, (verdict, difference) in zip(contestants, verdicts, strict=True):
        if mode.name in have_a_row:
            continue
        run.results.add(
            kind,
            case=case.name,
            case_about=case.about,
            parameters=len(list(model.parameters())),
            elements=sum(parameter.numel() for parameter in model.parameters()),
            contestant=mode.name,
            rounds=rounds,
            **step_columns(mode, by_name, contestants),
            **alone[mode.name],
            result=verdict,
            largest_difference=difference,
            spread_of_torch=expected.spread,
        )


def time_steps(
    steps: Sequence[GpuStep], rounds: range, batch_of: Callable[[int], Batch], device: torch.device
) -> list[StepSamples]:
    """Each takes one step a round, on the same batch, in an order that changes from round to round."""
    samples = [StepSamples() for _ in steps]
    timer = timing.DeviceTimer(device)
    for _, number, index in harness.turns(len(steps), rounds):
        batch = batch_of(number)
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        timer.start()
        steps[index].run(batch)
        timer.stop()
        issued = time.perf_counter()
        torch.accelerator.synchronize(device)
        samples[index].wall_ms.append(1e3 * (time.perf_counter() - begin))
        samples[index].issue_ms.append(1e3 * (issued - begin))
        samples[index].device_ms.append(1e3 * timer.seconds())
    return samples


def step_columns(mode: Mode, samples: dict[str, StepSamples], contestants: Sequence[Mode]) -> harness.Row:
    """Times of one mode, and how they compare with the plain model's, torch's and its best setting's."""
    own = samples[mode.name]
    wall = harness.Percentiles.of(own.wall_ms).columns("ms")
    rivals = [rival.name for rival in contestants if rival.engine == "torch" and rival.hook is None]
    best = min(rivals, key=lambda rival: statistics.median(samples[rival].device_ms))
    return {
        **harness.Percentiles.of(own.device_ms).columns("ms"),
        **{f"wall_{name}": value for name, value in wall.items()},
        "issue_median_ms": statistics.median(own.issue_ms),
        "added_ms": harness.paired_difference(own.device_ms, samples[mode.plain].device_ms),
        "ratio_to_torch": harness.paired_ratio(own.device_ms, samples[REFERENCE].device_ms),
        "best_torch": best,
        "ratio_to_best_torch": harness.paired_ratio(own.device_ms, samples[best].device_ms),
    }


def step_table(rows: Sequence[harness.Row]) -> object:
    columns = {"contestant": "{contestant}", "median": "{median_ms:.2f}", "p10": "{p10_ms:.2f}", "p90": "{p90_ms:.2f}"}
    columns |= {"wall": "{wall_median_ms:.2f}", "added": "{added_ms:.3f}"}
    columns |= {"/ torch": "{ratio_to_torch:.3f}", "/ best": "{ratio_to_best_torch:.3f}"}
    columns |= {"+launches": "{added_launches:.0f}", "+memcpys": "{added_memcpys:.0f}"}
    columns |= {"+peak": "{added_peak_mib:.0f}", "+steady": "{added_steady_mib:.0f}", "gradients": "{result}"}
    first = rows[0]
    title = f"{first['case_about']}: ms a step, MiB; {first['rounds']} rounds; best torch: {first['best_torch']}"
    return harness.row_table(title, columns.items(), rows)
