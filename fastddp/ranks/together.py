"""Collectives that ranks wait for outside of a window. All of fastddp's go through here, and end alike.

A rank waits for them as in a window: ``fastddp ps`` and reports say so, what ends a window's waits ends these, and an
error says which rank has ended, and how.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp._C import Interruption, Reducer, bury, wait_outside
from fastddp.errors import see
from fastddp.ranks.living import Living

models: Living[Any, None] = Living()
"""What is in force in each model that is watched."""
unexplained: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups of which a manager knows who has ended: nobody takes the time to look."""
explanations: list[Callable[[dist.ProcessGroup], str]] = []
"""Each says which rank of a group has ended, in words, or nothing. The first that does is believed."""


def together(collective: Callable[..., dist.Work], *args: Any, group: dist.ProcessGroup, **options: Any) -> None:
    """Run one of torch's collectives. Raises RuntimeError as it does, with the rank that has ended."""
    with telling_who_has_ended(group, of_backend=True):
        work = collective(*args, group=group, async_op=True, **options)
    finish(work, group)


def start_gather(rows: Tensor, mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Let ``rows`` become what each rank has, for :func:`finish` to wait for. Raises as :func:`together`."""
    with telling_who_has_ended(group, of_backend=True):
        return dist.all_gather([*rows], mine, group=group, async_op=True)


def of_all_ranks(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each rank has, in one all-gather: [ranks, ...], of one size."""
    rows = mine.new_empty(group.size(), *mine.shape)
    finish(start_gather(rows, mine, group), group)
    return rows


def finish(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Wait for a collective that was started before."""
    of_group = min((now for now in models if now.process_group is group), key=lambda now: now.number.name, default=None)
    with telling_who_has_ended(group, of_backend=not isinstance(work, dist.Work)):
        if not isinstance(work, dist.Work):  # of a process group written in Python
            work.wait()
            return
        wait_outside(work, _ends(), of_group and of_group.reducer.progress)


@contextmanager
def telling_who_has_ended(group: dist.ProcessGroup, *, of_backend: bool = False) -> Iterator[None]:
    """Let errors of torch in here say which rank has ended, if any.

    ``of_backend``: a backend raises in here, and its plain errors become dist.DistError (note [Whose error it is],
    csrc/waits/interruption.h).
    """
    try:
        yield
    except RuntimeError as raised:
        error = dist.DistBackendError(*raised.args) if of_backend and type(raised) is RuntimeError else raised
        says_why = see("FD015") in str(error) or any(end.is_interrupted for end in _ends())
        explains = [] if says_why or group in unexplained else explanations
        if why := next(filter(None, (explain(group) for explain in explains)), ""):
            for now in models:
                now.reducer.progress.fails_for_others()
            error.args = (f"{error}\n{why}" + see("FD015"),)
        raise error.with_traceback(raised.__traceback__) from None


def _ends() -> list[Interruption]:
    """What ends this thread's waits."""
    meeting: Interruption | None = getattr(_of_thread, "meeting", None)
    return [now.reducer.interruption for now in models] if meeting is None else [meeting]


_of_thread = threading.local()


class Waits:
    """A model's waits for other ranks, in all its groups. A thread that ends them holds this, and not the model."""

    _WAIT = ("tick", "finish", "closing", "gather", "agree")  # what a rank does while it waits for others

    def __init__(self) -> None:
        self._now: tuple[Interruption, Callable[[], float]] = Interruption([]), lambda: 0.0  # which belong together

    def are_of(self, reducer: Reducer) -> None:
        """From now on the model waits in steps."""
        progress = reducer.progress

        def seconds() -> float:
            now = progress.read()
            return now.seconds if now.doing in self._WAIT else 0.0

        self._now = reducer.interruption, seconds

    @contextmanager
    def meeting(self, group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
        """In here ranks of ``group`` meet: nothing of their models' groups before ends their waits."""
        begin = time.monotonic()
        meeting = Interruption([] if device.type == "cpu" else [group])
        self._now = meeting, lambda: time.monotonic() - begin
        _of_thread.meeting = meeting
        try:
            yield
        except RuntimeError:
            if meeting.is_interrupted:
                bury([group])
            raise
        finally:
            _of_thread.meeting = None

    def look(self) -> tuple[float, Callable[[str], None]]:
        """For how many seconds the model waits now; and what ends that, and later waits in this group, saying why."""
        interruption, seconds = self._now

        def end(why: str) -> None:
            interruption.interrupt(why)
            interruption.abort_groups()

        return seconds(), end
