"""Measures fastddp on one GPU, section by section: `python -m bench.gpu --help`.

Each section runs in a process of its own, so that one which fails, or leaves the GPU's context in ruins, costs none of
the others. Rows are written as soon as they exist. Exit status: 0; 1 when something was computed wrong; 2 where there
is no GPU; 3 when a section did not get to its end.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import harness
from bench.gpu import digest, machine, results
from fastddp import _C

MODULE = "bench.gpu"
WRONG, NO_GPU, FAILED = 1, 2, 3

# Section -> its share of the time.
SECTIONS = {
    "facts": 0.01,
    "ceilings": 0.05,
    "kernels": 0.15,
    "low_rank": 0.1,
    "block8": 0.05,
    "sum_shards": 0.02,
    "step": 0.23,
    "hooks": 0.14,
    "wire": 0.25,
}
# What a section may take beyond its share before it is ended: it looks at the clock only between two measurements. The
# last one has less: with the build, everything has to end within nine minutes.
_GRACE_SECONDS = 45.0
_LAST_GRACE_SECONDS = 15.0


def main() -> int:
    options = parse_arguments()
    if not torch.accelerator.is_available():
        print("bench.gpu measures a GPU, and torch sees none on this machine.")
        return NO_GPU
    if options.section is not None:
        return run_section(options)
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder, "gpu.json")
        path.unlink(missing_ok=True)  # of the run before, whose rows would stay where a section fails
        return run_all(path, options)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(MODULE, __doc__)
    add = parser.add_argument
    add("--section", choices=SECTIONS, help="only this one, in this process (default: all)")
    add("--json", type=Path, metavar="FILE", help="write rows; --section keeps those of other sections")
    add("--minutes", type=float, default=6.5, help="for everything that is run (default: 6.5)")
    add("--quick", action="store_true", help="try everything out with little work: numbers mean nothing")
    return parser.parse_args(arguments)


def run_all(path: Path, options: argparse.Namespace) -> int:
    """A process for each section; what one leaves of its time goes to those behind it."""
    end = time.monotonic() + 60 * options.minutes
    failed = []
    for section, seconds in time_shares(end):
        command = [sys.executable, "-m", MODULE, "--section", section, "--minutes", f"{seconds / 60:.3f}"]
        command += ["--json", str(path.absolute()), *(["--quick"] if options.quick else [])]
        try:
            status = subprocess.run(command, cwd=harness.ROOT, timeout=limit(end, seconds)).returncode
        except subprocess.TimeoutExpired:
            status = FAILED
        found_wrong = any(row["section"] == section for row in results.wrong(results.read(path)))
        if status != 0 and not (
            status == WRONG and found_wrong
        ):  # 1 is also how the interpreter ends when it cannot start
            failed.append(f"{section} (status {status})")
    rows = results.read(path)
    print("\n".join(digest.lines(rows)))
    if failed:
        print(f"did not get to the end: {', '.join(failed)}")
    if results.wrong(rows):
        return WRONG
    return FAILED if failed else 0


def time_shares(end: float) -> Iterator[tuple[str, float]]:
    """Each section and the seconds that it may take, from what is left when its turn comes."""
    sections = list(SECTIONS)
    for index, section in enumerate(sections):
        share = SECTIONS[section] / sum(SECTIONS[later] for later in sections[index:])
        yield section, max(0.0, end - time.monotonic()) * share


def limit(end: float, share: float) -> float:
    """The seconds after which a section is ended that begins now."""
    return min(share + _GRACE_SECONDS, end + _LAST_GRACE_SECONDS - time.monotonic())


def run_section(options: argparse.Namespace) -> int:
    """Measures one section, between two looks at the GPU."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, 0)
    deadline = time.monotonic() + 60 * options.minutes
    rows = results.Results(options.json, options.section)
    header = rows.add("header", **machine.facts(device), **machine.state(device))
    run = results.Run(device, rows, options.quick, deadline)
    run.out.rule(options.section)
    run.out.print(harness.describe(header), highlight=False)
    try:
        importlib.import_module(f"bench.gpu.{options.section}").measure(run)
    except Exception:
        # Printed here and not by the interpreter, whose exit status would be that of a wrong result.
        traceback.print_exc()
        rows.add("failed", error=traceback.format_exc(limit=-1).strip().splitlines()[-1])
        return FAILED
    for _, name, place, reason in _C.kernels_given_up():  # its rows are of torch's operators
        rows.add("kernel given up", kernel=name, place=place, reason=reason, result="WRONG")
    rows.add("state", when="after", **machine.state(device))
    return WRONG if results.wrong(rows.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
