"""Allocations that fail: the first, the second, ... until what needs them ends well."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_suffix(".cpp")
_MANY = 300


def compile_allocator(folder: Path) -> Path:
    """Compile it into ``folder``, and return the library."""
    library, of_torch = folder / "failing_allocator.so", Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-O0", "-w", f"-isystem{of_torch}/include", str(_SOURCE)]
    subprocess.run([*command, "-o", str(library), f"-L{of_torch}/lib", "-lc10"], check=True)
    return library


def until_memory_suffices(library: Path, change: Callable[[], object], check: Callable[[], object]) -> int:
    """Call ``change`` with one allocation failing, the first, then the second, ..., until none of its own fails.

    ``check`` is called after each error. Returns how often that was.
    """
    allocator = ctypes.CDLL(str(library))
    for failing in range(_MANY):
        allocator.fail_after(failing)
        try:
            change()
        except (RuntimeError, MemoryError) as error:
            allocator.fail_after(-1)
            if "not enough memory" not in str(error):
                raise
            check()
        else:
            allocator.fail_after(-1)
            return failing
    raise AssertionError("it needs more memory each time")
