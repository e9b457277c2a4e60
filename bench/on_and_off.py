"""Benches of what can be switched on in one step and off in the next: one model, steps of all kinds interleaved.

The first kind is off, and so is the second, whose ratio to the first is what a run cannot tell apart. (Two models, one
of which has it on, differ more: by where their memory lies.) A step is timed on each rank, from a barrier on, and
counts as long as on its slowest rank. Beside it stands the processor's time of the rank that took most, without what
others on the machine did meanwhile. On the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench import harness
from bench.cases import CASES, Case

OFF, OFF_AGAIN = "off", "off again"
WARMUP = 12  # steps

Step = Callable[[tuple[Any, ...]], None]
"""What is timed, of a batch."""
Prepare = Callable[[str], Step]
"""What comes before a step of a kind, and is not timed."""


def parser(module: str, about: str | None, rounds: int, *cases: str) -> argparse.ArgumentParser:
    """The arguments that each of these benches has; `about`: its docstring. No cases: those that `bench.step` takes."""
    result = harness.parser(module, about)
    default = list(cases) or [case.name for case in CASES if case.by_default]
    names = [case.name for case in CASES]
    result.add_argument("--case", nargs="+", choices=names, default=default, help="default: %(default)s")
    harness.add_common(result, "case and kind of step", rounds=rounds, ranks=2)
    return result


def run(
    options: argparse.Namespace, measure: Callable[..., list[harness.Row]], tables: Callable[[list[harness.Row]], Any]
) -> None:
    """Measure each case in fresh ranks, print, and write if asked. `measure(options, case)` returns `rows`."""
    rows: list[harness.Row] = []
    for case in options.case:
        rows += harness.spawn_ranks(measure, (options, case), options.ranks, threads=1)
    harness.report(rows, tables(rows), options.json)


def measured_rows(
    module: str, case: Case, kinds: Sequence[str], rounds: int, model: Any, batch_of: Any, prepare: Prepare
) -> list[harness.Row]:
    """A row for each kind of step, the same on all ranks."""
    facts = harness.environment(module, torch.device("cpu"), torch.get_num_threads())
    facts |= {"case": case.name, "world_size": dist.get_world_size(), "rounds": rounds}

    def timed(kind: str, index: int) -> tuple[float, float]:
        step = prepare(kind)
        batch = batch_of(dist.get_rank(), index)
        model.zero_grad()
        gc.collect()
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        step(batch)
        return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - processor)

    times = torch.zeros(2, len(kinds), rounds, dtype=torch.float64)
    for index in range(WARMUP):
        timed(kinds[-1 - index % len(kinds)], index)
    with harness.progress(case.name, rounds, show=dist.get_rank() == 0) as advance:
        for column, _, row in harness.turns(len(kinds), range(rounds), advance):
            times[:, row, column] = torch.tensor(timed(kinds[row], column), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    samples, processor = times.tolist()
    return [
        facts
        | {
            "steps": kind,
            "median_ms": round(harness.Percentiles.of(own).median, 4),
            "paired_ratio_to_off": round(harness.paired_ratio(own, samples[0]), 4),
            "ratio_of_sums_to_off": round(sum(own) / sum(samples[0]), 4),
            "processor_ratio_to_off": round(sum(used) / sum(processor[0]), 4),
        }
        for kind, own, used in zip(kinds, samples, processor, strict=True)
    ]


def table(title: str, rows: list[harness.Row]) -> Any:
    """A line for each case and kind of step."""
    columns = {"case": "{case}", "steps": "{steps}", "median, ms": "{median_ms:.2f}"}
    columns |= {"to off, paired": "{paired_ratio_to_off:.4f}", "to off, all steps": "{ratio_of_sums_to_off:.4f}"}
    columns |= {"processor": "{processor_ratio_to_off:.4f}"}
    return harness.row_table(title, columns.items(), rows, left=2)
