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
from pathlib import Path
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


def parser(module: str, about: str | None, cases: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """The arguments that each of these benches has; `about`: its docstring."""
    result = harness.parser(module, about)
    names = [case.name for case in CASES]
    result.add_argument("--case", nargs="+", choices=names, default=list(cases), help="default: %(default)s")
    result.add_argument("--rounds", type=int, default=rounds, help="steps of each kind (default: %(default)s)")
    result.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: %(default)s)")
    result.add_argument("--json", type=Path, metavar="FILE", help="write a row for each case and kind of step")
    return result


def cases_by_default() -> list[str]:
    """Those that benches of steps take."""
    return [case.name for case in CASES if case.by_default]


def run(
    options: argparse.Namespace, measure: Callable[..., list[harness.Row]], tables: Callable[[list[harness.Row]], Any]
) -> None:
    """Measure each case in fresh ranks, print, and write if asked. `measure(options, case)` returns `rows`."""
    rows: list[harness.Row] = []
    for case in options.case:
        rows += harness.spawn_ranks(measure, (options, case), options.ranks, threads=1)
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    for table in tables(rows):
        out.print(table)
    if options.json is not None:
        harness.write_json(options.json, rows)


def case_named(name: str) -> Case:
    """Of `bench.cases`."""
    return next(case for case in CASES if case.name == name)


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
    with harness.progress(case.name, rounds, show=dist.get_rank() == 0) as advance:
        for index in range(WARMUP):
            timed(kinds[-1 - index % len(kinds)], index)
        for column in range(rounds):
            for row in harness.round_order(len(kinds), column):
                times[:, row, column] = torch.tensor(timed(kinds[row], column), dtype=torch.float64)
            advance()
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
    columns = ["case", "steps", "median, ms", "to off, paired", "to off, all steps", "processor"]
    cells = [
        [
            *(row["case"], row["steps"], f"{row['median_ms']:.2f}"),
            *(f"{row[key]:.4f}" for key in ("paired_ratio_to_off", "ratio_of_sums_to_off", "processor_ratio_to_off")),
        ]
        for row in rows
    ]
    return harness.table(title, columns, cells, left=2)
