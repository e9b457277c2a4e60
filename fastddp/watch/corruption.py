"""What becomes of numbers that are wrong: a report, an error, or whatever the user wants."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

_log = logging.getLogger("fastddp")


@dataclass(frozen=True)
class Corruption:
    """Numbers that are wrong, and whose they are."""

    kind: Literal["non_finite", "too_large", "replicas", "sum"]
    """Gradients that are not finite before ranks add them up, or whose norm is 1.8e19 and more (fp64: 1.3e154);
    replicas that differ; a sum that is not the ranks'."""
    step: int
    """The first step (number of the window, from 1) in which it was seen."""
    ranks: tuple[int, ...]
    """The ranks whose numbers are wrong, as far as it is known; empty: it is not known which."""
    parameter: str | None
    """The first parameter (or buffer, or optimizer state) concerned, by name; None: not of one parameter."""
    message: str
    """One or two sentences for the user: what, where, and the remedy."""

    def __str__(self) -> str:
        return self.message


class CorruptionError(RuntimeError):
    """Raised where ``Watch(corruption="raise")`` is."""

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(corruption.message)
        self.corruption = corruption


OnCorruption: TypeAlias = Literal["report", "raise"] | Callable[[Corruption], object] | None


def deliver(corruption: Corruption, to: OnCorruption) -> None:
    """Tell ``corruption`` to whom ``Watch.corruption`` names.

    Raises:
        CorruptionError: the user wants that; or whatever the user's callable raises.
    """
    if to == "raise":
        raise CorruptionError(corruption)
    if callable(to):
        to(corruption)
    elif to is not None:
        _log.error("%s", corruption)
