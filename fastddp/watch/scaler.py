"""Whether a ``GradScaler`` is in use: then gradients that are not finite are normal now and then."""

from __future__ import annotations

_steps = False


def note_scaler() -> None:
    """A ``GradScaler`` was asked to step an optimizer in this process."""
    global _steps
    _steps = True


def a_scaler_steps() -> bool:
    """Whether one ever was."""
    return _steps
