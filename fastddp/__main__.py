"""Runs a training script with fastddp in place of torch's DDP: ``torchrun ... -m fastddp train.py arguments...``.

For processes that torchrun starts. A script that starts processes of its own calls :func:`fastddp.patch`, since those
run the script alone.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import fastddp


def main(arguments: Sequence[str] | None = None) -> None:
    """Patch, then run the script or module as Python would."""
    parser = argparse.ArgumentParser(
        prog="python -m fastddp",
        description="Runs a training script with fastddp in place of torch.nn.parallel.DistributedDataParallel.",
        usage="%(prog)s [-h] (script.py | -m module) [arguments ...]",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="what follows is a module, not a script")
    parser.add_argument("target", metavar="script.py | module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on as they are")
    options = parser.parse_args(arguments)
    if not options.is_module and not Path(options.target).exists():
        parser.error(f"there is no script {options.target!r} in {Path.cwd()} (a module is run with -m)")
    sys.argv = [options.target, *options.arguments]
    fastddp.patch()
    if options.is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(options.target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.target).resolve().parent)
        runpy.run_path(options.target, run_name="__main__")


if __name__ == "__main__":
    main()
