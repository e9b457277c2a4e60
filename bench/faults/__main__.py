"""Whether what stands still is named: `python -m bench.faults` breaks small runs, and judges what is said about them.

Each fault is a run of its own, whose ranks are processes over gloo. It is judged by what was said first: a report, on
stderr and to the callback, or, where ranks raise at once, an error that names rank and cause. With
`--implementation torch` the same script runs under torch's DDP, and what counts is what its user sees within 20 s.

Behind that, a report about many ranks: one is real, the records of the others are written to a real store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.faults import network, scale, table
from bench.faults.entries import EXCHANGES, FAULTS, fault_named
from bench.faults.forking import forking
from bench.faults.launch import run_fault

MODULE = "bench.faults"
FOR_TORCH = 20.0  # seconds after the deed


def main() -> None:
    options = parse_arguments()
    if options.table:
        kept = [row for path in options.table for row in json.loads(path.read_text())]
        print("\n".join(table.lines(kept)))
        return
    facts = harness.environment(MODULE, torch.device("cpu"), 1) | {"patience": options.patience}
    rows: list[harness.Row] = []
    every = itertools.product(options.fault, options.ranks, options.exchange, options.implementation)
    named = [(fault_named(name), *others) for name, *others in every]
    runs = [run for run in named if run[1] in run[0].ranks and run[2] in run[0].exchanges]
    left_out = network.unavailable() if any(fault.network for fault, *_ in runs) else None
    if left_out:
        runs = [run for run in runs if not run[0].network]
        print(f"Faults of the network are left out: {left_out}", file=sys.stderr)
    with forking() as starter, harness.progress("faults", len(runs), show=True) as advance:
        for fault, ranks, exchange, implementation in runs:
            watched = FOR_TORCH if implementation == "torch" else None
            outcome = run_fault(starter, fault, ranks, exchange, options.patience, implementation, watched)
            rows.append(facts | outcome.row())
            advance()
            if options.json:  # what is there is kept, should the rest take too long
                harness.write_json(options.json, rows)
    tables = [report(own) for own in harness.grouped(rows, "implementation").values()]
    if options.scale:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # since it makes a group
            rows.append(facts | pool.apply(scale.row, (options.scale,)))
        columns = {"ranks": "{ranks}", "seconds": "{seconds:.3f}", "keys, healthy steps": "{keys_in_healthy_steps}"}
        columns |= {"keys, report": "{keys_in_report}", "finding": "{findings[0]}"}
        title = "A report about many ranks: from its claim to its end, and what it leaves in the store"
        tables.append(harness.row_table(title, columns.items(), rows[-1:]))
    harness.report(rows, tables, options.json)


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    harness.add_selection(parser, FAULTS, "--fault", "--faults")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4], help="default: 2 4")
    parser.add_argument("--exchange", nargs="+", choices=EXCHANGES, default=list(EXCHANGES), help="default: all")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds (default: %(default)s)")
    both = ("fastddp", "torch")
    parser.add_argument("--implementation", nargs="+", choices=both, default=["fastddp"], help="default: fastddp")
    parser.add_argument("--scale", type=int, default=1024, help="ranks of the large report; 0: none (%(default)s)")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="run nothing: the page's table, of rows")
    harness.add_common(parser, "run")
    return parser.parse_args()


def report(rows: Sequence[harness.Row]) -> Any:
    """A line a run, and how many are right."""
    right = sum(row["right"] for row in rows)
    title = f"{rows[0]['implementation']}: {right} of {len(rows)} as they should be; patience {rows[0]['patience']:g} s"
    columns = {name: f"{{{name}}}" for name in ("fault", "exchange", "by", "ranks")}
    columns |= {name: f"{{{name}_named}}" for name in ("rank", "cause", "parameter")}
    columns |= {"after s": "{seconds:.1f}", "reports": "{reports}"}
    return harness.row_table(title, columns.items(), rows, left=3)


if __name__ == "__main__":
    main()
