"""Findings from facts: a sentence about something, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["wrong", "remark"]


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know before the job starts."""

    level: Level  # wrong: the job would fail, compute nonsense or lose much time
    about: str
    what: str  # a sentence
    remedy: str = ""  # a sentence; empty if there is nothing to do


def wrong(about: str, what: str, remedy: str = "") -> Finding:
    """A finding for which the doctor's exit status is 1."""
    return Finding("wrong", about, what, remedy)


def remark(about: str, what: str, remedy: str = "") -> Finding:
    """A finding that stops nobody."""
    return Finding("remark", about, what, remedy)
