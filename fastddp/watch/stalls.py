"""A step that stands still: who keeps the others waiting, and why.

The work is done by a thread in C++, which needs no GIL (``csrc/watch/stall_watch.h``). Here it gets what only Python
has.
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Literal, TypeAlias

import torch.distributed as dist

from fastddp._C import Progress, StallWatch, remove_own_pages
from fastddp.watch.error_file import leave_reports
from fastddp.watch.lookout import look_now_and_then
from fastddp.watch.numbering import number_of
from fastddp.watch.python_calls import libraries, lines_of_main_thread
from fastddp.watch.stall_report import StallReport
from fastddp.wrapper import Wrapper

OnStall: TypeAlias = Literal["report", "raise"] | Callable[[StallReport], object] | None
"""When a step stands still: write why to stderr; that, and raise on all ranks; that, and call back; or do nothing."""

_pages: weakref.WeakSet[Progress] = weakref.WeakSet()
_watches: weakref.WeakSet[StallWatch] = weakref.WeakSet()


def check_stall_options(on_stall: object, patience: object) -> None:
    """Raise TypeError or ValueError unless they are an :data:`OnStall` and a number of seconds."""
    if on_stall is not None and not callable(on_stall) and on_stall not in ("report", "raise"):
        kind = ValueError if isinstance(on_stall, str) else TypeError
        raise kind(
            f'on_stall must be "report", "raise", a callable that takes a fastddp.StallReport, or None, got '
            f"{on_stall!r}."
        )
    if isinstance(patience, bool) or not isinstance(patience, Real) or not float(patience) > 0:
        raise ValueError(f"stall_patience must be a number of seconds > 0, got {patience!r}.")


def watch_for_stalls(model: Wrapper, on_stall: OnStall, patience: float) -> StallWatch | None:
    """Watch the steps of ``model``, for as long as what is returned lives."""
    key = f"fastddp/stall/{number_of(model).name}"
    store = dist.distributed_c10d._get_process_group_store(model.process_group)
    job = _agree_on_job(store, key)
    model.reducer.progress.belongs_to(job)
    _pages.add(model.reducer.progress)
    _end_with_a_child()
    if on_stall is None:
        return None
    raises = model.reducer.interruption if on_stall == "raise" else None
    device = model.reducer.device_progress
    device.watch()
    watch = StallWatch(
        model.reducer.progress,
        store,
        key,
        job,
        float(patience),
        prints=True,
        raises=raises,
        device=device,
        waits=model.reducer.interruption,
        libraries=libraries(),
    )
    _watches.add(watch)
    look_now_and_then(model, _Duties(watch, on_stall).look)
    return watch


@contextmanager
def telling_who_has_ended(model: Wrapper) -> Iterator[None]:
    """Add to an error of a collective in here which rank of this machine has ended, if one has, as backward does."""
    try:
        yield
    except RuntimeError as error:
        watch = model._stall_watch
        if watch is not None and (why := watch.who_has_ended()):
            model.reducer.progress.fails_for_others()
            error.args = (f"{error}\n{why}",)
        raise


class _Duties:
    """What the thread in C++ cannot do."""

    def __init__(self, watch: StallWatch, on_stall: OnStall) -> None:
        self._watch = weakref.ref(watch)
        self._on_stall = on_stall

    def look(self) -> None:
        watch = self._watch()
        if watch is None:
            return
        if watch.wants_stack():
            watch.give_stack(lines_of_main_thread())
        report = watch.take_report()
        if report is not None and callable(self._on_stall):
            self._on_stall(StallReport.of(report))


def _end() -> None:
    """At the end of this process, behind the error that has ended it: collecting garbage may take it seconds more."""
    error = _error_that_ends_the_process()
    stays = bool(error) or any(watch.leaves_others() for watch in list(_watches))
    for page in list(_pages):
        page.process_ends(error, stays)
    for watch in list(_watches):
        watch.name_who_has_ended()
    leave_reports(watch.report_of_open_step() for watch in list(_watches))


atexit.register(_end)


def _end_with_a_child() -> None:
    """A child of multiprocessing that was forked ends without what is registered with atexit, here or in C++."""
    global _child
    if multiprocessing.parent_process() is not None and _child != os.getpid():
        _child = os.getpid()
        multiprocessing.util.Finalize(None, _end_child, exitpriority=0)


_child: int | None = None


def _end_child() -> None:
    _end()
    # That of its own context, if it has one: the default may be another.
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method(
        allow_none=True
    )
    if method != "spawn":
        remove_own_pages()


_MOST_LETTERS = 200


def _error_that_ends_the_process() -> str:
    """Its type and the first line of its text; empty: none that is known."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):  # where multiprocessing has told of the error that it comes from
        error = error.__context__
    if error is None or isinstance(error, SystemExit):
        return ""
    return (type(error).__name__ + ": " + (str(error).strip() or "(no text)").splitlines()[0])[:_MOST_LETTERS]


def _agree_on_job(store: dist.Store, key: str) -> int:
    """A number that the ranks of this model have in common, and no others on their machines."""
    mine = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
    first = store.compare_set(f"{key}/job", "", mine)
    return int.from_bytes(hashlib.blake2b(first, digest_size=8).digest(), "big")
