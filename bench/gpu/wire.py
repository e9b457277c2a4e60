"""EMULATED: a training step among many ranks, of which one exists. See `networks` for what is assumed of the others."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from bench import harness
from bench.cases import Batch, Case
from bench.gpu import timing
from bench.gpu.contestants import GpuStep, Mode, wire_modes
from bench.gpu.emulation import BLOCKS, EmulatedGroup, emulated_group, load_extension
from bench.gpu.gradients import Expected
from bench.gpu.models import cases
from bench.gpu.networks import CONFIGURATIONS, INSTANT, Network
from bench.gpu.results import Run
from bench.gpu.step import WARMUP, StepSamples, time_steps

_ROUNDS = 7  # as many as there are modes: each takes every place in a round once
_CHECKED_MIB = (1, 25)
_CHECKS = 7


@dataclass
class Trained:
    """A model on its way through the networks, and what the first of them showed."""

    case: Case
    model: nn.Module
    batch_of: Callable[[int], Batch]
    # What each mode adds to the plain step when the wire takes no time; always measured, and first.
    instant: dict[str, float] = field(default_factory=dict)
    expected: Expected | None = None


def measure(run: Run) -> None:
    """Adds rows for what the emulation itself does, and for each model, network, number of ranks and mode."""
    torch.backends.cudnn.benchmark = True
    load_extension()
    configurations = CONFIGURATIONS[:2] if run.quick else CONFIGURATIONS
    for network, ranks in configurations:
        with emulated_group(network, ranks, run.device):
            _check_emulation(run, network, ranks)
    columns = {"network": "{network}", "ranks": "{world_size}", "MiB": "{mib}"}
    columns |= {"asked µs": "{asked_us:.1f}", "took µs": "{took_us:.1f}", "sum": "{result}"}
    title = "EMULATED wire: an allreduce, as long as it should take and as long as it took"
    run.out.print(harness.row_table(title, columns.items(), run.results.of_kind("emulated check")))
    for case in cases(run.quick):
        model, batch_of = case.build(run.device)
        trained = Trained(case, model, functools.partial(batch_of, 0))
        for network, ranks in configurations:
            if run.out_of_time() and trained.instant:
                run.skip(f"{case.name} on the emulated wire, {network.name}, {ranks} ranks")
                continue
            with emulated_group(network, ranks, run.device) as group:
                _measure_configuration(run, trained, network, ranks, group)
                gc.collect()  # whatever still knows the group goes before it
        del model, batch_of, trained
        run.out.print(wire_table([row for row in run.results.of_kind("emulated step") if row["case"] == case.name]))


def _check_emulation(run: Run, network: Network, ranks: int) -> None:
    """Whether a collective takes as long as it should, and leaves the sum over equal ranks."""
    timer = timing.DeviceTimer(run.device)
    for mebibytes in _CHECKED_MIB:
        wire = timing.random_tensor(mebibytes * 2**18, torch.float32, run.device)
        expected = wire * ranks
        dist.all_reduce(wire)
        right = torch.equal(wire, expected)
        seconds = []
        for _ in range(_CHECKS):
            torch.accelerator.synchronize(run.device)
            timer.start()
            dist.all_reduce(wire, dist.ReduceOp.AVG)
            timer.stop()
            seconds.append(timer.seconds())
        run.results.add(
            "emulated check",
            emulated=True,
            network=network.name,
            world_size=ranks,
            mib=mebibytes,
            asked_us=1e3 * network.all_reduce(ranks).milliseconds(wire.nbytes),
            took_us=1e6 * statistics.median(seconds),
            result="right" if right and torch.equal(wire, expected) else "WRONG",
        )


def _measure_configuration(run: Run, trained: Trained, network: Network, ranks: int, group: EmulatedGroup) -> None:
    contestants = wire_modes()
    batch_of = trained.batch_of
    steps = [mode.prepare(trained.model) for mode in contestants]
    time_steps(steps, range(-WARMUP, 0), batch_of, run.device)
    # All ranks are taken to have the same gradients, so their mean is what the model without a DDP has.
    trained.expected = trained.expected or Expected.of(steps[0], batch_of(0))
    verdicts = [trained.expected.verdict(step, batch_of(0)) for step in steps]
    counts = [_counts_of_a_step(step, batch_of(0), group) for step in steps]
    rounds = 2 if run.quick else _ROUNDS
    samples = time_steps(steps, range(rounds), batch_of, run.device)
    by_name = dict(zip((mode.name for mode in contestants), samples, strict=True))
    for mode, (verdict, difference), travelled in zip(contestants, verdicts, counts, strict=True):
        row = run.results.add(
            "emulated step",
            case=trained.case.name,
            case_about=trained.case.about,
            emulated=True,
            network=network.name,
            link_gb_per_s=network.gb_per_s,
            start_us=network.start_us,
            hop_us=network.hop_us,
            world_size=ranks,
            blocks=BLOCKS,
            contestant=mode.name,
            rounds=rounds,
            **wire_columns(mode, by_name, trained.instant, travelled),
            result=verdict,
            largest_difference=difference,
        )
        if network is INSTANT:
            trained.instant[mode.name] = row["added_ms"]


def _counts_of_a_step(step: GpuStep, batch: Batch, group: EmulatedGroup) -> tuple[int, int, float]:
    collectives, size, busy = group.counts()
    step.run(batch)
    after = group.counts()
    return after[0] - collectives, after[1] - size, after[2] - busy


def wire_columns(
    mode: Mode, samples: dict[str, StepSamples], instant: dict[str, float], travelled: tuple[int, int, float]
) -> harness.Row:
    """Times of one mode on one network.

    Exposed is what the wire costs the step: what the mode adds to the plain step here, less what it adds on a wire that
    takes no time. Hidden is the share of the wire's time that the step does not notice.
    """
    own = samples[mode.name].device_ms
    added = harness.paired_difference(own, samples[mode.plain].device_ms)
    exposed = added - instant[mode.name] if mode.name in instant else None
    collectives, size, busy_ms = travelled
    return {
        **harness.Percentiles.of(own).columns("ms"),
        "added_ms": added,
        "exposed_ms": exposed,
        "wire_ms": busy_ms,
        "hidden_fraction": 1 - exposed / busy_ms if exposed is not None and busy_ms > 0 else None,
        "collectives": collectives,
        "wire_bytes": size,
    }


def wire_table(rows: Sequence[harness.Row]) -> object:
    """A line for each network and number of ranks: the plain step, and what each mode adds to it."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines = []
    for (network, ranks), group in harness.grouped(rows, "network", "world_size").items():
        plain, *others = (f" {row['result']}" if row["result"] == "WRONG" else "" for row in group)
        times = [f"{group[0]['median_ms']:.2f}{plain}"]
        times += [f"{row['added_ms']:.2f}{wrong}" for row, wrong in zip(group[1:], others, strict=True)]
        lines.append([network, str(ranks), *times])
    title = f"EMULATED wire. {rows[0]['case_about']}: ms of the plain step, and what each DDP adds to it"
    columns = ["network", "ranks", names[0], *(f"+ {name}" for name in names[1:])]
    return harness.table(title, columns, lines)
