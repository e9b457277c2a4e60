"""Where the command ``fastddp`` begins: outside the package, which cannot be imported while its extension does not fit.

``fastddp doctor`` is to say so, together with everything else, and traces can be read without the extension.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, NoReturn


def main() -> None:
    """Run the command, with a module that raises in the package's place if that cannot be imported."""
    try:
        import fastddp  # noqa: F401
    except ImportError as error:
        _stand_in(error)
    from fastddp.tools import main

    main()


def _stand_in(error: ImportError) -> None:
    """Let submodules be imported, as far as they do without the extension; all else that is asked for raises."""
    spec = importlib.util.find_spec("fastddp")
    if spec is None:
        raise error

    def refuse(name: str) -> NoReturn:
        # What Python asks for itself may not be there, and neither may a submodule that is about to be imported.
        if name.startswith("__") or (name != "_C" and importlib.util.find_spec(f"fastddp.{name}") is not None):
            raise AttributeError(name)
        raise error

    package: Any = importlib.util.module_from_spec(spec)
    package.__getattr__ = refuse
    sys.modules["fastddp"] = package
