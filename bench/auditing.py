"""What the audit of replicas and sums costs: `python -m bench.auditing`.

One model under fastddp and the state of its Adam, whose steps are in turn audited or not; the latter in two groups,
whose ratio is what this run cannot tell apart. (Two models, one of them audited, differ more: by where their memory
lies.) A step is timed on each rank, from a barrier to the end of backward, without the optimizer, and counts as long as
on its slowest rank. Beside the median of ratios stands that of all steps together, which has the steps in which a sum
is added up once more. On the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastddp
from bench import harness
from bench.cases import CASES

MODULE = "bench.auditing"
STEPS = ("off", "off again", "audited")


def main() -> None:
    """Measure, print, and write if asked."""
    options = parse_arguments()
    rows: list[harness.Row] = []
    for case in options.case:
        rows += harness.spawn_ranks(measure, (case, options.rounds, options.every), options.ranks, threads=1)
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    out.print(table(rows))
    if options.json is not None:
        harness.write_json(options.json, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").split(":")[0] + ".")
    names, usual = [case.name for case in CASES], [case.name for case in CASES if case.by_default]
    parser.add_argument("--case", nargs="+", choices=names, default=usual, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=100, help="audit_every (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="steps of each kind (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each case and kind of step")
    return parser.parse_args()


def measure(case_name: str, rounds: int, every: int) -> list[harness.Row]:
    """One case on all ranks; every rank returns the same rows."""
    case = next(case for case in CASES if case.name == case_name)
    device = torch.device("cpu")
    facts = harness.environment(MODULE, device, torch.get_num_threads())
    module, batch_of = case.build(device)
    model = fastddp.DistributedDataParallel(module, audit_every=every, on_corruption="raise")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model.audit(optimizer)
    audit = model._audit

    def timed(kind: str, index: int) -> float:
        model._audit = audit if kind == "audited" else None
        batch = batch_of(dist.get_rank(), index)
        model.zero_grad()
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        model(*batch).backward()
        return 1e3 * (time.perf_counter() - start)

    with harness.progress(case.name, rounds, show=dist.get_rank() == 0) as advance:
        for index in range(8):
            timed("audited", index)
            optimizer.step()
        model.audit(optimizer)
        times = run_rounds(timed, rounds, advance)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    samples = times.tolist()
    facts |= {"case": case.name, "world_size": dist.get_world_size(), "rounds": rounds, "audit_every": every}
    return [
        facts
        | {
            "steps": kind,
            "median_ms": round(harness.Percentiles.of(own).median, 4),
            "paired_ratio_to_off": round(harness.paired_ratio(own, samples[0]), 4),
            "ratio_of_sums_to_off": round(sum(own) / sum(samples[0]), 4),
        }
        for kind, own in zip(STEPS, samples, strict=True)
    ]


def run_rounds(timed: Callable[[str, int], float], rounds: int, advance: Callable[[], None]) -> torch.Tensor:
    """Milliseconds on this rank: a row for each kind of step, a column for each round."""
    times = torch.zeros(len(STEPS), rounds, dtype=torch.float64)
    for column in range(rounds):
        for row in harness.round_order(len(STEPS), column):
            times[row, column] = timed(STEPS[row], column)
        advance()
    return times


def table(rows: list[harness.Row]) -> Any:
    """All cases, a line each."""
    lines = []
    for first in range(0, len(rows), len(STEPS)):
        off, again, audited = rows[first : first + len(STEPS)]
        medians = [f"{row['median_ms']:.2f}" for row in (off, again, audited)]
        ratios = [
            f"{row[column]:.4f}"
            for column in ("paired_ratio_to_off", "ratio_of_sums_to_off")
            for row in (again, audited)
        ]
        lines.append([off["case"], *medians, *ratios])
    columns = [
        "case",
        *(f"{kind}, ms" for kind in STEPS),
        "again / off",
        "audited / off",
        "again, sums",
        "audited, sums",
    ]
    return harness.table("Steps that are audited", columns, lines)


if __name__ == "__main__":
    main()
