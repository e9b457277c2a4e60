"""Times `DistributedDataParallel(...)`, torch's and fastddp's, all in one run: `python -m bench.construction --help`.

In every round each contestant wraps the same module once, in an order that changes from round to round, and what the
round before has left is freed first, untimed. Wrapping is timed on each rank from a barrier to the constructor's
return, and counts as long as on its slowest rank. Before and after the rounds every contestant wraps a module whose
values differ between ranks: if the ranks do not all end with rank 0's, it is reported as WRONG, and the bench exits
with 1. `torch-again` is torch's DDP a second time: how far it is from 1 is what this run cannot tell apart.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from bench import harness
from bench.cases import Shape, gpt2_shapes

MODULE = "bench.construction"
REFERENCE = "torch"

Wrap = Callable[[nn.Module], nn.Module]
CONTESTANTS: dict[str, Wrap] = {
    REFERENCE: TorchDDP,
    "torch-again": TorchDDP,
    "fastddp": fastddp.DistributedDataParallel,
}
CASES: dict[str, tuple[str, Callable[[], list[Shape]]]] = {
    "gpt2": ("GPT-2, 124 M parameters in 148 tensors", gpt2_shapes),
    "5000x8sq": ("5000 parameters of 8 x 8", lambda: [(8, 8)] * 5000),
}


def main() -> None:
    options = parse_arguments()
    rows = [
        row
        for name in options.case
        for row in harness.spawn_ranks(measure, (name, options), options.ranks, options.threads)
    ]
    columns = [("contestant", "{contestant}"), ("median ms", "{median_ms:.2f}"), ("p10", "{p10_ms:.2f}")]
    columns += [("p90", "{p90_ms:.2f}"), ("/ torch", "{ratio_to_torch:.3f}"), ("paired", "{paired_ratio_to_torch:.3f}")]
    columns += [("values", "{values}")]
    tables = [
        harness.row_table(
            f"{own[0]['case_about']}. {own[0]['world_size']} ranks, {options.rounds} rounds", columns, own
        )
        for own in harness.grouped(rows, "case").values()
    ]
    harness.report(rows, tables, options.json)
    harness.exit_if_wrong(rows, "{contestant} on {case}", "ranks did not start from rank 0's values")


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), help="default: %(default)s")
    harness.add_common(parser, "case and contestant", rounds=24, warmup=2, ranks=2, threads=1)
    return parser.parse_args()


def measure(case_name: str, options: argparse.Namespace) -> list[harness.Row]:
    """Runs one case on all ranks; every rank returns the same rows."""
    about, shapes = CASES[case_name]
    facts = harness.environment(MODULE, torch.device("cpu"), options.threads)
    module = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes())
    with harness.progress(case_name, options.warmup + options.rounds, show=dist.get_rank() == 0) as advance:
        _run_rounds(module, options.warmup, advance)
        before = [starts_from_rank_0(wrap, module) for wrap in CONTESTANTS.values()]
        times = _run_rounds(module, options.rounds, advance)
        after = [starts_from_rank_0(wrap, module) for wrap in CONTESTANTS.values()]
    dist.all_reduce(times, dist.ReduceOp.MAX)
    facts |= {
        "case": case_name,
        "case_about": about,
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "rounds": options.rounds,
        "warmup": options.warmup,
        "parameters": len(module),
        "elements": sum(parameter.numel() for parameter in module),
    }
    samples = dict(zip(CONTESTANTS, times.tolist(), strict=True))
    right = [all(pair) for pair in zip(before, after, strict=True)]
    return [facts | row for row in compare(samples, right)]


def _run_rounds(module: nn.Module, rounds: int, advance: Callable[[], None]) -> torch.Tensor:
    """Milliseconds of each construction on this rank: a row for each contestant, a column for each round."""
    wraps = list(CONTESTANTS.values())
    times = torch.zeros(len(wraps), rounds, dtype=torch.float64)
    for place, _, index in harness.turns(len(wraps), range(rounds), advance):
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        wrapped = wraps[index](module)
        times[index, place] = 1e3 * (time.perf_counter() - start)
        del wrapped
    return times


@torch.no_grad()
def starts_from_rank_0(wrap: Wrap, module: nn.Module) -> bool:
    """Whether all ranks hold rank 0's values when they have wrapped a module that held each rank's own."""
    for number, parameter in enumerate(module.parameters()):
        parameter.fill_(1000 * dist.get_rank() + number % 7 + 1)
    wrap(module)
    mine = all(bool((p == number % 7 + 1).all()) for number, p in enumerate(module.parameters()))
    everybody = torch.tensor(mine, dtype=torch.int)
    dist.all_reduce(everybody, dist.ReduceOp.MIN)
    return bool(everybody)


def compare(samples: dict[str, list[float]], right: Sequence[bool]) -> list[harness.Row]:
    """The columns of one case's contestants."""
    reference = harness.Percentiles.of(samples[REFERENCE]).median
    rows: list[harness.Row] = []
    for (name, times), holds in zip(samples.items(), right, strict=True):
        percentiles = harness.Percentiles.of(times)
        numbers = percentiles.columns("ms") | {
            "ratio_to_torch": percentiles.median / reference,
            "paired_ratio_to_torch": harness.paired_ratio(times, samples[REFERENCE]),
        }
        verdict = "rank 0's" if holds else "WRONG"
        rows.append({"contestant": name} | harness.rounded(numbers, 6) | {"values": verdict})
    return rows


if __name__ == "__main__":
    main()
