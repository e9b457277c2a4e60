"""Where compressed gradients pay, and where they do not, held against bf16: `python -m bench.pays --help`.

A cell is a model, a batch, a number of ranks and a network. In it fastddp takes steps with each wire (plain, bf16,
int8, fp8, PowerSGD with 1 and 4 vectors), and with the same in two levels where machines have several ranks each;
torch's DDP and no DDP at all are there to compare with. Rounds, contestants and checks are those of
`bench.step`, networks those of `bench.step --rate`: two network namespaces joined by a cable of that rate, which takes
root. `--rate loopback` has none.

The baseline is fastddp's bf16 hook, not plain gradients: it costs a user one line and no loss. What takes longer is
printed in red. bf16 is measured twice, and how far it is from itself is the noise floor: what differs by less is called
the same.

    python -m bench.pays --json bench/results/pays.json --resume

The file is written after each cell. With `--resume` cells that it has already are left out, if they are of the commit
that is checked out. A cell that would take more minutes than it may is left out, and named.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from bench import harness, network, step
from bench.cases import CASES, case_named

MODULE = "bench.pays"
BASELINE = "bf16"
AGAIN = f"{BASELINE}-again"
IN_TWO_LEVELS = "-nodes"  # at the end of what is exchanged in two levels
WIRES = {"none": "plain"} | {name: name for name in (BASELINE, "int8", "fp8", "powersgd1", "powersgd4")}
NODES = "fastddp-nodes"  # in two levels
_TWICE = "fastddp-bf16-again"

# By rate: rounds of a cell. The slower the network, the less they vary, and the longer they take.
_ROUNDS = ((5e9, 10), (5e8, 8), (0.0, 5))


def main() -> None:
    options = parse_arguments()
    if network.is_skipped(MODULE, options.rate):
        return
    results = Results(options.json, options.resume)
    for model, batch, ranks, rate in itertools.product(options.model, options.batch, options.ranks, options.rate):
        rounds = options.rounds or rounds_at(rate)
        minutes = needs_minutes(model, batch, ranks, rate, rounds + options.warmup)
        if minutes > options.longest:
            print(f"Left out: {model} x{batch}, {ranks} ranks at {rate}, which would take about {minutes:.1f} minutes.")
            continue
        cell = f"{model} x{batch}, {ranks} ranks, {rate}, {rounds} rounds, {options.threads} threads"
        results.measure_if_missing(cell, measure_steps, model, batch, ranks, rate, rounds, options)
    if results.rows:
        harness.report(results.rows, [table(results.rows)], None)
        step.exit_if_wrong(results.rows)


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
    """Those that would come out again: of `now`'s commit, without changes to it then and now."""
    return [row for row in rows if row["commit"] == now["commit"] and row["dirty"] is now["dirty"] is False]


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    default = "(default: %(default)s)"

    def several(name: str, about: str, *values: Any, **options: Any) -> None:
        parser.add_argument(name, nargs="*", default=[*values], help=f"{about} {default}", **options)

    several("--model", "of bench.step", "resnet50", "gpt", "vit-tiny", choices=[case.name for case in CASES])
    several("--batch", "times the model's own", 1, 4, type=int)
    several("--ranks", "even, half of them at each end of the cable", 2, 4, type=int)
    several("--rate", f"as for tc, or {network.LOOPBACK}", "200mbit", "1gbit", "10gbit")
    add = parser.add_argument
    add("--rounds", type=int, help="steps of each contestant that count (default: by the rate)")
    add("--longest", type=float, default=2.5, metavar="MINUTES", help=f"that a cell may take {default}")
    add("--resume", action="store_true", help="leave out cells that are in --json already, of the same commit")
    harness.add_common(parser, "cell and wire", warmup=3, threads=1)
    options = parser.parse_args()
    network.check_rates(parser, options.rate)
    if any(ranks < 2 or ranks % 2 for ranks in options.ranks):
        parser.error("--ranks must be even: half of them are at each end of the cable")
    if min(*options.batch, options.rounds or 1) < 1 or options.warmup < 2:
        parser.error("--batch and --rounds must be at least 1, --warmup at least 2")
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
        without_exchange=False,
        device="cpu",
        compiled=False,
    )
    name = model if batch == 1 else f"{model}@{batch}"
    with network.cable(rate, ranks // 2) as (enter, facts):
        rows = step.spawn_ranks(name, of_step, enter)
    columns = {"model": model, "batch": batch}
    return judged([columns | row | facts | {"wire": wire_of(row["contestant"], row["hook"])} for row in rows])


def wire_of(contestant: str, hook: str) -> str:
    """What the table calls a contestant.

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


# ------------------------------------------------------------------------------------------------------------ verdicts


def noise_floor(again: Sequence[float], baseline: Sequence[float]) -> float:
    """By how much a ratio of medians may be off: what the baseline, measured against itself, says round by round.

    The larger of two: how far the median of its ratios is from 1, and what a median of so many ratios that scatter like
    these is off itself, which is 1.253 standard errors, twice; their deviation is taken from the middle half of them.

    >>> round(noise_floor([10.2, 10.2, 10.2, 10.2], [10.0, 10.0, 10.0, 10.0]), 3)
    0.02
    >>> round(noise_floor([9.0, 11.0, 9.0, 11.0], [10.0, 10.0, 10.0, 10.0]), 3)
    0.186
    """
    ratios = [one / other for one, other in zip(again, baseline, strict=True)]
    off = abs(statistics.median(ratios) - 1)
    if len(ratios) < 2:
        return off
    quarters = statistics.quantiles(ratios, n=4, method="inclusive")
    deviation = (quarters[2] - quarters[0]) / 1.349
    return max(off, 2 * 1.253 * deviation / math.sqrt(len(ratios)))


def verdict(ratio: float, floor: float) -> Literal["faster", "slower", "same"]:
    """Of a time, as its ratio to the baseline's."""
    if abs(ratio - 1) <= floor:
        return "same"
    return "faster" if ratio < 1 else "slower"


def judged(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """The rows of one cell with how each contestant fares against bf16: `ratio_to_bf16`, `noise_floor`, `verdict`."""
    samples = {row["wire"]: row["samples_ms"] for row in rows}
    floor = noise_floor(samples[AGAIN], samples[BASELINE])
    ratios = {wire: harness.paired_ratio(times, samples[BASELINE]) for wire, times in samples.items()}
    return [
        row
        | {
            "ratio_to_bf16": round(ratios[row["wire"]], 6),
            "noise_floor": round(floor, 6),
            "verdict": verdict(ratios[row["wire"]], floor),
        }
        for row in rows
    ]


_STYLES = {"faster": "[green]{}[/]", "slower": "[bold red]{}[/]", "same": "{}"}


def table(rows: Sequence[harness.Row]) -> Any:
    """A line a cell, and one below it of its rows in two levels; a column a wire, what is no wire of its own last."""
    lines: dict[tuple[str, bool], dict[str, harness.Row]] = {}
    for row in rows:
        wire = row["wire"].removesuffix(IN_TWO_LEVELS)
        lines.setdefault((row["cell"], wire != row["wire"]), {})[wire] = row
    wires = sorted(dict.fromkeys(wire for line in lines.values() for wire in line), key=(AGAIN, "torch", "alone").count)
    cells = []
    for (_, in_two_levels), line in lines.items():
        first = next(iter(line.values()))
        where = "in two levels" if in_two_levels else f"{first['world_size']} ranks, {first['rate']}"
        numbers = [
            _STYLES[line[w]["verdict"]].format(f"{line[w]['median_ms']:.4g}") if w in line else "-" for w in wires
        ]
        cells.append([f"{first['model']} x{first['batch']}", where, *numbers, f"{first['noise_floor']:.1%}"])
    title = "median ms of a step (forward and backward); red: slower than bf16 by more than the noise; green: faster"
    return harness.table(title, ["model x batch", "network", *wires, "noise"], cells, left=2)


if __name__ == "__main__":
    main()
