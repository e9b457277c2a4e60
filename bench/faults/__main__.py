"""Whether what stands still is named: `python -m bench.faults` breaks small runs, and judges what is said about them.

Each fault is a run of its own, whose ranks are processes over gloo. It is judged by what was said first: a report, on
stderr and to the callback, or, where ranks raise at once, an error that names rank and cause. With
`--implementation torch` the same script runs under torch's DDP, and what counts is what its user sees within 20 s.

Behind that, a report about many ranks: one is real, the records of the others are written to a real store.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.faults import network, scale
from bench.faults.entries import EXCHANGES, FAULTS, fault_named
from bench.faults.forking import forking
from bench.faults.launch import run_fault

MODULE = "bench.faults"
FOR_TORCH = 20.0  # seconds behind the deed


def main() -> None:
    options = parse_arguments()
    facts = harness.environment(MODULE, torch.device("cpu"), 1) | {"patience": options.patience}
    rows: list[harness.Row] = []
    runs = [
        (name, ranks, exchange, implementation)
        for name in options.fault
        for ranks in options.ranks
        for exchange in options.exchange
        for implementation in options.implementation
        if ranks in fault_named(name).ranks and exchange in fault_named(name).exchanges
    ]
    left_out = network.unavailable() if any(fault_named(run[0]).network for run in runs) else None
    if left_out:
        runs = [run for run in runs if not fault_named(run[0]).network]
        print(f"Faults of the network are left out: {left_out}", file=sys.stderr)
    with forking() as starter, harness.progress("faults", len(runs), show=True) as advance:
        for name, ranks, exchange, implementation in runs:
            watched = FOR_TORCH if implementation == "torch" else None
            outcome = run_fault(starter, fault_named(name), ranks, exchange, options.patience, implementation, watched)
            rows.append(facts | outcome.row())
            advance()
            if options.json:  # what is there is kept, should the rest take too long
                harness.write_json(options.json, rows)
    out = harness.console()
    out.print(harness.describe(facts), highlight=False)
    for implementation in ("fastddp", "torch"):
        if own := [row for row in rows if row["implementation"] == implementation]:
            out.print(report(own, implementation))
    if options.scale:
        rows.append(facts | measure_scale(options.scale))
        out.print(scale_report(rows[-1]))
        if options.json:
            harness.write_json(options.json, rows)


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    harness.add_selection(parser, FAULTS, "--fault", "--faults")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4], help="default: 2 4")
    parser.add_argument("--exchange", nargs="+", choices=EXCHANGES, default=list(EXCHANGES), help="default: all")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds (default: %(default)s)")
    parser.add_argument(
        "--implementation", nargs="+", choices=("fastddp", "torch"), default=["fastddp"], help="default: fastddp"
    )
    parser.add_argument(
        "--scale", type=int, default=1024, help="ranks of the large report; 0: none (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a row for each run")
    return parser.parse_args()


def report(rows: Sequence[harness.Row], implementation: str) -> Any:
    """A line a run, and how many are right."""
    right = sum(row["right"] for row in rows)
    title = f"{implementation}: {right} of {len(rows)} as they should be"
    if implementation == "fastddp":
        title += f"; patience {rows[0]['patience']:g} s"
    columns = ["fault", "exchange", "by", "ranks", "rank", "cause", "parameter", "after s", "reports"]
    cells = [
        [
            *(row["fault"], row["exchange"], row["by"], str(row["ranks"])),
            *(_yes(row[key]) for key in ("rank_named", "cause_named", "parameter_named")),
            "" if row["seconds"] is None else f"{row['seconds']:.1f}",
            str(row["reports"]),
        ]
        for row in rows
    ]
    return harness.table(title, columns, cells, left=3)


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: ""}[value]


def measure_scale(ranks: int) -> harness.Row:
    """In a process of its own, since it makes a group."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(scale.row, (ranks,))


def scale_report(row: harness.Row) -> Any:
    """One line."""
    title = "A report about many ranks: from its claim to its end, and what it leaves in the store"
    columns = ["ranks", "seconds", "keys, healthy steps", "keys, report", "finding"]
    keys = [str(row[key]) for key in ("keys_in_healthy_steps", "keys_in_report")]
    return harness.table(title, columns, [[str(row["ranks"]), f"{row['seconds']:.3f}", *keys, str(row["findings"][0])]])


if __name__ == "__main__":
    main()
