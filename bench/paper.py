"""The measurements of the DDP paper on this machine, each beside what the paper found: `python -m bench.paper --help`.

The paper is Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", PVLDB 13(12), 2020.
Its figures 6 to 12 are measured here with torch's DDP and with fastddp, over gloo on the CPU, with the ranks in two
network namespaces (`bench.network`; that takes root, `--rate loopback` does not). The machines are not comparable: what
is compared is the shape of each figure, and the two DDPs with each other.

    python -m bench.paper --json bench/results/paper.json --resume

In every round each contestant takes one step, in an order that changes; a phase counts as long as on its slowest rank.
The optimizer is SGD with momentum at a learning rate of 0: it costs what it costs, and changes nothing. After the
rounds all gradients are compared with those of torch's DDP; the exit status is 1 where one is wrong. The file is
written after each cell, and `--resume` leaves out cells that it has already, of the commit that is checked out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from bench import harness, netns, network, paper_figures, resuming
from bench.cases import Batch, case_named
from bench.contestants import EXACT, difference, twin
from bench.paper_figures import FIGURES
from fastddp.exchange import lanes
from fastddp.planning.profile import Profile
from fastddp.tools.plan.scaling import Network, predict

MODULE = "bench.paper"
_ONE_BUCKET_MB = float(1 << 20)
_EACH_ALONE_MB = 1e-6  # a byte: each gradient fills a bucket
CAPS_MB = (0, 1, 5, 10, 25, 50)  # the paper's, and 1
EVERY = (1, 2, 4, 8)
GROUPS = (1, 2, 3)
PREDICTED = (2, 4, 8, 16, 32, 64, 128, 256)
_PLANNED_AFTER = 11  # steps; then the profile is there
PHASES = ("forward", "backward", "optimizer")

# The ranks that each figure is measured on, if nobody says.
RANKS = {"6": [2], "7": [2, 4], "9": [2, 4, 8], "10": [2], "12": [2]}


def main() -> None:
    options = parse_arguments()
    reason = None if set(options.rate) == {network.LOOPBACK} else netns.unavailable()
    if reason is not None:
        print(f"{MODULE} was skipped: {reason}.")
        return
    results = resuming.opened(options)
    for figure, case, rate in itertools.product(options.figure, options.case, options.rate):
        for ranks in options.ranks or RANKS[figure]:
            cell = f"figure {figure}, {case}, {ranks} ranks, {rate}, {options.rounds} rounds, {options.threads} threads"
            results.measure_if_missing(cell, measure_cell, figure, case, ranks, rate, options)
    report(results.rows)


def measure_cell(figure: str, case: str, ranks: int, rate: str, options: argparse.Namespace) -> list[harness.Row]:
    """A row a contestant."""
    with network.cable(rate, ranks // 2) as (enter, facts):
        rows = harness.spawn_ranks(measure, (figure, case, options), ranks, options.threads, enter=enter)
    return paper_figures.beside([row | facts for row in rows])


def report(rows: Sequence[harness.Row]) -> None:
    """A table for each figure, case and network; exit status 1 where gradients were wrong."""
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    out.print(f"The paper had: {paper_figures.THERE}.\nHere: {paper_figures.HERE}.", highlight=False)
    for figure in FIGURES.values():
        tables = paper_figures.figure_tables(rows, figure)
        if tables:
            out.print(paper_figures.words(figure), highlight=False)
        for table in tables:
            out.print(table)
        for row in rows:
            if row["figure"] == figure.name and "no_prediction" in row:
                out.print(f"  Nothing is predicted for {row['case']} at {row['rate']}: {row['no_prediction']}.")
    wrong = dict.fromkeys(f"{row['contestant']} in {row['cell']}" for row in rows if row["gradients"] == "WRONG")
    if wrong:
        sys.exit(f"gradients are not what they should be: {', '.join(wrong)}")


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    harness.add_selection(parser, list(FIGURES.values()), "--figure")
    add("--case", nargs="+", default=["resnet50@4", "gpt"], help="of bench.step, @N: N times the batch (%(default)s)")
    add("--rate", nargs="+", default=["1gbit"], help=f"as for tc, or {network.LOOPBACK} (default: %(default)s)")
    add("--ranks", nargs="+", type=int, help="even, half of them at each end of the cable (default: by the figure)")
    add("--rounds", type=int, default=8, help="steps of each contestant that count (default: %(default)s)")
    add("--warmup", type=int, default=3, help="rounds before (default: %(default)s)")
    add("--threads", type=int, default=1, help="CPU threads of each rank (default: %(default)s)")
    resuming.add_options(parser, "contestant")
    options = parser.parse_args()
    try:
        for rate in options.rate:
            if rate != network.LOOPBACK:
                netns.bits_per_second(rate)
        for case in options.case:
            case_named(case)
    except ValueError as error:
        parser.error(str(error))
    if any(ranks < 2 or ranks % 2 for ranks in options.ranks or []):
        parser.error("--ranks must be even: half of them are at each end of the cable")
    if options.rounds < 1 or options.warmup < 2:
        parser.error("--rounds needs at least 1, --warmup at least 2: buckets are rebuilt after the first step")
    resuming.check(options, parser)
    return options


# --------------------------------------------------------------------------------------------------------- contestants


class Contestant:
    """A module, wrapped or not, with an optimizer, and what the rows say of it."""

    def __init__(self, columns: harness.Row, module: nn.Module) -> None:
        self.columns = columns
        self.module: Any = module
        self.every: int = columns.get("every", 1)  # backwards for one exchange
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)

    def run(self, batch: Batch) -> list[float]:
        """Milliseconds an iteration in each of PHASES, of as many iterations as an exchange takes."""
        forward = backward = 0.0
        for iteration in range(self.every):
            with self._exchanged_if(iteration == self.every - 1):
                begin = time.perf_counter()
                loss = self.module(*batch)
                middle = time.perf_counter()
                loss.backward()
                forward += middle - begin
                backward += time.perf_counter() - middle
        begin = time.perf_counter()
        self._optimizer.step()
        optimizer = time.perf_counter() - begin
        return [1e3 * seconds / self.every for seconds in (forward, backward, optimizer)]

    def _exchanged_if(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if is_last else self.module.no_sync()

    def gradients(self) -> list[Tensor]:
        """Of the last run, for one iteration."""
        return [p.grad / self.every for p in self.module.parameters() if p.grad is not None]

    def clear(self) -> None:
        """Free the gradients."""
        self._optimizer.zero_grad(set_to_none=True)


ALONE, TORCH, FASTDDP = "alone", "torch", "fastddp"
Wrap = Callable[..., nn.Module]
_WRAPS: dict[str, Wrap] = {FASTDDP: fastddp.DistributedDataParallel, TORCH: TorchDDP}


def line_up(figure: str, model: nn.Module) -> list[Contestant]:
    """Who competes in a figure: torch's DDP as it comes is always there, and so is the module alone."""
    both = _WRAPS.items()

    def make(columns: harness.Row, name: str, **options: Any) -> Contestant:
        return Contestant({"contestant": name} | columns, _WRAPS[name](twin(model), **options))

    result = [Contestant({"contestant": ALONE}, twin(model))]
    if figure == "6":
        for name, _ in both:
            result.append(make({"overlap": True}, name))
            result.append(make({"overlap": False}, name, bucket_cap_mb=_ONE_BUCKET_MB))
    elif figure == "7":
        for name, cap in itertools.product(_WRAPS, CAPS_MB):
            result.append(make({"bucket_cap_mb": cap}, name, bucket_cap_mb=cap or _EACH_ALONE_MB))
    elif figure == "9":
        result += [make({}, name) for name in _WRAPS]
        if dist.get_world_size() == 2:
            result.append(
                Contestant(
                    {"contestant": "fastddp-auto"}, fastddp.DistributedDataParallel(twin(model), bucket_cap_mb="auto")
                )
            )
    elif figure == "10":
        result += [make({"every": every}, name) for name, every in itertools.product(_WRAPS, EVERY)]
    elif figure == "12":
        for name, count in itertools.product(_WRAPS, GROUPS):
            wrapped = _over_lanes(twin(model), count) if name == FASTDDP else _in_turn(twin(model), count)
            result.append(Contestant({"contestant": name, "groups": count}, wrapped))
    return result


def _over_lanes(module: nn.Module, count: int) -> nn.Module:
    """Under fastddp, over so many lanes, whatever it would choose: lanes are made once for each group."""
    group = dist.new_group(range(dist.get_world_size()))
    with mock.patch.object(lanes, "_LANES", count):
        lanes.lanes_for(group, torch.device("cpu"))
    return fastddp.DistributedDataParallel(module, process_group=group)


def _in_turn(module: nn.Module, count: int) -> nn.Module:
    """Under torch's DDP, whose buckets go to so many groups in turn."""
    groups = [dist.new_group(range(dist.get_world_size())) for _ in range(count)]

    def deal(bucket: Any) -> torch.futures.Future[Tensor]:
        wire = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(wire, group=groups[bucket.index() % count], async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped = TorchDDP(module)
    wrapped.register_comm_hook(None, lambda state, bucket: deal(bucket))  # torch refuses annotations that are strings
    return wrapped


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(figure: str, case_name: str, options: argparse.Namespace) -> list[harness.Row]:
    """One cell on all ranks; every rank returns the same rows."""
    case = case_named(case_name)
    facts = harness.environment(MODULE, torch.device("cpu"), options.threads)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    facts |= {"figure": figure, "case": case_name, "case_about": case.about, "world_size": ranks}
    facts |= {"rounds": options.rounds, "warmup": options.warmup}
    model, batch_of = case.build(torch.device("cpu"))
    # Where lanes are measured, fastddp is to use them whatever the sizes of its buckets.
    forced = mock.patch("fastddp.engine.lanes_pay", return_value=True) if figure == "12" else contextlib.nullcontext()
    with forced:
        everyone = line_up(figure, model)
        warmup = max(options.warmup, _PLANNED_AFTER if figure == "9" else 0)
        with harness.progress(f"figure {figure}", warmup + options.rounds, show=rank == 0) as advance:
            run_rounds(everyone, range(-warmup, 0), lambda step: batch_of(rank, step), advance)
            times = run_rounds(everyone, range(options.rounds), lambda step: batch_of(rank, step), advance)
        verdicts = judge(everyone, TorchDDP(twin(model)), batch_of(rank, options.rounds + 30))
    dist.all_reduce(times, dist.ReduceOp.MAX)
    rows = [facts | columns for columns in compare(everyone, times, verdicts)]
    return rows + _predicted(facts, everyone) if figure == "9" else rows


def run_rounds(
    everyone: Sequence[Contestant], rounds: range, batch_of: Callable[[int], Batch], advance: Callable[[], None]
) -> Tensor:
    """Milliseconds on this rank, (contestants, rounds, phases)."""
    times = torch.zeros(len(everyone), len(rounds), len(PHASES), dtype=torch.float64)
    gc.disable()
    try:
        for column, number in enumerate(rounds):
            batch = batch_of(number)
            for index in harness.round_order(len(everyone), column):
                dist.barrier()
                times[index, column] = torch.tensor(everyone[index].run(batch), dtype=torch.float64)
                everyone[index].clear()
            gc.collect()  # graphs in cycles, never within a step
            advance()
    finally:
        gc.enable()
    return times


def judge(everyone: Sequence[Contestant], reference: nn.Module, batch: Batch) -> list[str]:
    """What became of each one's gradients, on all ranks."""
    torch_ddp = Contestant({}, reference)
    for _ in range(2):  # its buckets are rebuilt after the first step
        torch_ddp.clear()
        torch_ddp.run(batch)
    expected = torch_ddp.gradients()
    broken = torch.zeros(len(everyone))
    for index, contestant in enumerate(everyone):
        contestant.run(batch)
        if contestant.columns["contestant"] != ALONE:
            broken[index] = float(not _holds(contestant, expected))
        contestant.clear()
    dist.all_reduce(broken, dist.ReduceOp.MAX)
    names = [contestant.columns["contestant"] for contestant in everyone]
    return ["none reduced" if n == ALONE else "WRONG" if bad else "equal" for n, bad in zip(names, broken, strict=True)]


def _holds(contestant: Contestant, expected: Sequence[Tensor]) -> bool:
    """Whether its gradients are those of torch's DDP; a sum of several is rounded as often, and then divided."""
    got = contestant.gradients()
    if contestant.every == 1:
        return EXACT.holds(got, expected)
    tolerance = 4 * contestant.every * torch.finfo(torch.float32).eps
    return len(got) == len(expected) and all(
        difference(one, other) <= tolerance * float(other.abs().max()) for one, other in zip(got, expected, strict=True)
    )


def compare(everyone: Sequence[Contestant], times: Tensor, verdicts: Sequence[str]) -> list[harness.Row]:
    """The columns of each contestant but the one without DDP, whose times the others have in columns of their own."""
    medians = times.quantile(0.5, dim=1)  # (contestants, phases)
    alone = times[0]
    rows = []
    for contestant, mine, median, verdict in zip(everyone[1:], times[1:], medians[1:], verdicts[1:], strict=True):
        step, alone_step = mine.sum(dim=1), alone.sum(dim=1)
        row = contestant.columns | {f"{phase}_ms": float(ms) for phase, ms in zip(PHASES, median, strict=True)}
        row |= {
            "backward_alone_ms": float(medians[0, 1]),
            "exposed_ms": max(0.0, float((mine[:, 1] - alone[:, 1]).quantile(0.5))),
            "alone_ms": float(alone_step.quantile(0.5)),
            "step_ms": float(step.quantile(0.5)),
            "step_p10_ms": float(step.quantile(0.1)),
            "step_p90_ms": float(step.quantile(0.9)),
            "efficiency": float((alone_step / step).quantile(0.5)),
            "buckets": _buckets(contestant.module),
            "gradients": verdict,
        }
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def _buckets(module: nn.Module) -> int | None:
    """How many, if the DDP tells."""
    plan = getattr(module, "bucket_plan", None)
    return None if plan is None else len(plan().buckets)


def _predicted(facts: harness.Row, everyone: Sequence[Contestant]) -> list[harness.Row]:
    """A row for each number of ranks, from the profile of the last contestant, if it has one."""
    planned = everyone[-1]
    if planned.columns["contestant"] != "fastddp-auto":
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        planned.module.save_profile(path)
        profile = Profile.load(path)
    facts = facts | {"contestant": "predicted", "gradients": "predicted"}
    try:
        wire = Network.of(profile, "ring", None, None)
    except ValueError as error:
        return [facts | {"no_prediction": str(error)}]
    rows = []
    for ranks in PREDICTED:
        found = predict(profile, wire, ranks)
        low, high = (round(1e3 * seconds, 4) for seconds in (found.step_at_default.low, found.step_at_default.high))
        columns = {"world_size": ranks, "predicted_low_ms": low, "predicted_high_ms": high}
        columns |= {"best_low_ms": round(1e3 * found.step.low, 4), "best_high_ms": round(1e3 * found.step.high, 4)}
        rows.append(facts | columns | {"alone_ms": round(1e3 * found.compute, 4), "predicted_from": profile.ranks})
    return rows


if __name__ == "__main__":
    main()
