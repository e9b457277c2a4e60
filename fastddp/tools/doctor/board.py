"""How ranks answer rank 0 while some of them may hang: by named entries in the launcher's store.

No collective is used, so the number of a rank that does not answer is known. Entries are JSON, and are only accepted as
values of their stage's type: anyone who reaches the store can write to it, and must not make a rank run the entry.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from fastddp.documents.typed_json import parsed, restored

T = TypeVar("T")

_POLL_SECONDS = 0.02


@dataclass
class Answers:
    """The answers of one stage."""

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    silent: dict[int, Step] = field(default_factory=dict)  # and their last known steps
    is_cut_short: bool = False  # the launcher ended the run

    def failed(self) -> bool:
        """Whether a rank gave no value."""
        return bool(self.errors or self.silent)


@dataclass(frozen=True)
class Step:
    """What a rank is doing."""

    number: int  # grows on each rank in the same way
    words: str


_NOTHING = Step(-1, "nowhere: it has not come")
_UNREADABLE = Step(-1, "something that cannot be read")
_MOST_WORDS = 1000  # characters


class Board:
    """One thread's access. A store serves one thread at a time, so each has its own."""

    def __init__(self, store: dist.Store, kinds: Mapping[str, Any]) -> None:
        """``kinds``: for each stage the type of its values, as :func:`~fastddp.documents.typed_json.restored` takes."""
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._kinds = kinds

    def post(self, stage: str, rank: int, make: Callable[[], T]) -> T | None:
        """Make a value, post it or the error that was raised, and return the value."""
        value = None
        try:
            value = make()
            entry = json.dumps({"value": value}, default=asdict, allow_nan=False)
        except Exception as error:
            entry = json.dumps({"error": _in_a_line(error)})
        self._store.set(f"{stage}/{rank}", entry)
        return value

    def tell(self, rank: int, number: int, words: str) -> None:
        """Post what the rank does from now on."""
        self._store.set(f"step/{rank}", json.dumps(asdict(Step(number, words))))

    def wait_for(self, stage: str, rank: int, seconds: float) -> Any:
        """The value that this rank has posted, or None if none came in time."""
        return self.collect(stage, [rank], seconds).values.get(rank)

    def collect(
        self,
        stage: str,
        ranks: Iterable[int],
        seconds: float,
        is_over: Callable[[], bool] = lambda: False,
        together: bool = False,
    ) -> Answers:
        """Collect the entries of these ranks.

        Args:
            stage: of the entries.
            ranks: the ranks to wait for.
            seconds: after this time ranks without an entry count as silent.
            is_over: called repeatedly; True: no other rank will answer.
            together: stop at the first failure: then no other rank can succeed.
        """
        answers = Answers()
        missing = list(ranks)
        end = time.monotonic() + seconds
        while missing:
            here = [rank for rank in missing if self._store.check([f"{stage}/{rank}"])]
            for rank in here:
                try:
                    self._read(stage, rank, answers)
                except ValueError as error:
                    answers.errors[rank] = f"what it put up cannot be read: {_in_a_line(error)}"
            missing = [rank for rank in missing if rank not in here]
            if (together and answers.errors) or not missing:
                return answers
            if is_over() or time.monotonic() > end:
                answers.is_cut_short = is_over()
                answers.silent = {rank: self._last_step(rank) for rank in missing}
                return answers
            time.sleep(_POLL_SECONDS)
        return answers

    def _read(self, stage: str, rank: int, answers: Answers) -> None:
        name = f"{stage}/{rank}"
        entry: dict[str, Any] = restored(parsed(self._store.get(name)), dict[str, Any], name)
        if "error" in entry:
            answers.errors[rank] = restored(entry["error"], str, name)
        else:
            answers.values[rank] = restored(entry.get("value"), self._kinds[stage], name)

    def _last_step(self, rank: int) -> Step:
        name = f"step/{rank}"
        if not self._store.check([name]):
            return _NOTHING
        try:
            step: Step = restored(parsed(self._store.get(name)), Step, name)
        except ValueError:
            return _UNREADABLE
        return step


def _in_a_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:_MOST_WORDS]
