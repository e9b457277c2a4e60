"""Where compressed gradients pay, and where they do not, held against bf16: `python -m bench.pays --help`.

A cell is a model, a batch, a number of ranks and a network. In it fastddp takes steps with each wire (plain, bf16,
int8, fp8, PowerSGD with 1 and 4 vectors, what auto_hook chooses), and with the same in two levels where machines have
several ranks each; torch's DDP and no DDP at all are there to compare with. Rounds, contestants and checks are those of
`bench.step`, networks those of `bench.network`: two network namespaces joined by a cable of that rate, which takes
root. `--rate loopback` has none.

The baseline is fastddp's bf16 hook, not plain gradients: it costs a user one line and no loss. What takes longer is
printed in red. bf16 is measured twice, and how far it is from itself is the noise floor: what differs by less is called
the same. Then the two trainings of `bench.training` run to their ends, and what counts is the time to a loss: the one
at which bf16 ends, plus 2 %.

    python -m bench.pays --json bench/results/pays.json --plot bench/results/pays.png --resume

The file is written after each cell. With `--resume` cells that it has already are left out, if they are of the commit
that is checked out. `--full` adds models, batches, ranks, rates and seeds, and takes hours. A cell that would take more
minutes or memory than it may is left out, and named.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import contestants, harness, netns, network, pays_report, resuming, step, training
from bench.cases import CASES, case_named
from bench.losses import CLOSE, UNCOMPRESSED
from bench.pays_report import AGAIN, AUTO, BASELINE, IN_TWO_LEVELS
from bench.tasks import TASKS

MODULE = "bench.pays"
WIRES = {"none": "plain", BASELINE: BASELINE, "int8": "int8", "fp8": "fp8"} | {
    name: name for name in ("powersgd1", "powersgd4", AUTO)
}
NODES = "fastddp-nodes"  # in two levels
_TWICE = "fastddp-bf16-again"
_WINDOW = 10  # steps that a loss is the mean of

_DEFAULT: dict[str, Any] = {
    "model": ["resnet50", "gpt", "vit-tiny"],
    "batch": [1, 4],
    "ranks": [2, 4],
    "rate": ["200mbit", "1gbit", "10gbit"],
    "training_rate": ["1gbit"],
    "training_ranks": [2],
    "seeds": 1,
    "longest": 2.5,
}
_FULL: dict[str, Any] = {
    "model": ["500x32sq", "resnet50", "gpt2", "gpt", "vit-tiny"],
    "batch": [1, 4, 16],
    "ranks": [2, 4, 8],
    "rate": ["100mbit", "200mbit", "1gbit", "2.5gbit", "10gbit"],
    "training_rate": ["100mbit", "1gbit", "10gbit"],
    "training_ranks": [2, 4],
    "seeds": 3,
    "longest": 60.0,
}
# By rate: rounds of a cell. The slower the network, the less they vary, and the longer they take.
_ROUNDS = ((5e9, 10), (5e8, 8), (0.0, 5))


def main() -> None:
    options = parse_arguments()
    rates = {*(options.rate if options.model else []), *(options.training_rate if options.task else [])}
    reason = None if rates <= {network.LOOPBACK} else netns.unavailable()
    if reason is not None:
        print(f"{MODULE} was skipped: {reason}.")
        return
    results = resuming.opened(options)
    out = harness.console()
    for model, batch, ranks, rate in itertools.product(options.model, options.batch, options.ranks, options.rate):
        rounds = options.rounds or rounds_at(rate)
        memory, minutes = needs_gib(model, ranks), needs_minutes(model, batch, ranks, rate, rounds + options.warmup)
        if memory > options.memory_gib or minutes > options.longest:
            what = f"{memory:.0f} GiB" if memory > options.memory_gib else f"{minutes:.1f} minutes"
            out.print(f"Left out: {model} x{batch} on {ranks} ranks at {rate}, which would take about {what}.")
            continue
        cell = f"{model} x{batch}, {ranks} ranks, {rate}, {rounds} rounds, {options.threads} threads"
        results.measure_if_missing(cell, measure_steps, model, batch, ranks, rate, rounds, options)
    for task, ranks, rate in itertools.product(options.task, options.training_ranks, options.training_rate):
        for seed in range(options.seeds):
            steps = options.steps or TASKS[task]().steps
            cell = f"{task}, {ranks} ranks, {rate}, {steps} steps, seed {seed}, {options.threads} threads"
            results.measure_if_missing(cell, measure_trainings, task, ranks, rate, steps, seed, options)
    report(results.rows, options)


def report(rows: Sequence[harness.Row], options: argparse.Namespace) -> None:
    """Tables, picture, and exit status 1 where gradients were wrong."""
    if not rows:
        return
    out = harness.console()
    out.print(harness.describe(rows[0]), highlight=False)
    for table in pays_report.tables(rows):
        out.print(table)
    if options.markdown:
        for kind in dict.fromkeys(row["kind"] for row in rows):
            print(pays_report.markdown(rows, kind), end="\n\n")
    if options.plot:
        pays_report.draw(options.plot, rows)
    step.exit_if_wrong([row for row in rows if row["kind"] == "step"])


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    models = [case.name for case in CASES]
    add("--full", action="store_true", help="the long grid; what is named below still counts")
    add("--model", nargs="*", choices=models, metavar="MODEL", help=f"of {', '.join(models)} ({_of('model')})")
    add("--batch", nargs="+", type=int, help=f"times the model's own ({_of('batch')})")
    add("--ranks", nargs="+", type=int, help=f"even, half of them at each end of the cable ({_of('ranks')})")
    add("--rate", nargs="+", help=f"as for tc, or {network.LOOPBACK} ({_of('rate')})")
    add("--task", nargs="*", choices=list(TASKS), default=list(TASKS), help="trainings (default: %(default)s)")
    add("--training-rate", nargs="+", help=f"of trainings ({_of('training_rate')})")
    add("--training-ranks", nargs="+", type=int, help=f"of trainings ({_of('training_ranks')})")
    add("--seeds", type=int, help=f"runs of each training ({_of('seeds')})")
    add("--steps", type=int, help="of each training (default: the task's own)")
    add("--rounds", type=int, help="steps of each contestant that count (default: by the rate)")
    add("--warmup", type=int, default=3, help="rounds before (default: %(default)s; PowerSGD starts in the third)")
    add("--threads", type=int, default=1, help="CPU threads of each rank (default: %(default)s)")
    add("--longest", type=float, metavar="MINUTES", help=f"that a cell of steps may take ({_of('longest')})")
    add("--memory-gib", type=float, default=_memory_gib(), help="that a cell may take (default: %(default).0f)")
    resuming.add_options(parser, "wire")
    add("--plot", type=Path, metavar="FILE", help="draw the map (takes matplotlib)")
    add("--markdown", action="store_true", help="print the tables for docs/compression.md too")
    options = parser.parse_args()
    for name, value in (_FULL if options.full else _DEFAULT).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        for rate in (*options.rate, *options.training_rate):
            if rate != network.LOOPBACK:
                netns.bits_per_second(rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    if any(ranks < 2 or ranks % 2 for ranks in (*options.ranks, *options.training_ranks)):
        parser.error("--ranks must be even: half of them are at each end of the cable")
    counts = (*options.batch, options.seeds, options.steps or 1, options.rounds or 1)
    if min(counts) < 1 or options.warmup < 2:
        parser.error("--batch, --seeds, --steps and --rounds must be at least 1, --warmup at least 2")
    resuming.check(options, parser)
    return options


def _of(name: str) -> str:
    return f"default: {_DEFAULT[name]}, with --full {_FULL[name]}"


def _memory_gib() -> float:
    """Of this machine, less what others need."""
    return 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def rounds_at(rate: str) -> int:
    """How many rounds a rate gets if nobody says.

    >>> rounds_at("10gbit"), rounds_at("1gbit"), rounds_at("100mbit"), rounds_at("loopback")
    (10, 8, 5, 10)
    """
    bits = float("inf") if rate == network.LOOPBACK else netns.bits_per_second(rate)
    return next(rounds for least, rounds in _ROUNDS if bits >= least)


def needs_gib(model: str, ranks: int) -> float:
    """About what all ranks take: each contestant keeps buckets, and those with error feedback an error."""
    fp32 = 4 * _elements(model) / 2**30
    # Parameters and noise once; buckets of each; errors of four hooks; PowerSGD's matrices; gradients of one at a time.
    wires = len(WIRES) * len(levels(ranks))
    return ranks * (fp32 * (3 + wires + 2 + 4 * len(levels(ranks))) + 0.3)


def needs_minutes(model: str, batch: int, ranks: int, rate: str, rounds: int) -> float:
    """About what a cell takes on two cores such as those of step.json: good enough to leave the longest ones out."""
    wires = len(WIRES) * len(levels(ranks)) + 3
    own = 0.22 if model == "gpt" else 1.1e-9 * _elements(model)  # a step without DDP, of two ranks
    compute = wires * batch * own * max(1, ranks / 2)
    bits = float("inf") if rate == network.LOOPBACK else netns.bits_per_second(rate)
    plain = 32 * _elements(model) / bits * 2 * (ranks - 1) / ranks
    # Of plain, torch, bf16 twice, int8, fp8, PowerSGD and auto; in two levels of bf16 once, and without torch.
    wire = plain * (3.9 + (2.4 if len(levels(ranks)) > 1 else 0))
    of_auto = 11 * plain * len(levels(ranks))  # eight plain steps, and others
    return (20 + (compute + wire) * (rounds + 2) + of_auto) / 60  # 2: gradients are checked


@functools.cache
def _elements(model: str) -> int:
    return sum(parameter.numel() for parameter in case_named(model).build(torch.device("cpu"))[0].parameters())


# --------------------------------------------------------------------------------------------------------------- steps


def levels(ranks: int) -> list[str]:
    """The contestants that take each wire: two levels are for machines with several ranks, where fastddp has them."""
    exists = any(contestant.name == NODES for contestant in contestants.CONTESTANTS)
    return ["fastddp", NODES] if exists and ranks > 2 else ["fastddp"]


def measure_steps(
    model: str, batch: int, ranks: int, rate: str, rounds: int, options: argparse.Namespace
) -> list[harness.Row]:
    """One cell: a row a contestant."""
    of_step = argparse.Namespace(
        module=MODULE,
        backend="gloo",
        ranks=ranks,
        threads=options.threads,
        rounds=rounds,
        warmup=options.warmup,
        contestant=["alone", *levels(ranks), _TWICE],
        hook=list(WIRES),
        bucket_cap_mb=None,
        keep_samples=True,
    )
    name = model if batch == 1 else f"{model}@{batch}"
    with network.cable(rate, ranks // 2) as (enter, facts):
        rows = step.spawn_ranks(name, of_step, enter)
    columns = {"kind": "step", "model": model, "batch": batch}
    named = [columns | row | facts | {"wire": wire_of(row["contestant"], row["hook"])} for row in rows]
    return pays_report.judged_steps(named)


def wire_of(contestant: str, hook: str) -> str:
    """What the tables call a contestant.

    >>> wire_of("fastddp", "none"), wire_of("fastddp+bf16", "bf16"), wire_of("fastddp-nodes+int8", "int8")
    ('plain', 'bf16', 'int8-nodes')
    >>> wire_of("fastddp-bf16-again", "bf16"), wire_of("torch", "none"), wire_of("alone", "none")
    ('bf16-again', 'torch', 'alone')
    """
    if contestant == _TWICE:
        return AGAIN
    if not contestant.startswith("fastddp"):
        return contestant
    return WIRES[hook] + (IN_TWO_LEVELS if contestant.startswith(NODES) else "")


# ----------------------------------------------------------------------------------------------------------- trainings


def measure_trainings(
    task: str, ranks: int, rate: str, steps: int, seed: int, options: argparse.Namespace
) -> list[harness.Row]:
    """One cell: a row a wire, each trained once."""
    wires = [*WIRES.values()]
    if len(levels(ranks)) > 1:
        wires += [f"{wire}{IN_TWO_LEVELS}" for wire in wires]
    with network.cable(rate, ranks // 2) as (enter, facts):
        arguments = (task, [*wires, AGAIN], steps, seed, options.threads)
        rows = harness.spawn_ranks(train_all, arguments, ranks, options.threads, enter=enter)
    return pays_report.judged_trainings([row | facts for row in rows])


def train_all(task_name: str, wires: Sequence[str], steps: int, seed: int, threads: int) -> list[harness.Row]:
    """Trains with each wire on all ranks; every rank returns the same rows."""
    task = replace(TASKS[task_name](), steps=steps)
    power_sgd = training.PowerSGDOptions(start=max(2, steps // 10))
    facts = harness.environment(MODULE, torch.device("cpu"), threads)
    facts |= {"kind": "training", "task": task.name, "task_about": task.about, "seed": seed, "steps": steps}
    facts |= {"world_size": dist.get_world_size(), "powersgd_start": power_sgd.start, "loss_window": _WINDOW}
    outcomes = {}
    with harness.progress(task.name, len(wires), show=dist.get_rank() == 0) as advance:
        for wire in wires:
            outcomes[wire] = training.train(task, setting_of(wire), seed, power_sgd)
            advance()
    curves = {wire: pays_report.smoothed(outcome.losses, _WINDOW) for wire, outcome in outcomes.items()}
    target = curves[BASELINE][-1] * (1 + CLOSE)
    rows = []
    for wire, outcome in outcomes.items():
        reached = pays_report.first_step_at(curves[wire], target)
        ends = outcome.step_ends
        columns = {
            "wire": wire,
            "target_loss": round(target, 6),
            "steps_to_loss": None if reached is None else reached + 1,
            "seconds_to_loss": None if reached is None else round(ends[reached], 3),
            "median_ms": round(harness.Percentiles.of(step_times(ends)).median, 3),
            "seconds": round(ends[-1], 3),
            "final_loss": round(curves[wire][-1], 6),
            "evaluation_loss": round(outcome.evaluation_loss, 6),
            "ranks_agree": len(set(outcome.digests)) == 1,
        }
        rows.append(facts | columns)
    return rows


def step_times(ends: Sequence[float]) -> list[float]:
    """Milliseconds of each step, of their ends in seconds.

    >>> step_times([0.5, 0.75])
    [500.0, 250.0]
    """
    return [1e3 * (end - begin) for begin, end in zip([0.0, *ends[:-1]], ends, strict=True)]


def setting_of(wire: str) -> str:
    """What `bench.training` calls it.

    >>> setting_of("plain"), setting_of("plain-nodes"), setting_of("bf16-again"), setting_of("int8")
    ('uncompressed', 'uncompressed-nodes', 'bf16', 'int8')
    """
    return BASELINE if wire == AGAIN else wire.replace("plain", UNCOMPRESSED)


if __name__ == "__main__":
    main()
