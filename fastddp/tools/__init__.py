"""The command ``fastddp``: tools around a training run. The run itself is ``torchrun ... -m fastddp train.py``.

Needs ``pip install fastddp[cli]``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the arguments name."""
    try:
        from fastddp.tools.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "fastddp":
            raise
        sys.exit(f"The command fastddp needs {error.name!r}, which training does not: pip install fastddp[cli]")
    app()
