"""Checks of kernels, and findings from facts: a sentence about something, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know before the job starts."""

    level: Literal["wrong", "remark"]  # wrong: the job would fail, compute nonsense or lose much time
    about: str
    what: str  # a sentence
    remedy: str = ""  # a sentence; empty if there is nothing to do


wrong = partial(Finding, "wrong")  # the doctor's exit status is 1
remark = partial(Finding, "remark")  # stops nobody


@dataclass(frozen=True)
class KernelCheck:
    """One family of kernels on one device."""

    device: str
    kernels: str  # what they do
    made_of: str  # C++, Triton, or torch's operators
    wrong: tuple[str, ...] = ()  # what differed from plain torch
    given_up: tuple[str, ...] = ()  # kernels that torch's operators stand in for, and why
    error: str | None = None  # what was raised instead of a result

    def findings(self, about: str = "") -> list[Finding]:
        """What did not run, or was computed wrong; ``about``: whose it is, before the device."""
        where = f"{about}{self.device}"
        found = []
        if self.error is not None:
            what = f"fastddp's kernels for {self.kernels} did not run: {self.error.rstrip('.')}."
            found.append(wrong(where, what, "Whatever it is would end training as well: see to it first."))
        if self.wrong:
            what = f"fastddp's kernels computed something else than plain torch: {', '.join(self.wrong)}."
            memory = (
                "Do not train on this device: check its memory. Should all devices do this, tell fastddp's authors."
            )
            found.append(wrong(where, what, memory))
        for kernel in self.given_up:
            what = f"torch's operators stand in for fastddp's kernel {kernel}."
            found.append(wrong(where, what, "Training is right there, and slower. Tell fastddp's authors this line."))
        return found


def in_a_line(error: Exception) -> str:
    """The type and the first line of an error, of at most 1000 characters."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"[:1000]
