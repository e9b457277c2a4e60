"""Where compressed gradients pay, and where they do not, held against bf16: `python -m bench.pays --help`.

A cell is a model, a batch, a number of ranks and a network. In it fastddp takes steps with each wire (plain, bf16,
int8, fp8, PowerSGD with 1 and 4 vectors), and with the same in two levels where machines have several ranks each;
torch's DDP and no DDP at all are there to compare with. Rounds, contestants and checks are those of
`bench.step`, networks those of `bench.step --rate`: two network namespaces joined by a cable of that rate, which takes
root. `--rate loopback` has none.

The baseline is fastddp's bf16 hook, not plain gradients: it costs a user one line and no loss. What takes longer is
printed in red. bf16 is measured twice, and how far it is from itself is the noise floor: what differs by less is called
the same. Then the two trainings of `bench.training` run to their ends, and what counts is the time to a loss: the one
at which bf16 ends, plus 2 %.

    python -m bench.pays --json bench/results/pays.json --plot bench/results/pays.png --resume

The file is written after each cell. With `--resume` cells that it has already are left out, if they are of the commit
that is checked out. A cell that would take more minutes than it may is left out, and named.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import harness, network, pays_report, step, training
from bench.cases import CASES, case_named
from bench.losses import CLOSE, UNCOMPRESSED
from bench.pays_report import AGAIN, BASELINE, IN_TWO_LEVELS
from bench.tasks import TASKS

MODULE = "bench.pays"
WIRES = {"none": "plain"} | {name: name for name in (BASELINE, "int8", "fp8", "powersgd1", "powersgd4")}
NODES = "fastddp-nodes"  # in two levels
_TWICE = "fastddp-bf16-again"
_WINDOW = 10  # steps that a loss is the mean of

# By rate: rounds of a cell. The slower the network, the less they vary, and the longer they take.
_ROUNDS = ((5e9, 10), (5e8, 8), (0.0, 5))


def main() -> None:
    options = parse_arguments()
    rates = {*(options.rate if options.model else []), *(options.training_rate if options.task else [])}
    if network.is_skipped(MODULE, rates):
        return
    results = Results(options.json, options.resume)
    for model, batch, ranks, rate in itertools.product(options.model, options.batch, options.ranks, options.rate):
        rounds = options.rounds or rounds_at(rate)
        minutes = needs_minutes(model, batch, ranks, rate, rounds + options.warmup)
        if minutes > options.longest:
            print(
                f"Left out: {model} x{batch} on {ranks} ranks at {rate}, which would take about {minutes:.1f} minutes."
            )
            continue
        cell = f"{model} x{batch}, {ranks} ranks, {rate}, {rounds} rounds, {options.threads} threads"
        results.measure_if_missing(cell, measure_steps, model, batch, ranks, rate, rounds, options)
    for task, ranks, rate in itertools.product(options.task, options.training_ranks, options.training_rate):
        for seed in range(options.seeds):
            steps = options.steps or TASKS[task]().steps
            cell = f"{task}, {ranks} ranks, {rate}, {steps} steps, seed {seed}, {options.threads} threads"
            results.measure_if_missing(cell, measure_trainings, task, ranks, rate, steps, seed, options)
    report(results.rows, options)


class Results:
    """The rows of one file, or of none, a cell at a time.

    A cell is a string that says all that was chosen for it; each row has it in its column `cell`. What counts as there
    are cells of the commit that is checked out, if nothing in the working tree differs from it.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.rows: list[harness.Row] = []
        self._path = path
        if path is not None and resume and path.exists():
            now = harness.environment("", torch.device("cpu"), 1)
            self.rows = still_valid(json.loads(path.read_text()), now)

    def measure_if_missing(self, cell: str, measure: Callable[..., Sequence[harness.Row]], *arguments: Any) -> None:
        """Adds what `measure` returns for these arguments, and writes the file; nothing where the cell is there."""
        if any(row["cell"] == cell for row in self.rows):
            return
        self.rows += [{"cell": cell} | row for row in measure(*arguments)]
        if self._path is not None:
            harness.write_json(self._path, self.rows)


def still_valid(rows: Sequence[harness.Row], now: harness.Row) -> list[harness.Row]:
    """Those that would come out again: of `now`'s commit, without changes to it then and now.

    >>> rows = [{"commit": "a", "dirty": False}, {"commit": "a", "dirty": True}, {"commit": "b", "dirty": False}]
    >>> still_valid(rows, {"commit": "a", "dirty": False})
    [{'commit': 'a', 'dirty': False}]
    >>> still_valid(rows, {"commit": "a", "dirty": True})
    []
    """
    return [row for row in rows if row["commit"] == now["commit"] and row["dirty"] is now["dirty"] is False]


def report(rows: Sequence[harness.Row], options: argparse.Namespace) -> None:
    """Tables, picture, and exit status 1 where gradients were wrong."""
    if not rows:
        return
    harness.report(rows, pays_report.tables(rows), None)
    if options.markdown:
        for kind in dict.fromkeys(row["kind"] for row in rows):
            print(pays_report.markdown(rows, kind), end="\n\n")
    if options.plot:
        pays_report.draw(options.plot, rows)
    step.exit_if_wrong([row for row in rows if row["kind"] == "step"])


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    default = "(default: %(default)s)"

    def several(name: str, about: str, *values: Any, **options: Any) -> None:
        parser.add_argument(name, nargs="*", default=[*values], help=f"{about} {default}", **options)

    several("--model", "of bench.step", "resnet50", "gpt", "vit-tiny", choices=[case.name for case in CASES])
    several("--batch", "times the model's own", 1, 4, type=int)
    several("--ranks", "even, half of them at each end of the cable", 2, 4, type=int)
    several("--rate", f"as for tc, or {network.LOOPBACK}", "200mbit", "1gbit", "10gbit")
    several("--task", "trainings", *TASKS, choices=list(TASKS))
    several("--training-rate", "of trainings", "1gbit")
    several("--training-ranks", "of trainings", 2, type=int)
    add = parser.add_argument
    add("--seeds", type=int, default=1, help=f"runs of each training {default}")
    add("--steps", type=int, help="of each training (default: the task's own)")
    add("--rounds", type=int, help="steps of each contestant that count (default: by the rate)")
    add("--longest", type=float, default=2.5, metavar="MINUTES", help=f"that a cell of steps may take {default}")
    add("--plot", type=Path, metavar="FILE", help="draw the map (takes matplotlib)")
    add("--markdown", action="store_true", help="print the tables for docs/compression.md too")
    add("--resume", action="store_true", help="leave out cells that are in --json already, of the same commit")
    harness.add_common(parser, "cell and wire", warmup=3, threads=1)
    options = parser.parse_args()
    network.check_rates(parser, [*options.rate, *options.training_rate])
    if any(ranks < 2 or ranks % 2 for ranks in (*options.ranks, *options.training_ranks)):
        parser.error("--ranks must be even: half of them are at each end of the cable")
    counts = (*options.batch, options.seeds, options.steps or 1, options.rounds or 1)
    if min(counts) < 1 or options.warmup < 2:
        parser.error("--batch, --seeds, --steps and --rounds must be at least 1, --warmup at least 2")
    if options.resume and options.json is None:
        parser.error("--resume takes --json, which says what is there")
    return options


def rounds_at(rate: str) -> int:
    """How many rounds a rate gets if nobody says.

    >>> rounds_at("10gbit"), rounds_at("1gbit"), rounds_at("100mbit"), rounds_at("loopback")
    (10, 8, 5, 10)
    """
    return next(rounds for least, rounds in _ROUNDS if network.bits_per_second(rate) >= least)


def needs_minutes(model: str, batch: int, ranks: int, rate: str, rounds: int) -> float:
    """About what a cell takes on two cores such as those of step.json: good enough to leave the longest ones out."""
    wires = len(WIRES) * len(levels(ranks)) + 3
    own = 0.22 if model == "gpt" else 1.1e-9 * _elements(model)  # a step without DDP, of two ranks
    compute = wires * batch * own * max(1, ranks / 2)
    plain = 32 * _elements(model) / network.bits_per_second(rate) * 2 * (ranks - 1) / ranks
    # Of plain, torch, bf16 twice, int8, fp8 and PowerSGD; in two levels of bf16 once, and without torch.
    wire = plain * (3.5 + (2.0 if len(levels(ranks)) > 1 else 0))
    return (20 + (compute + wire) * (rounds + 2)) / 60  # 2: gradients are checked


@functools.cache
def _elements(model: str) -> int:
    return sum(parameter.numel() for parameter in case_named(model).build(torch.device("cpu"))[0].parameters())


# --------------------------------------------------------------------------------------------------------------- steps


def levels(ranks: int) -> list[str]:
    """The contestants that take each wire: two levels are for machines with several ranks."""
    return ["fastddp", NODES] if ranks > 2 else ["fastddp"]


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
        device="cpu",
        compiled=False,
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
