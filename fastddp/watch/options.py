"""What to watch while a model trains: the constructor's ``watch=``."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from fastddp.errors import see
from fastddp.watch.corruption import OnCorruption
from fastddp.watch.stall_report import OnStall

OnLocalSteps = Literal["warn", "raise"] | None


@dataclass(frozen=True)
class Watch:
    """What to watch, and whom to tell.

    Raises:
        TypeError: ``stall`` or ``corruption`` is of another type; ``audit_every`` is no integer.
        ValueError: ``stall`` or ``corruption`` is another text; ``patience`` or ``idle_patience`` is no number of
            seconds > 0; ``audit_every`` is below 1.
    """

    stall: OnStall = "report"
    """What to do when a step stands still for long. "report": the rank that finds it says on stderr which rank holds
    the step up, and why. "raise": where the step cannot go on, raise a RuntimeError with the report on all ranks that
    wait for others instead; the process group is of no use afterwards. A callable: also call it on the finding rank,
    from another thread, with a :class:`fastddp.StallReport`. None: do not look."""
    patience: float = 10.0
    """How many seconds are long; or five times the longest of the last steps, if that is more."""
    corruption: OnCorruption = None
    """What to do about corruption. "report": to the logger "fastddp". "raise": a
    :class:`fastddp.CorruptionError`. A callable: call it with a :class:`fastddp.Corruption`. None: do not look; with
    ``audit_every``, "report"."""
    audit_every: int | None = None
    """Compare the replicas' parameters, and what ``model.audit()`` adds, bit by bit: a part in each step, each once in
    this many steps. None: do not."""
    idle_patience: float | None = None
    """For how many seconds a rank may keep the others waiting with code of its own (evaluation, a checkpoint, a data
    loader, compilation) before "raise" raises. None: until the process group's own time-out."""

    local_steps: OnLocalSteps = "warn"
    """What to do when an optimizer steps, outside of ``no_sync()``, with gradients that no backward has averaged:
    "warn", once; "raise" a RuntimeError; None: nothing."""

    def __post_init__(self) -> None:
        _check_choice("stall", self.stall, "fastddp.StallReport")
        _check_choice("corruption", self.corruption, "fastddp.Corruption")
        _check_patience("patience", self.patience)
        if self.idle_patience is not None:
            _check_patience("idle_patience", self.idle_patience)
        if self.local_steps not in ("warn", "raise", None):
            raise ValueError(
                f'Watch(local_steps=...) is "warn", "raise" or None, not {self.local_steps!r}.' + see("FD024")
            )
        _check_audit_every(self.audit_every)
        if self.corruption is None and self.audit_every is not None:
            object.__setattr__(self, "corruption", "report")


def check_watch(watch: object) -> None:
    """Raise TypeError unless it is a :class:`Watch`."""
    if not isinstance(watch, Watch):
        raise TypeError(
            f"watch must be a fastddp.Watch, which says what to look for and whom to tell, got {watch!r}."
            + see("FD024")
        )


def _check_choice(name: str, choice: object, takes: str) -> None:
    if choice is None or callable(choice) or choice in ("report", "raise"):
        return
    kind = ValueError if isinstance(choice, str) else TypeError
    raise kind(
        f'Watch({name}=...) is "report", "raise", a callable that takes a {takes}, or None, not {choice!r}.'
        + see("FD024")
    )


def _check_patience(name: str, patience: object) -> None:
    if isinstance(patience, bool) or not isinstance(patience, Real) or not float(patience) > 0:
        raise ValueError(f"Watch({name}=...) is a number of seconds > 0, not {patience!r}." + see("FD024"))


def _check_audit_every(audit_every: object) -> None:
    if audit_every is None:
        return
    if isinstance(audit_every, bool) or not isinstance(audit_every, int):
        raise TypeError(
            f"Watch(audit_every=...) is a number of steps, or None for no audit, not {audit_every!r}." + see("FD024")
        )
    if audit_every < 1:
        raise ValueError(
            f"Watch(audit_every=...) is 1 step or more, or None for no audit, not {audit_every}." + see("FD024")
        )
