"""Runs a training script with fastddp in place of torch's DDP: ``torchrun ... -m fastddp [options] train.py ...``.

Processes that the script starts with multiprocessing, as ``torch.multiprocessing.spawn`` does, are patched too.

``python -m fastddp build`` compiles fastddp's C++ part ahead of a job, where it is not there yet.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from fastddp import patching
from fastddp.comm_hooks import HOOK_NAMES
from fastddp.extension.building import build
from fastddp.extension.choosing import torch_of
from fastddp.ranks.listing import names_near
from fastddp.torch_compat.job_options import check_options
from fastddp.watch import presence, roll

# What a wrapper gets whose code says nothing about it. "off" turns off what is on by default.
_OPTIONS: dict[str, dict[str, Any]] = {
    "--hook": {"help": f"how gradients travel: {', '.join(HOOK_NAMES)}"},
    "--buckets": {"metavar": "auto|FILE", "help": "plan them by measurements, or take a saved plan"},
    "--hierarchy": {"choices": ["node"], "help": "add up inside each node first"},
    "--gradient-average": {"choices": ["mean", "sum"]},
    "--main-grads": {"choices": ["grad", "main_grad"], "help": "fp32 gradients of 16-bit parameters"},
    "--wire-memory": {"choices": ["registered", "symmetric"]},
    "--on-stall": {"choices": ["report", "raise", "off"], "help": "when a step stands still"},
    "--patience": {"type": float, "metavar": "SECONDS", "help": "for which a step may stand still"},
    "--on-corruption": {"choices": ["report", "raise"], "help": "when numbers are not finite, or differ between ranks"},
    "--audit-every": {"type": int, "metavar": "STEPS", "help": "compare the ranks' parameters bit by bit"},
}


_LAUNCHERS = (__file__, runpy.__file__, "<frozen runpy>")


def main(arguments: Sequence[str] | None = None) -> None:
    """Patch, then run the script or module as Python would."""
    parser = argparse.ArgumentParser(
        prog="python -m fastddp",
        description="Runs a training script with fastddp in place of torch.nn.parallel.DistributedDataParallel. What "
        "the script says itself, in the constructor or by registering a hook, wins.",
        usage="%(prog)s [options] (script.py | -m module) [arguments ...]\n       %(prog)s build [--in-package]",
        allow_abbrev=False,
    )
    for name, described in _OPTIONS.items():
        parser.add_argument(name, **described)
    parser.add_argument("-m", action="store_true", dest="is_module", help="what follows is a module, not a script")
    parser.add_argument("target", metavar="script.py | module")
    parser.add_argument("arguments", nargs="*", default=(), help="passed on as they are")
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["build"]:  # a folder or a script of that name is ./build
        _build(arguments[1:])
        return
    ours = _up_to_the_target(arguments)
    _check_options(parser, arguments[:ours])
    said = vars(parser.parse_args(arguments[:ours]))
    target, is_module, _ = said.pop("target"), said.pop("is_module"), said.pop("arguments")
    options: Any = {name: value for name, value in said.items() if value is not None}
    if options.get("on_stall") == "off":
        options["on_stall"] = None
    if not is_module and not Path(target).exists():
        parser.error(f"there is no script {target!r} in {Path.cwd()} (a module is run with -m)")
    try:
        check_options(options)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    sys.argv = [target, *arguments[ours:]]
    roll.is_launched = "RANK" in os.environ
    patching.patch(**options)
    with presence.telling_if_absent():
        try:
            _run(target, is_module)
        except Exception as error:
            _end_by(error)


def _build(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fastddp build",
        description="Compiles fastddp's C++ part for the torch of this Python, where it is not there yet, into the "
        "user's cache (XDG_CACHE_HOME, or ~/.cache).",
        allow_abbrev=False,
    )
    beside = "put it beside the package, too: for an image, whose users have other homes"
    parser.add_argument("--in-package", action="store_true", help=beside)
    try:
        folder = build(in_package=parser.parse_args(arguments).in_package)
    except OSError as error:
        sys.exit(f"fastddp cannot be put beside the package: {error}")
    print(f"fastddp's C++ part for torch {torch_of(folder)} is in {folder}")


def _end_by(error: Exception) -> NoReturn:
    """End this process by an error of the script, as Python does, but without the calls that led to the script."""
    calls = error.__traceback__
    while calls is not None and calls.tb_frame.f_code.co_filename in _LAUNCHERS:
        calls = calls.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(calls), calls
    sys.excepthook(type(error), error, calls)
    sys.exit(1)


def _up_to_the_target(arguments: Sequence[str]) -> int:
    """How many are ours. argparse sees no others, since it would remove "--" from the script's arguments."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        place += 2 if arguments[place] in _OPTIONS else 1  # an option and its value
    return place + 1


def _check_options(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    for argument in given:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in (*_OPTIONS, "--help", "--"):
            parser.error(f"there is no option {name}. {names_near(name, _OPTIONS)}")


def _run(target: str, is_module: bool) -> None:
    if is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        _run_script(str(Path(target).absolute()))


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
