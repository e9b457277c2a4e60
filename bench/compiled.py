"""Times a training step under torch.compile with no DDP, with torch's DDP and with fastddp: `python -m bench.compiled`.

As `bench.step --compiled` does, on two ranks over gloo. Dynamo cuts a model under torch's DDP into a graph for each
bucket (`torch`), or is told not to (`torch-whole`), and then nothing overlaps. `graphs` are those that AOT autograd
gets in a contestant's first step, `later` those of all other steps. `--without-exchange` times steps under `no_sync()`
too, after the others: of how buckets are cut, then only the code is left that is compiled for them.

`--compile-time`: seconds of the first step, in a process of one rank that finds the caches that another has filled
(`cold`). Here `breaks` are counted too: in one process, those in torch's DDP would count for whoever comes first.

`--memory`: the most that is resident in steps after warm-up, of the rank with most; each contestant has own ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench import harness, network, step
from bench.cases import CASES, Batch, case_named
from bench.contestants import CONTESTANTS, HOOK_NAMES, NO_HOOK, REFERENCE, Step, line_up

MODULE = "bench.compiled"
FLOOR, WHOLE = "alone", "torch-whole"


def main() -> None:
    options = parse_arguments()
    if options.compile_time or options.memory:
        one_by_one(options)
    elif not network.is_skipped(MODULE, options.rate):
        rows = []
        for rate in options.rate:
            with network.cable(rate, 1) as (enter, facts):
                rows += [row | facts for row in compare(step.spawn_ranks(options.case, options, enter))]
        harness.report(rows, map(step_table, harness.grouped(rows, "rate").values()), options.json)
        step.exit_if_wrong(rows)


def parse_arguments() -> argparse.Namespace:
    """With all that `bench.step` asks for."""
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    names = [contestant.name for contestant in CONTESTANTS if contestant.engine != "wire"]
    add("--case", choices=[case.name for case in CASES], default="gpt-16m", help="default: %(default)s")
    add("--contestant", "--contestants", nargs="+", choices=names, help=f"{REFERENCE} is always measured")
    add("--hook", nargs="+", metavar="HOOK", default=[NO_HOOK], help=f"{HOOK_NAMES} (default: %(default)s)")
    add("--bucket-cap-mb", type=float, default=5.0, help="of who has none of its own (default: %(default)s)")
    add("--rate", nargs="+", default=[network.LOOPBACK], help="of a cable between two ranks (default: no cable)")
    add("--without-exchange", action="store_true", help="time steps under no_sync() too")
    add("--compile-time", action="store_true", help="time the first step, with warm caches")
    add("--tries", type=int, default=3, help="of --compile-time; the best counts (default: %(default)s)")
    add("--memory", action="store_true", help="weigh instead of timing")
    harness.add_common(parser, "contestant and rate", rounds=24, warmup=4, threads=1)
    parser.set_defaults(module=MODULE, backend="gloo", device="cpu", ranks=2, compiled=True, keep_samples=True)
    options = parser.parse_args()
    if min(options.rounds, options.tries) < 1 or options.warmup < 2:
        parser.error("--rounds and --tries need at least 1, --warmup at least 2")
    if options.bucket_cap_mb < 1:
        parser.error("--bucket-cap-mb at least 1: torch's first bucket has 1 MiB, and dynamo refuses less for others")
    network.check_rates(parser, options.rate)
    step.check_hooks(parser, options.hook)
    again = [] if options.compile_time or options.memory else ["torch-again"]
    options.contestant = options.contestant or [FLOOR, REFERENCE, *again, WHOLE, "fastddp"]
    return options


def compare(rows: list[harness.Row]) -> list[harness.Row]:
    """Rows of `bench.step`, with more ratios in place of the samples."""
    columns = ("samples_ms", "samples_without_exchange_ms")
    times, bare = ({row["contestant"]: row.pop(column, []) for row in rows} for column in columns)
    for row in rows:
        own, own_bare = times[row["contestant"]], bare[row["contestant"]]
        more = {
            "paired_ratio_to_whole": harness.paired_ratio(own, times[WHOLE]) if WHOLE in times else None,
            "without_exchange_ms": statistics.median(own_bare) if own_bare else None,
            "without_exchange_ratio": harness.paired_ratio(own_bare, bare[FLOOR]) if bare.get(FLOOR) else None,
        }
        row |= harness.rounded(more, 6)
    return rows


def step_table(rows: list[harness.Row]) -> Any:
    """The contestants on one network."""
    first = rows[0]
    columns = [("contestant", "{contestant}"), ("median ms", "{median_ms:.1f}")]
    columns += [
        (f"/ {other.replace('_', ' ')}", f"{{paired_ratio_to_{other}:.3f}}") for other in ("torch", "best_torch")
    ]
    columns += [
        (f"/ {WHOLE}", "{paired_ratio_to_whole:.3f}"),
        ("graphs", "{graphs}"),
        ("later", "{graphs_of_later_runs}"),
    ]
    if first["without_exchange_ms"] is not None:
        columns += [("no exchange, ms", "{without_exchange_ms:.1f}"), (f"/ {FLOOR}", "{without_exchange_ratio:.3f}")]
    title = f"{first['case_about']}; {first['world_size']} ranks, {first['rate']}, {first['rounds']} rounds"
    return harness.row_table(title, [*columns, ("gradients", "{gradients}")], rows)


# -------------------------------------------------------------------------------------------- in processes of their own


def one_by_one(options: argparse.Namespace) -> None:
    """What --compile-time and --memory measure and print."""
    rows = []
    for contestant in line_up(options.contestant, options.hook):
        spawn = partial(harness.spawn_ranks, arguments=(contestant.name, options), threads=options.threads)
        if options.compile_time:
            with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
                cold, *warm = (spawn(first_step, ranks=1)[0] for _ in range(1 + options.tries))
            rows.append(min(warm, key=lambda row: row["seconds"]) | {"cold": cold["seconds"], "tries": options.tries})
        else:
            rows += spawn(weigh, ranks=options.ranks)
    to, what = (FLOOR, "seconds") if options.compile_time else (REFERENCE, "peak_mib")
    reference = next((row[what] for row in rows if row["contestant"] == to), None)
    rows = [row | {f"ratio_to_{to}": round(row[what] / reference, 4) if reference else None} for row in rows]
    more = ("cold", "graphs", "graph_breaks") if options.compile_time else ("mib_before",)
    columns = [("contestant", "{contestant}"), (what, f"{{{what}:.2f}}"), (f"/ {to}", f"{{ratio_to_{to}:.3f}}")]
    columns += [(name.replace("_", " "), f"{{{name}}}") for name in more]
    harness.report(rows, [harness.row_table(f"{rows[0]['case']}", columns, rows)], options.json)


def _made(name: str, options: argparse.Namespace) -> tuple[Step, Callable[[int], Batch], harness.Row]:
    """On a rank: a contestant's step, its batches, and what rows say of it."""
    contestant = next(one for one in line_up(options.contestant, options.hook, True) if one.name == name)
    model, batch_of = case_named(options.case).build(torch.device("cpu"))
    facts = harness.environment(MODULE, torch.device("cpu"), options.threads)
    facts |= {"case": options.case, "world_size": dist.get_world_size(), "contestant": name}
    facts |= {"bucket_cap_mb": contestant.bucket_cap_mb(options.bucket_cap_mb)}
    return contestant.step(model, options.bucket_cap_mb), partial(batch_of, dist.get_rank()), facts


def first_step(name: str, options: argparse.Namespace) -> list[harness.Row]:
    """Without what is imported to compile."""
    importlib.import_module("torch._inductor.compile_fx")
    own, batches, facts = _made(name, options)
    batch = batches(0)
    start = time.perf_counter()
    own.run(batch)
    facts["seconds"] = round(time.perf_counter() - start, 4)
    return [facts | own.plans() | {"graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values())}]


def weigh(name: str, options: argparse.Namespace) -> list[harness.Row]:
    """Without what was only needed to compile."""
    own, batches, facts = _made(name, options)
    for number in range(-options.warmup, options.rounds):
        if number == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            before = harness.resident("VmRSS")
        own.run(batches(number))
        own.clear()
    row = {"peak_mib": harness.resident("VmHWM"), "mib_before": before}
    most = max(harness.of_all_ranks(row), key=lambda other: other["peak_mib"])
    return [facts | {"rounds": options.rounds, "warmup": options.warmup} | harness.rounded(most, 1)]


if __name__ == "__main__":
    main()
