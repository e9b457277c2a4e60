"""Measures one section on one GPU: `python -m bench.gpu --help`. `bench.gpu.first_run` runs all of them.

Rows are written as soon as they exist. Exit status: 0; 1 when something was computed wrong; 2 where there is no GPU; 3
when the section did not get to its end.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

import torch

from bench import harness
from bench.gpu import machine, results, simulated
from fastddp import _C

MODULE = "bench.gpu"
WRONG, NO_GPU, FAILED = 1, 2, 3

SECTIONS = (
    *("facts", "proofs", "kernels", "step", "hooks", "host", "graph", "sum_shards", "block8", "low_rank"),
    *("overlap", "memory", "compiled", "addresses", "step_rows"),
)


def main() -> int:
    options = parse_arguments()
    if options.device == simulated.DEVICE:
        simulated.install()
    elif not torch.cuda.is_available():
        print(
            "bench.gpu measures a GPU, and torch sees none on this machine (--device simulated tries everything out)."
        )
        return NO_GPU
    torch.accelerator.set_device_index(0)
    return run_section(options)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    add("section", choices=SECTIONS)
    add("--json", type=Path, metavar="FILE", help="write rows; those of other sections that it has stay")
    add("--seconds", type=float, default=60, help="after which nothing more is begun (default: %(default)s)")
    add("--quick", action="store_true", help="try everything out with little work: numbers mean nothing")
    add("--device", choices=["cuda", simulated.DEVICE], default="cuda", help="default: %(default)s")
    return parser.parse_args(arguments)


def run_section(options: argparse.Namespace) -> int:
    """Measure a section, between two looks at the GPU."""
    device = torch.device(options.device, 0)
    rows = results.Results(options.json, options.section)
    header = rows.add("header", **machine.facts(device), **machine.state(device))
    run = results.Run(device, rows, options.quick, time.monotonic() + options.seconds)
    run.out.rule(options.section)
    run.out.print(harness.describe(header), highlight=False)
    try:
        importlib.import_module(f"{MODULE}.{options.section}").measure(run)
    except Exception as error:
        # Printed here and not by the interpreter, whose exit status would be that of a wrong result.
        traceback.print_exc()
        rows.add("failed", error=traceback.format_exception_only(error)[0].splitlines()[0][:300])
        return FAILED
    for _, name, place, reason in _C.kernels_given_up():  # its rows are of torch's operators
        rows.add("kernel given up", kernel=name, place=place, reason=reason, result="WRONG")
    rows.add("state", when="after", **machine.state(device))
    return WRONG if results.wrong(rows.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
