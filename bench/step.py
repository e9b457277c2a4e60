"""Times a training step with no DDP, with torch's DDP and with fastddp, all in one run: `python -m bench.step --help`.

In every round each contestant takes one step on the same batch, in an order that changes from round to round. A step is
timed on each rank from a barrier before forward to the end of backward (on a GPU: until it is idle again), and counts
as long as on its slowest rank. Gradients are freed after it, untimed. Before and after the rounds every contestant's
gradients are compared with torch's: whoever differs is reported as WRONG, and the bench exits with 1.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bench import harness
from bench.cases import CASES, Batch
from bench.contestants import CONTESTANTS, REFERENCE, Contestant, Step

MODULE = "bench.step"


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
        return
    # Read when torch is imported, which the ranks do anew; threads that torch did not start (gloo's) obey it too.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    rows = []
    for name in options.case:  # fresh processes, so that no case inherits another's heap
        rows += spawn_ranks(name, options)
    finish(rows, options)


def parse_arguments() -> argparse.Namespace:
    """The command line, complete and with the backend decided. Names stay names: this travels to spawned ranks."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").split(":")[0] + ".")
    cases = [case.name for case in CASES]
    contestants = [contestant.name for contestant in CONTESTANTS]
    parser.add_argument("--case", nargs="+", choices=cases, default=cases, help="default: all")
    parser.add_argument(
        "--contestant",
        nargs="+",
        choices=contestants,
        default=contestants,
        help=f"default: all; {REFERENCE} is always measured",
    )
    parser.add_argument("--rounds", type=int, default=36, help="steps of each contestant that count (default: 36)")
    parser.add_argument("--warmup", type=int, default=4, help="rounds before (default: 4; torch rebuilds its buckets)")
    parser.add_argument("--bucket-cap-mb", type=float, help="for all DDPs (default: each one's own)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there are GPUs, else gloo")
    parser.add_argument("--ranks", type=int, help="processes on this machine (default: a GPU each, or 2 with gloo)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each case and contestant")
    options = parser.parse_args()
    if options.rounds < 1 or options.warmup < 2:
        parser.error("--rounds needs at least 1, --warmup at least 2: buckets are rebuilt after the first step")
    if options.backend is None:
        options.backend = "nccl" if torch.cuda.is_available() else "gloo"
    return options


def rank_device(backend: str, local_rank: int) -> torch.device:
    """NCCL moves GPU memory, a GPU a rank; gloo is measured on the CPU."""
    return torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")


def spawn_ranks(case_name: str, options: argparse.Namespace) -> list[harness.Row]:
    """Measures one case in processes of its own."""
    ranks = options.ranks or (torch.cuda.device_count() if options.backend == "nccl" else 2)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as meeting_place:
        spawn(_spawned_rank, (ranks, meeting_place, case_name, options, results), nprocs=ranks)
    return results.get()


def _spawned_rank(
    rank: int, ranks: int, meeting_place: str, case_name: str, options: argparse.Namespace, results: Any
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(options.threads)
    dist.init_process_group(options.backend, f"file://{meeting_place}/store", rank=rank, world_size=ranks)
    rows = measure(case_name, options)
    if rank == 0:
        results.put(rows)
    dist.barrier()  # a rank that leaves early can abort one that still uses the group
    dist.destroy_process_group()


def measure(case_name: str, options: argparse.Namespace) -> list[harness.Row]:
    """Runs one case on all ranks; every rank returns the same rows."""
    case = next(case for case in CASES if case.name == case_name)
    contestants = [c for c in CONTESTANTS if c.name == REFERENCE or c.name in options.contestant]
    device = rank_device(options.backend, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts = harness.environment(MODULE, device, options.threads)
    rank = dist.get_rank()
    model, batch_of = case.build(device)
    steps = [contestant.prepare(model, options.bucket_cap_mb) for contestant in contestants]

    with harness.progress(case.name, options.warmup + options.rounds, show=rank == 0) as advance:
        _run_rounds(steps, range(-options.warmup, 0), lambda step: batch_of(rank, step), device, advance)
        # The checks' batches differ from those of the steps before: gradients that a step left behind would be seen.
        before = _gradient_differences(contestants, steps, batch_of(rank, options.rounds))
        times = _run_rounds(steps, range(options.rounds), lambda step: batch_of(rank, step), device, advance)
        after = _gradient_differences(contestants, steps, batch_of(rank, options.rounds + 1))

    dist.all_reduce(times, dist.ReduceOp.MAX)
    memory = torch.tensor(float(harness.peak_memory_bytes()), dtype=torch.float64, device=device)
    dist.all_reduce(memory)
    facts |= {
        "case": case.name,
        "case_about": case.about,
        "world_size": dist.get_world_size(),
        "backend": options.backend,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "bucket_cap_mb": options.bucket_cap_mb,
        "parameters": len(list(model.parameters())),
        "elements": sum(parameter.numel() for parameter in model.parameters()),
        "peak_memory_gib_all_ranks": round(float(memory) / 2**30, 2),
    }
    samples = dict(zip((contestant.name for contestant in contestants), times.tolist(), strict=True))
    differences = [max(pair) for pair in zip(before, after, strict=True)]
    return [facts | columns for columns in compare(contestants, samples, differences)]


def _run_rounds(
    steps: Sequence[Step],
    rounds: range,
    batch_of: Callable[[int], Batch],
    device: torch.device,
    advance: Callable[[], None],
) -> Tensor:
    """Milliseconds of each step on this rank: a row for each contestant, a column for each round."""
    times = torch.zeros(len(steps), len(rounds), dtype=torch.float64, device=device)
    gc.collect()
    gc.disable()
    try:
        for column, round_index in enumerate(rounds):
            batch = batch_of(round_index)
            for index in harness.round_order(len(steps), column):
                times[index, column] = _timed(steps[index], batch, device)
                steps[index].clear()
            # Cycles, which can hold an autograd graph and its gradients, are freed here and never within a step.
            gc.collect()
            advance()
    finally:
        gc.enable()
    return times


def _timed(step: Step, batch: Batch, device: torch.device) -> float:
    dist.barrier()
    _wait_for(device)
    start = time.perf_counter()
    step.run(batch)
    _wait_for(device)
    return 1e3 * (time.perf_counter() - start)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gradient_differences(contestants: Sequence[Contestant], steps: Sequence[Step], batch: Batch) -> list[float]:
    """The largest |gradient - torch's gradient| of each contestant over all parameters and ranks; 0.0 is equal.

    A sum of two does not depend on their order, so two ranks must agree with torch's DDP in every bit. With more ranks
    the order depends on where in its bucket a gradient lies: differences up to a few roundings count as none.
    """
    reference = steps[[contestant.name for contestant in contestants].index(REFERENCE)]
    reference.run(batch)
    expected = reference.gradients()  # not views of a bucket: they outlive clear()
    reference.clear()
    differences = []
    for contestant, step in zip(contestants, steps, strict=True):
        worst = 0.0
        if contestant.semantics != "floor":
            step.run(batch)
            worst = _largest_difference(step.gradients(), expected)
            step.clear()
        differences.append(worst)
    everywhere = torch.tensor(differences, dtype=torch.float64, device=expected[0].device)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return everywhere.tolist()


def _largest_difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    if len(got) != len(expected):
        return math.inf
    return max(_difference(*pair) for pair in zip(got, expected, strict=True))


def _difference(got: Tensor, expected: Tensor) -> float:
    if torch.equal(got, expected):
        return 0.0
    if got.shape != expected.shape:
        return math.inf
    difference = float((got - expected).abs().max())
    roundings = 4 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    if dist.get_world_size() > 2 and difference <= roundings:
        return 0.0
    return math.inf if math.isnan(difference) else difference


def compare(
    contestants: Sequence[Contestant], samples: dict[str, list[float]], differences: Sequence[float]
) -> list[harness.Row]:
    """The columns of one case's contestants: percentiles, ratios and the verdict on the gradients."""
    percentiles = {name: harness.Percentiles.of(times) for name, times in samples.items()}
    rows = []
    for contestant, difference in zip(contestants, differences, strict=True):
        name = contestant.name
        rivals = [c.name for c in contestants if c.baseline and c.semantics == contestant.semantics]
        best = min(rivals, key=lambda rival: percentiles[rival].median) if rivals else None
        row = {
            "contestant": name,
            "semantics": contestant.semantics,
            "median_ms": percentiles[name].median,
            "p10_ms": percentiles[name].p10,
            "p90_ms": percentiles[name].p90,
            "ratio_to_torch": percentiles[name].median / percentiles[REFERENCE].median,
            "paired_ratio_to_torch": harness.paired_ratio(samples[name], samples[REFERENCE]),
            "best_torch": best,
            "ratio_to_best_torch": percentiles[name].median / percentiles[best].median if best else None,
            "paired_ratio_to_best_torch": harness.paired_ratio(samples[name], samples[best]) if best else None,
            "gradients": "none reduced" if contestant.semantics == "floor" else "WRONG" if difference else "equal",
            "largest_difference": difference if math.isfinite(difference) else None,
        }
        rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def finish(rows: list[harness.Row], options: argparse.Namespace) -> None:
    """Prints a table for each case, writes the rows, and exits with 1 when a contestant's gradients were wrong."""
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    for case in dict.fromkeys(row["case"] for row in rows):
        out.print(case_table([row for row in rows if row["case"] == case]))
    if options.json:
        harness.write_json(options.json, rows)
    wrong = [f"{row['contestant']} on {row['case']}" for row in rows if row["gradients"] == "WRONG"]
    if wrong:
        sys.exit(f"gradients differ from those of torch's DDP: {', '.join(wrong)}")


def case_table(rows: Sequence[harness.Row]) -> Any:
    first = rows[0]
    title = (
        f"{first['case']}: {first['case_about']}. {first['world_size']} ranks, {first['backend']}, "
        f"{first['rounds']} rounds, peak memory {first['peak_memory_gib_all_ranks']} GiB in all"
    )
    timing = ["median ms", "p10", "p90"]
    columns = ["contestant", "best torch", *timing, "/ torch", "paired", "/ best", "paired", "gradients"]
    cells = []
    for row in rows:
        against_best = ["-", "-"]
        if row["best_torch"]:
            against_best = [f"{row['ratio_to_best_torch']:.3f}", f"{row['paired_ratio_to_best_torch']:.3f}"]
        cells.append(
            [
                row["contestant"],
                row["best_torch"] or "-",
                *(f"{row[column]:.2f}" for column in ("median_ms", "p10_ms", "p90_ms")),
                *(f"{row[column]:.3f}" for column in ("ratio_to_torch", "paired_ratio_to_torch")),
                *against_best,
                row["gradients"],
            ]
        )
    return harness.table(title, columns, cells, left=2)


if __name__ == "__main__":
    main()
