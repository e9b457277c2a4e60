"""Loads fastddp's compiled part, and compiles it first where none fits."""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import IO

from fastddp.errors import see
from fastddp.extension.choosing import candidates, of_cache, of_package, releases
from fastddp.extension.compiling import CannotCompile, Torch, check, compile_for, expected_time, find_torch

_FAILED = "failed: "

# Note [One process compiles]
#
# Ranks import fastddp at once, on several nodes that may share a home, and any of them may be killed. Each machine has
# a folder of its own to work in, and a lock in it: who has the lock compiles, and the others wait for it. ninja holds
# the lock too, so that nobody gets it while a compiler of a killed process still writes. Who gets it then goes on with
# the objects that are there. What is finished gets its name in one step. Where a machine was faster, its work is used.


def provide() -> None:
    """Load what fastddp has compiled for the torch of this Python; where there is nothing that fits, compile it.

    Raises:
        ImportError: it can neither be loaded nor compiled, with cause and remedy.
    """
    torch = find_torch()
    if torch is None:
        raise ImportError("fastddp needs torch, and this Python has none. Run: pip install torch" + see("FD020"))
    why = "nothing fits"
    try:
        why = load(torch)
        if why and not of_cache(torch).is_dir():
            _compile(torch, of_cache(torch), why)
            why = load(torch)
    except (CannotCompile, OSError) as error:
        remedy = ". Name a folder that can be written by XDG_CACHE_HOME." if isinstance(error, OSError) else ""
        raise ImportError(
            f"fastddp's C++ part has to be compiled for torch {torch.version} and Python {platform.python_version()} "
            f"({why}), and cannot be: {error}{remedy}" + see("FD020")
        ) from None
    if why:
        raise ImportError(
            f"fastddp's C++ part is of no use: {why}. Remove that folder, and it is compiled again." + see("FD020")
        )


def load(torch: Torch) -> str:
    """Load what fits; why nothing does, or empty.

    Raises:
        OSError: the user has no home.
    """
    if "fastddp._C" in sys.modules:
        return ""
    why = f"it has been compiled for {releases()}"
    importlib.import_module("torch")  # whose libraries the extension takes as they are loaded
    path = sys.modules["fastddp"].__path__
    for folder in candidates(torch):
        if str(folder) not in path:
            path.append(str(folder))
        try:
            importlib.import_module("fastddp._C")
            return ""
        except ImportError as error:
            path.remove(str(folder))
            why = f"what is in {folder} does not load ({error})"
    return why


def build(*, in_package: bool = False) -> Path:
    """Compile fastddp's C++ part for the torch of this Python ahead of a job, where it is not there yet.

    ``import fastddp`` has done that.

    Args:
        in_package: put it beside the package, too, where all users of an image find it.

    Returns:
        The folder that has it.

    Raises:
        ImportError: it cannot be compiled.
        OSError: the package's folder cannot be written.
    """
    provide()
    torch = find_torch()
    assert torch is not None
    loaded = Path(str(sys.modules["fastddp._C"].__file__)).parent
    if not in_package:
        return loaded
    return (
        loaded if loaded == of_package(torch) else Path(shutil.copytree(loaded, of_package(torch), dirs_exist_ok=True))
    )


def _compile(torch: Torch, folder: Path, why: str) -> None:
    """Note [One process compiles]."""
    check(torch)
    work = folder.with_name(f"{folder.name}.on-{platform.node()}")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("a+") as lock:
        if (failed := _wait_for_turn(lock, torch)).startswith(_FAILED):
            raise CannotCompile(failed.removeprefix(_FAILED))
        if not folder.is_dir():
            _write(lock, str(os.getpid()))
            _say(f"compiling its C++ part for torch {torch.version}: {why}. It takes {expected_time()}, once.")
            try:
                compile_for(torch, work, work / "made", (lock.fileno(),))
            except CannotCompile as error:
                _write(lock, f"{_FAILED}{error}")
                raise
            try:
                (work / "made").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another machine was faster, in a home that is shared
                    raise
    shutil.rmtree(work, ignore_errors=True)


def _wait_for_turn(lock: IO[str], torch: Torch) -> str:
    """What a process has said that was waited for: how it failed, or its number. Empty: there was none."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        since = time.time() - Path(lock.name).stat().st_mtime
        _say(
            f"waiting for process {_read(lock)} of this machine, which has been compiling fastddp's C++ part for torch "
            f"{torch.version} for {since:.0f} s. It takes {expected_time()}."
        )
    fcntl.flock(lock, fcntl.LOCK_EX)
    return _read(lock)


def _read(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read()


def _write(lock: IO[str], text: str) -> None:
    lock.truncate(0)
    lock.write(text)
    lock.flush()


def _say(text: str) -> None:
    print(f"fastddp: {text}", file=sys.stderr, flush=True)
