"""The entry of the command ``fastddp``: outside the package, which imports torch and its extension.

Help, ``fastddp ps`` and traces do without both, so they are there at once, and where the extension does not fit the
torch that is installed. ``fastddp doctor`` reports that, with everything else.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def main() -> None:
    """Run the command."""
    _import_lazily()
    from fastddp.tools import main

    main()


def _import_lazily() -> None:
    """Let modules of the package be imported without the package's own code, which runs once somebody asks for more."""
    if "fastddp" in sys.modules:
        return
    spec = importlib.util.find_spec("fastddp")
    loader = None if spec is None else spec.loader
    if spec is None or loader is None:
        raise ModuleNotFoundError("fastddp is not installed in this Python", name="fastddp")
    package: Any = importlib.util.module_from_spec(spec)

    def find(name: str) -> Any:
        # Python itself asks for attributes that may be missing, also for a submodule that it is about to import.
        if name.startswith("__") or (name != "_C" and importlib.util.find_spec(f"fastddp.{name}") is not None):
            raise AttributeError(name)
        del package.__getattr__
        try:
            loader.exec_module(package)
        except ImportError:
            package.__getattr__ = find
            raise
        return getattr(package, name) if hasattr(package, name) else importlib.import_module(f"fastddp.{name}")

    package.__getattr__ = find
    sys.modules["fastddp"] = package
    _find_extension(package)


def _find_extension(package: Any) -> None:
    """Let ``fastddp._pages`` be imported, which does without torch, where it is compiled."""
    from fastddp.extension.choosing import candidates
    from fastddp.extension.compiling import find_torch

    torch = find_torch()
    folder = None if torch is None else next(candidates(torch), None)
    if folder is not None:
        package.__path__.append(str(folder))
