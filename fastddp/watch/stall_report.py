"""Why a step stood still: what a user's callable gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class StallCause:
    """Ranks, and what they do instead of going on."""

    cause: str
    """One word, of the table of causes: "stopped", "forward", "network", ..."""
    ranks: tuple[int, ...]
    """Within the model's process group; empty: all of them, or nobody knows."""
    text: str
    """One or two sentences that begin with a verb: what these ranks do, for how long, and the remedy."""


@dataclass(frozen=True)
class StallReport:
    """A step that stands still."""

    step: int
    """Its number, from 1."""
    ranks: int
    """How many the model has."""
    time: str
    """When it was made, on the clock of the rank's machine, with its zone: "2026-11-24 14:02:41+0100"."""
    headline: str
    """Which ranks wait, for what, and for how long."""
    causes: tuple[StallCause, ...]
    """The most likely one first."""
    stack: tuple[str, ...]
    """Python calls of the first rank of the first cause, the innermost last, libraries folded; empty: not known."""
    is_soft: bool
    """Whether a rank is only slow: waiting helps."""
    message: str
    """The report as text."""

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, text: str) -> StallReport:
        """Make one of JSON.

        Args:
            text: what :meth:`to_json` returns.
        """
        fields = json.loads(text)
        del fields["version"]
        causes = tuple(StallCause(of["cause"], tuple(of["ranks"]), of["text"]) for of in fields["causes"])
        return cls(**{**fields, "causes": causes, "stack": tuple(fields["stack"])})

    def to_json(self) -> str:
        """Return a JSON object: these fields, and "version", which is 1."""
        return json.dumps({"version": 1, **asdict(self)})


OnStall: TypeAlias = Literal["report", "raise"] | Callable[[StallReport], object] | None
