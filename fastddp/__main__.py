"""Runs a training script with fastddp in place of torch's DDP: ``torchrun ... -m fastddp train.py arguments...``.

This is for processes that torchrun starts. A script that starts its own processes calls :func:`fastddp.patch` instead,
because those processes run the script without this module.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import itertools
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

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
    parser.add_argument("arguments", nargs="*", default=(), help="passed on as they are")
    arguments = sys.argv[1:] if arguments is None else arguments
    # Only parse up to the target: argparse would remove "--" from the script's arguments.
    ours = len(list(itertools.takewhile(lambda argument: argument.startswith("-"), arguments))) + 1
    options = parser.parse_args(arguments[:ours])
    if not options.is_module and not Path(options.target).exists():
        parser.error(f"there is no script {options.target!r} in {Path.cwd()} (a module is run with -m)")
    sys.argv = [options.target, *arguments[ours:]]
    fastddp.patch()
    if options.is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(options.target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.target).resolve().parent)
        _run_script(str(Path(options.target).absolute()))


def _run_script(path: str) -> None:
    """Run it as Python does: ``__file__`` is absolute; ``sys.argv[0]``, which runpy would replace, is as given."""
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
        runpy.run_path(path, run_name="__main__")
        return
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    exec(_code(path), vars(main))


def _code(path: str) -> CodeType:
    if path.endswith(".pyc"):
        code = importlib.machinery.SourcelessFileLoader("__main__", path).get_code("__main__")
        assert code is not None  # or it had raised
        return code
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)  # the script has __future__ imports of its own


if __name__ == "__main__":
    main()
