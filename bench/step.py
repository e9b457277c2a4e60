"""Times a training step with no DDP, with torch's DDP and with fastddp, all in one run: `python -m bench.step --help`.

In every round each contestant takes one step on the same batch, in an order that changes from round to round. A step is
timed on each rank from a barrier before forward to the end of backward (on a GPU: until it is idle again), and counts
as long as on its slowest rank. Gradients are freed after it, untimed. Before and after the rounds every contestant's
gradients are compared with torch's: whoever differs is reported as WRONG, and the bench exits with 1.

`--hook fp16 powersgd4` measures communication hooks: torch's under torch's DDP, fastddp's of the same name under
fastddp's, next to no DDP and torch's DDP without a hook. What is demanded of gradients is in the rows' column `check`:
of casts, torch's gradients without a hook up to rounding; of PowerSGD, which is an approximation, that they are finite
and equal on all ranks. `held_against` is torch's DDP with torch's hook of the same name; with fp16 where it has none.

`--rate 1gbit` has a network of that rate between the ranks: half of them, `--ranks-per-node`, at each end of a cable
(`--rate`). Of `fastddp-nodes` the two ends are the nodes; `fastddp-auto` plans its buckets, `fastddp-N` has
those of N MiB. `--compiled` has every module under torch.compile.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import harness, network
from bench.cases import CASES, Batch, case_named
from bench.checks import largest_difference
from bench.contestants import CONTESTANTS, HOOK_NAMES, NO_HOOK, REFERENCE, Contestant, Step, hook_named, line_up

MODULE = "bench.step"


# Measured by default with --hook; without, it is everyone.
WITH_HOOKS = ("alone", REFERENCE, "torch-again", "torch-view", "fastddp", "fastddp-view")


def main() -> None:
    options = parse_arguments()
    if "RANK" in os.environ:  # started by torchrun: this process is one of the ranks, for all cases
        if options.ranks is not None:
            sys.exit("--ranks and torchrun both say how many ranks there are: leave --ranks out")
        torch.set_num_threads(options.threads)
        dist.init_process_group(options.backend)
        rows = [row for name in options.case for row in measure(name, options)]
        if dist.get_rank() == 0:
            finish(rows, options)
        dist.destroy_process_group()
    elif not network.is_skipped(MODULE, options.rate or []):
        rows = []
        for rate, name in itertools.product(options.rate or [None], options.case):
            rows += measure_on(rate, name, options)
            if options.json:
                harness.write_json(options.json, rows)
        finish(rows, options)


def measure_on(rate: str | None, case: str, options: argparse.Namespace) -> list[harness.Row]:
    """One case, perhaps over a cable of its own."""
    if rate is None:
        return spawn_ranks(case, options)
    with network.cable(rate, options.ranks_per_node) as (enter, facts):
        return [row | facts for row in spawn_ranks(case, options, enter)]


def parse_arguments() -> argparse.Namespace:
    """The command line, complete and with the backend decided. Names stay names: this travels to spawned ranks."""
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    by_default = [case.name for case in CASES if case.by_default]
    add("--case", nargs="+", choices=[case.name for case in CASES], default=by_default, help="default: %(default)s")
    add(
        "--contestant",
        "--contestants",
        nargs="+",
        choices=[contestant.name for contestant in CONTESTANTS],
        help=f"{REFERENCE} without a hook is always measured",
    )
    add("--hook", nargs="+", metavar="HOOK", default=[NO_HOOK], help=f"{HOOK_NAMES} (default: %(default)s)")
    add(
        "--warmup",
        type=int,
        default=4,
        help="rounds before (default: %(default)s; torch rebuilds its buckets, PowerSGD starts; fastddp-auto takes 7)",
    )
    add("--bucket-cap-mb", type=float, help="for all DDPs (default: each one's own)")
    add("--compiled", action="store_true", help="every module under torch.compile, each with code of its own")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl where there are GPUs, else gloo")
    add("--device", choices=("cpu", "cuda"), help="default: the backend's; with gloo, ranks share the first GPU")
    add("--ranks", type=int, help="processes on this machine (default: a GPU each, or 2 with gloo)")
    add("--rate", nargs="+", help="of a cable between the ranks, as for tc: 100mbit, 2.5gbit (default: no cable)")
    add("--ranks-per-node", type=int, default=1, help="at either end of it (default: %(default)s)")
    harness.add_common(parser, "case and contestant", rounds=36, threads=1)
    add("--keep-samples", action="store_true", help="each round's time in the rows, to compare any two contestants")
    parser.set_defaults(without_exchange=False, module=MODULE)
    options = parser.parse_args()
    if options.rounds < 1 or options.warmup < 2:
        parser.error("--rounds needs at least 1, --warmup at least 2: buckets are rebuilt after the first step")
    if options.ranks_per_node < 1 or (options.rate and options.ranks):
        parser.error("--ranks-per-node needs at least 1, and with --rate it is what says how many ranks there are")
    network.check_rates(parser, options.rate or [])
    check_hooks(parser, options.hook)
    if options.contestant is None:
        everyone = options.hook == [NO_HOOK]
        options.contestant = [c.name for c in CONTESTANTS if c.by_default and (everyone or c.name in WITH_HOOKS)]
    if options.rate:
        options.backend, options.ranks = "gloo", 2 * options.ranks_per_node
    elif options.backend is None:
        options.backend = "nccl" if torch.cuda.is_available() else "gloo"
    options.device = options.device or ("cuda" if options.backend == "nccl" else "cpu")
    return options


def check_hooks(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Ends the program where one is none."""
    try:
        for name in names:
            hook_named(name)
    except ValueError as error:
        parser.error(f"--hook: {error}")


def spawn_ranks(
    case_name: str, options: argparse.Namespace, enter: Callable[[int], None] | None = None
) -> list[harness.Row]:
    """Measures one case in fresh processes, so that no case inherits another's heap.

    Each rank calls `enter`, which is pickled, with its number before it meets the others.
    """
    ranks = options.ranks or (torch.cuda.device_count() if options.backend == "nccl" else 2)
    return harness.spawn_ranks(measure, (case_name, options), ranks, options.threads, options.backend, enter)


def measure(case_name: str, options: argparse.Namespace) -> list[harness.Row]:
    """Runs one case on all ranks; every rank returns the same rows."""
    case = case_named(case_name)
    contestants = line_up(options.contestant, options.hook, options.compiled)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if options.backend == "nccl" else 0)
        torch.cuda.set_device(device)
    facts = harness.environment(options.module, device, options.threads)
    rank = dist.get_rank()
    model, batch_of = case.build(device)
    steps = [contestant.step(model, options.bucket_cap_mb) for contestant in contestants]
    batches = partial(batch_of, rank)

    with harness.progress(case.name, options.warmup + options.rounds, show=rank == 0) as advance:
        _run_rounds(steps, range(-options.warmup, 0), batches, device, advance)
        # The checks' batches differ from those of the steps before, by more than a cast rounds away: gradients that a
        # step left behind would be seen.
        before = _judge(contestants, steps, batches(options.rounds + 30))
        times = _run_rounds(steps, range(options.rounds), batches, device, advance)
        after = _judge(contestants, steps, batches(options.rounds + 60))

        local = torch.zeros(len(steps), 0)
        if options.without_exchange:
            local = _run_rounds(steps, range(-2, options.rounds), batches, device, exchange=False)[:, 2:].contiguous()
            dist.all_reduce(local, dist.ReduceOp.MAX)

    dist.all_reduce(times, dist.ReduceOp.MAX)
    # The largest resident sets that these processes ever had; Linux counts them in KiB.
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = torch.tensor(float(kibibytes), dtype=torch.float64, device=device)
    dist.all_reduce(memory)
    facts |= {
        "case": case.name,
        "case_about": case.about,
        "world_size": dist.get_world_size(),
        "backend": options.backend,
        "compiled": options.compiled,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "parameters": len(list(model.parameters())),
        "elements": sum(parameter.numel() for parameter in model.parameters()),
        "peak_memory_gib_all_ranks": round(float(memory) / 2**20, 2),
    }
    samples = dict(zip((contestant.name for contestant in contestants), times.tolist(), strict=True))
    verdicts = [Verdict.both(*pair) for pair in zip(before, after, strict=True)]
    rows = []
    columns_of_all = compare(contestants, samples, verdicts)
    for contestant, step, columns, own in zip(contestants, steps, columns_of_all, local.tolist(), strict=True):
        row = facts | {"bucket_cap_mb": contestant.bucket_cap_mb(options.bucket_cap_mb)} | step.plans() | columns
        if options.keep_samples:
            row["samples_ms"] = [round(ms, 3) for ms in samples[contestant.name]]
        if options.without_exchange:
            row["samples_without_exchange_ms"] = [round(ms, 3) for ms in own]
        rows.append(row)
    return rows


def _run_rounds(
    steps: Sequence[Step],
    rounds: range,
    batch_of: Callable[[int], Batch],
    device: torch.device,
    advance: Callable[[], None] = lambda: None,
    exchange: bool = True,
) -> Tensor:
    """Milliseconds of each step on this rank: a row for each contestant, a column for each round."""
    times = torch.zeros(len(steps), len(rounds), dtype=torch.float64, device=device)
    for place, number, index in harness.turns(len(steps), rounds, advance):
        batch = batch_of(number)
        with nullcontext() if exchange else steps[index].without_exchange():
            dist.barrier()
            _wait_for(device)
            start = time.perf_counter()
            steps[index].run(batch)
            _wait_for(device)
            times[index, place] = 1e3 * (time.perf_counter() - start)
        steps[index].clear()
    return times


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Verdict:
    """What became of a contestant's check, on all ranks."""

    holds: bool
    largest_difference: float  # from the reference's gradients, whatever the check; infinite: missing or not a number

    def both(self, other: Verdict) -> Verdict:
        """Of two checks of the same contestant."""
        return Verdict(self.holds and other.holds, max(self.largest_difference, other.largest_difference))


def _judge(contestants: Sequence[Contestant], steps: Sequence[Step], batch: Batch) -> list[Verdict]:
    """Checks each contestant's gradients of one step; every rank gets the same verdicts."""
    reference = steps[[contestant.name for contestant in contestants].index(REFERENCE)]
    reference.run(batch)
    expected = reference.gradients()  # not views of a bucket: they outlive clear()
    reference.clear()
    broken, differences = [], []
    for contestant, step in zip(contestants, steps, strict=True):
        holds, difference = True, 0.0
        if contestant.semantics != "floor":
            step.run(batch)
            got = step.gradients()
            holds, difference = contestant.check.holds(got, expected), largest_difference(got, expected)
            step.clear()
        broken.append(float(not holds))
        differences.append(difference)
    everywhere = torch.tensor([broken, differences], dtype=torch.float64, device=expected[0].device)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return [Verdict(not one, difference) for one, difference in zip(*everywhere.tolist(), strict=True)]


def compare(
    contestants: Sequence[Contestant], samples: dict[str, list[float]], verdicts: Sequence[Verdict]
) -> list[harness.Row]:
    """The columns of one case's contestants: percentiles, ratios and the verdict on the gradients."""
    percentiles = {name: harness.Percentiles.of(times) for name, times in samples.items()}

    def ratios(name: str, other: str | None) -> tuple[float | None, float | None]:
        """Of the medians, and the median of the ratios round by round."""
        if other is None:
            return None, None
        medians = percentiles[name].median / percentiles[other].median
        return medians, harness.paired_ratio(samples[name], samples[other])

    rows = []
    for contestant, verdict in zip(contestants, verdicts, strict=True):
        name = contestant.name
        rivals = [
            c.name
            for c in contestants
            if c.baseline and (c.semantics, c.hook_name) == (contestant.semantics, contestant.hook_name)
        ]
        best = min(rivals, key=lambda rival: percentiles[rival].median) if rivals else None
        held_against = contestant.held_against if contestant.held_against in samples else None
        floor = contestant.semantics == "floor"
        row = {
            "contestant": name,
            "semantics": contestant.semantics,
            "hook": contestant.hook_name,
            **percentiles[name].columns("ms"),
        }
        for column, other in (("torch", REFERENCE), ("best_torch", best), ("held_against", held_against)):
            if column != "torch":
                row[column] = other
            row[f"ratio_to_{column}"], row[f"paired_ratio_to_{column}"] = ratios(name, other)
        row |= {
            "gradients": "none reduced" if floor else contestant.check.passed if verdict.holds else "WRONG",
            "check": None if floor else contestant.check.about,
            "largest_difference": verdict.largest_difference if math.isfinite(verdict.largest_difference) else None,
        }
        rows.append(harness.rounded(row, 6))
    return rows


def finish(rows: list[harness.Row], options: argparse.Namespace) -> None:
    """Prints a table for each case, writes the rows, and exits with 1 when a contestant's gradients were wrong."""
    harness.report(rows, map(case_table, harness.grouped(rows, "case", "rate").values()), options.json)
    exit_if_wrong(rows)


def exit_if_wrong(rows: Sequence[harness.Row]) -> None:
    """Ends the program with 1, and names them, if a contestant's gradients were wrong."""
    harness.exit_if_wrong(rows, "{contestant} on {case}", "gradients are not what they should be")


def case_table(rows: Sequence[harness.Row]) -> Any:
    """One case, perhaps on a network of a given kind; with a mark to beat for hooks if there are any."""
    first = rows[0]
    where = f" at {first['rate']} (a TCP connection got {first['tcp_gbit_s']} Gbit/s)" if "rate" in first else ""
    title = (
        f"{first['case']}: {first['case_about']}. {first['world_size']} ranks, {first['backend']}{where}, "
        f"{first['rounds']} rounds, peak memory {first['peak_memory_gib_all_ranks']} GiB in all"
    )
    names, ratios = ["contestant", "best_torch"], {"torch": "/ torch", "best_torch": "/ best"}
    if any(row["held_against"] for row in rows):
        names.pop()  # there is no room for it
        ratios["held_against"] = "/ hook"
    columns = [(name.replace("_", " "), f"{{{name}}}") for name in names]
    columns += [("median ms", "{median_ms:.2f}"), ("p10", "{p10_ms:.2f}"), ("p90", "{p90_ms:.2f}")]
    for other, heading in ratios.items():
        columns += [(heading, f"{{ratio_to_{other}:.3f}}"), ("paired", f"{{paired_ratio_to_{other}:.3f}}")]
    return harness.row_table(title, [*columns, ("gradients", "{gradients}")], rows, left=len(names))


if __name__ == "__main__":
    main()
