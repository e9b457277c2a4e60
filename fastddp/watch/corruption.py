"""What to do about wrong numbers: report them, raise an error, or call the user's callable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fastddp.errors import see

_log = logging.getLogger("fastddp")


@dataclass(frozen=True)
class Corruption:
    """A corruption of numbers, and whose they are."""

    kind: Literal["non_finite", "too_large", "replicas"]
    """Gradients (or a module's output) are not finite; a gradient's norm is 1.8e19 or more (fp64: 1.3e154); replicas
    differ."""
    step: int
    """The first step, from 1, in which it was seen."""
    ranks: tuple[int, ...]
    """The ranks whose numbers are wrong; all that differ if none is in the minority; empty: not known."""
    parameter: str | None
    """Name of the first parameter (or buffer, or optimizer state, as "weight: exp_avg") concerned; None: not about
    one."""
    message: str
    """One or two sentences for the user: what, where, and the remedy."""

    def __str__(self) -> str:
        return self.message


_CODES = {"non_finite": "FD017", "too_large": "FD017", "replicas": "FD018"}


class CorruptionError(RuntimeError):
    """Raised under ``Watch(corruption="raise")``. Its attribute ``corruption`` is the :class:`Corruption`.

    Args:
        corruption: what was found.
    """

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(corruption.message + see(_CODES[corruption.kind]))
        self.corruption = corruption


OnCorruption: TypeAlias = Literal["report", "raise"] | Callable[[Corruption], object] | None


_a_scaler_steps = False


def note_scaler() -> None:
    """A ``GradScaler`` was asked to step an optimizer in this process."""
    global _a_scaler_steps
    _a_scaler_steps = True


def a_scaler_steps() -> bool:
    """Whether one ever was: then gradients that are not finite are normal now and then."""
    return _a_scaler_steps


def deliver(corruption: Corruption, to: OnCorruption) -> None:
    """Do with ``corruption`` what ``Watch.corruption`` says: raise CorruptionError, or whatever a callable raises."""
    if to == "raise":
        raise CorruptionError(corruption)
    if callable(to):
        to(corruption)
    elif to is not None:
        _log.error("%s", CorruptionError(corruption))
