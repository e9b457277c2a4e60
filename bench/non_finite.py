"""What it costs to know who brought NaN, in steps without trouble: `python -m bench.non_finite`.

One model under fastddp, whose gradients are in turn measured on each rank before they are added up, as with
`on_corruption`, or not; the latter in two groups, whose ratio is what this run cannot tell apart. A step is timed on
each rank, from a barrier to behind the look that an optimizer's step takes, and counts as long as on its slowest rank.
On the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastddp
from bench import harness
from bench.cases import CASES
from bench.contestants import NO_HOOK, hook_named

MODULE = "bench.non_finite"
STEPS = ("off", "off again", "measured")


def main() -> None:
    """Measure, print, and write if asked."""
    options = parse_arguments()
    rows: list[harness.Row] = []
    for case in options.case:
        for hook in options.hook:
            arguments = (case, hook, options.view, options.keep, options.rounds)
            rows += harness.spawn_ranks(measure, arguments, options.ranks, threads=1)
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    out.print(table(rows))
    if options.json is not None:
        harness.write_json(options.json, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").split(":")[0] + ".")
    names = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=names, default=["500x32sq", "gpt2"], help="default: %(default)s")
    parser.add_argument("--hook", nargs="+", default=[NO_HOOK], help="as for bench.step (default: %(default)s)")
    parser.add_argument("--view", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--keep", action="store_true", help="zero gradients in place, so that they live in the wire")
    parser.add_argument("--rounds", type=int, default=120, help="steps of each kind (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each case and kind of step")
    return parser.parse_args()


def measure(case_name: str, hook: str, view: bool, keep: bool, rounds: int) -> list[harness.Row]:
    """One case on all ranks; every rank returns the same rows."""
    case = next(case for case in CASES if case.name == case_name)
    device = torch.device("cpu")
    facts = harness.environment(MODULE, device, torch.get_num_threads())
    module, batch_of = case.build(device)
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view, on_corruption="raise")
    named = hook_named(hook)
    if named is not None:
        model.register_comm_hook(*named.state_and_hook(fastddp.comm_hooks))

    def timed(kind: str, index: int) -> float:
        model.reducer.watch_local_gradients(kind == "measured")
        batch = batch_of(dist.get_rank(), index)
        model.zero_grad(set_to_none=not keep)
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        model(*batch).backward()
        model._look_for_corruption()
        return 1e3 * (time.perf_counter() - start)

    times = torch.zeros(len(STEPS), rounds, dtype=torch.float64)
    with harness.progress(f"{case.name}, {hook}", rounds, show=dist.get_rank() == 0) as advance:
        for index in range(12):
            timed(STEPS[index % len(STEPS)], index)
        for column in range(rounds):
            for row in harness.round_order(len(STEPS), column):
                times[row, column] = timed(STEPS[row], column)
            advance()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    samples = times.tolist()
    facts |= {"case": case.name, "hook": hook, "view": view, "keep": keep, "world_size": dist.get_world_size()}
    return [
        facts
        | {
            "rounds": rounds,
            "steps": kind,
            "median_ms": round(harness.Percentiles.of(own).median, 4),
            "paired_ratio_to_off": round(harness.paired_ratio(own, samples[0]), 4),
        }
        for kind, own in zip(STEPS, samples, strict=True)
    ]


def table(rows: list[harness.Row]) -> Any:
    """All cases, a line each."""
    lines = []
    for first in range(0, len(rows), len(STEPS)):
        off, again, measured = rows[first : first + len(STEPS)]
        medians = [f"{row['median_ms']:.2f}" for row in (off, again, measured)]
        paired = [f"{row['paired_ratio_to_off']:.4f}" for row in (again, measured)]
        ratios = [f"{row['median_ms'] / off['median_ms']:.4f}" for row in (again, measured)]
        lines.append([off["case"], off["hook"], *medians, *ratios, *paired])
    columns = ["case", "hook", *(f"{kind}, ms" for kind in STEPS), "again / off", "measured / off", "paired", "paired"]
    return harness.table("Steps whose gradients are measured on each rank", columns, lines, left=2)


if __name__ == "__main__":
    main()
