"""The entry of the command ``fastddp``: outside the package, which cannot be imported if its extension does not fit.

``fastddp doctor`` has to report that, with everything else, and traces can be read without the extension.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, NoReturn


def main() -> None:
    """Run the command. If the package cannot be imported, a module that raises stands in for it."""
    try:
        import fastddp  # noqa: F401
    except ImportError as error:
        _stand_in(error)
    from fastddp.tools import main

    main()


def _stand_in(error: ImportError) -> None:
    """Let submodules that need no extension be imported; all other attributes of the package raise."""
    spec = importlib.util.find_spec("fastddp")
    if spec is None:
        raise error

    def refuse(name: str) -> NoReturn:
        # Python itself asks for attributes that may be missing, also for a submodule that it is about to import.
        if name.startswith("__") or (name != "_C" and importlib.util.find_spec(f"fastddp.{name}") is not None):
            raise AttributeError(name)
        raise error

    package: Any = importlib.util.module_from_spec(spec)
    package.__getattr__ = refuse
    sys.modules["fastddp"] = package
