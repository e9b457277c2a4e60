"""Finds out which rank keeps the others waiting when a step stands still, and why.

A C++ thread, which needs no GIL, does the work (``csrc/watch/stall_watch.h``). This module gives it what only Python
has.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import textwrap
import time
import weakref

import torch.distributed as dist

from fastddp._C import StallWatch, remove_own_pages
from fastddp.exchange.in_force import InForce
from fastddp.ranks.living import Living
from fastddp.ranks.together import explanations, models
from fastddp.watch import roll
from fastddp.watch.error_file import leave_reports
from fastddp.watch.lookout import look_now_and_then
from fastddp.watch.options import Watch
from fastddp.watch.python_calls import libraries, lines_of_main_thread
from fastddp.watch.stall_report import OnStall, StallReport

_watches: Living[StallWatch, weakref.ref[dist.ProcessGroup]] = Living()


def stall_key(now: InForce) -> str:
    """The key of the process group's store where a model's ranks write what they do."""
    return f"fastddp/stall/{now.number.name}"


def begin_to_watch(group: dist.ProcessGroup) -> None:
    """Let other ranks know how this one ends, from its first wrapper on."""
    roll.enter(group)
    _end_with_a_child()


def watch_for_stalls(now: InForce, options: Watch) -> StallWatch | None:
    """Watch a model's steps, for as long as the result lives."""
    key = stall_key(now)
    store = dist.distributed_c10d._get_process_group_store(now.process_group)
    # A number that the ranks of this model share, and no others on their machines.
    first = store.compare_set("fastddp/job", "", f"{socket.gethostname()} {os.getpid()} {time.time_ns()}")
    job = int.from_bytes(hashlib.blake2b(first + key.encode(), digest_size=8).digest(), "big")
    now.reducer.progress.belongs_to(job, sys.argv[0] if sys.argv else "", now.number.generation)
    models[now] = None
    _end_with_a_child()
    if options.stall is None:
        return None
    raises = now.reducer.interruption if options.stall == "raise" else None
    device = now.reducer.device_progress
    device.watch()
    watch = StallWatch(
        now.reducer.progress,
        store,
        key,
        job,
        float(options.patience),
        prints=True,
        raises=raises,
        device=device,
        waits=now.reducer.interruption,
        libraries=libraries(),
        idle_patience=math.inf if raises is None or options.idle_patience is None else float(options.idle_patience),
    )
    _watches[watch] = weakref.ref(now.process_group)
    look_now_and_then(now, _Duties(watch, options.stall, dist.get_process_group_ranks(now.process_group)).look)
    return watch


def _who_has_ended(group: dist.ProcessGroup) -> str:
    """What watches know, of the models of this group first; only the first of them looks for a while."""
    watches = sorted(_watches, key=lambda watch: _watches[watch]() is not group)
    said = (watch.who_has_ended(looks=1 if later else 20) for later, watch in enumerate(watches))
    return next(filter(None, said), "")


explanations.insert(0, _who_has_ended)  # it knows most


class _Duties:
    """What the thread in C++ cannot do."""

    def __init__(self, watch: StallWatch, tell: OnStall, ranks: list[int]) -> None:
        self._watch = weakref.ref(watch)
        self._tell = tell
        self._ranks = ranks

    def look(self) -> None:
        watch = self._watch()
        if watch is None:
            return
        if watch.wants_stack():
            watch.give_stack(lines_of_main_thread(self._ranks))
        report = watch.take_report()
        if report is not None and callable(self._tell):
            self._tell(StallReport.of(report))


def _end() -> None:
    """Runs when this process ends, after the error that ended it: garbage collection may still take seconds."""
    error = _error_that_ends_the_process()
    stays = bool(error) or any(watch.leaves_others() for watch in _watches)
    for now in models:
        now.reducer.progress.process_ends(error, stays)
    if error:
        roll.leave(error)
    for watch in _watches:
        watch.name_who_has_ended()
    leave_reports(watch.report_of_open_step() for watch in _watches)


atexit.register(_end)


def _end_with_a_child() -> None:
    """Run :func:`_end_child` in multiprocessing's children: forked ones run no atexit handlers, here or in C++."""
    global _child
    if multiprocessing.parent_process() is not None and _child != os.getpid():
        _child = os.getpid()
        multiprocessing.util.Finalize(None, _end_child, exitpriority=0)


_child: int | None = None


def _end_child() -> None:
    _end()
    # From its own context, if it has one: the default may be another.
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method(
        allow_none=True
    )
    if method != "spawn":
        remove_own_pages()


_MOST_LETTERS = 200


def _error_that_ends_the_process() -> str:
    """The error's type and first line of text; empty: none is known."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):  # multiprocessing has already reported its cause
        error = error.__context__
    if error is None or isinstance(error, SystemExit):
        return ""
    text = type(error).__name__ + ": " + (str(error).strip() or "(no text)").splitlines()[0]
    return textwrap.shorten(text, _MOST_LETTERS, placeholder=" ...")
