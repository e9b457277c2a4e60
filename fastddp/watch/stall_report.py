"""Why a step stood still, as those get it who asked for a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from fastddp import _C


@dataclass(frozen=True)
class StallCause:
    """Some ranks, and what they do instead of going on."""

    cause: str
    """One word, of the table in docs/watch.md: "stopped", "forward", "network", ..."""
    ranks: tuple[int, ...]
    """Within the model's process group; empty: all of them, or nobody knows."""
    text: str
    """A sentence or two about them, the first word of which is a verb: what they do, since when, and the remedy."""


@dataclass(frozen=True)
class StallReport:
    """A step that stands still."""

    step: int
    """Its number (of the window, from 1)."""
    ranks: int
    """How many the model has."""
    time: str
    """When the report was made, on the clock of the rank's machine, with its zone."""
    headline: str
    """Which of them wait, for what, and since when."""
    causes: tuple[StallCause, ...]
    """The most likely one first."""
    stack: tuple[str, ...]
    """Python calls of the first cause's first rank, the innermost one last, libraries' folded; empty: not known."""
    is_soft: bool
    """Whether a rank is only slow: waiting helps."""
    message: str
    """All of it, for people."""

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, found: _C.StallReport) -> StallReport:
        """What C++ has found."""
        causes = tuple(StallCause(of.cause, tuple(of.ranks), of.text) for of in found.findings)
        stack = tuple(found.stack)
        return cls(found.step, found.ranks, found.time, found.headline, causes, stack, found.is_soft, found.text())

    def to_json(self) -> str:
        """Return it as a JSON object: these names, and "version", which is 1."""
        return json.dumps({"version": 1, **asdict(self)})


OnStall: TypeAlias = Literal["report", "raise"] | Callable[[StallReport], object] | None
