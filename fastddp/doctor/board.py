"""What ranks tell rank 0 while it may be that some of them hang: entries in the launcher's store, each under a name.

No collective is used, so a rank that does not come is known by its number.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_POLL_SECONDS = 0.02


@dataclass
class Answers:
    """What came of one stage."""

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    silent: dict[int, Step] = field(default_factory=dict)  # and what they were last known to do
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


class Board:
    """One thread's access; a store serves one thread at a time, so each has its own."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs

    def post(self, stage: str, rank: int, make: Callable[[], T]) -> T | None:
        """Make a value and put it up, or what was raised instead; returns the value."""
        value, problem = None, None
        try:
            value = make()
        except Exception as error:
            text = str(error).strip().splitlines()
            problem = f"{type(error).__name__}: {text[0] if text else ''}"
        self._store.set(f"{stage}/{rank}", pickle.dumps((value, problem)))
        return value

    def tell(self, rank: int, number: int, words: str) -> None:
        """Put up what the rank does from now on."""
        self._store.set(f"step/{rank}", pickle.dumps(Step(number, words)))

    def wait_for(self, stage: str, rank: int, seconds: float) -> Any:
        """What this rank has posted, or None if nothing came in time."""
        return self.collect(stage, [rank], seconds).values.get(rank)

    def collect(
        self,
        stage: str,
        ranks: Iterable[int],
        seconds: float,
        is_over: Callable[[], bool] = lambda: False,
        together: bool = False,
    ) -> Answers:
        """Hear these ranks.

        Args:
            stage: whose entries.
            ranks: who is to have one.
            seconds: after which the others count as silent.
            is_over: asked again and again; true: nobody else will come.
            together: if one fails no other can succeed, and it is over as well.
        """
        answers = Answers()
        missing = list(ranks)
        end = time.monotonic() + seconds
        while missing:
            here = [rank for rank in missing if self._store.check([f"{stage}/{rank}"])]
            for rank in here:
                value, error = pickle.loads(self._store.get(f"{stage}/{rank}"))
                if error is None:
                    answers.values[rank] = value
                else:
                    answers.errors[rank] = error
            missing = [rank for rank in missing if rank not in here]
            if (together and answers.errors) or not missing:
                return answers
            if is_over() or time.monotonic() > end:
                answers.is_cut_short = is_over()
                answers.silent = {rank: self._last_step(rank) for rank in missing}
                return answers
            time.sleep(_POLL_SECONDS)
        return answers

    def _last_step(self, rank: int) -> Step:
        name = f"step/{rank}"
        return pickle.loads(self._store.get(name)) if self._store.check([name]) else _NOTHING
