"""Lets other ranks know what this one has when its backward waits for them for long: they may ask.

A thread looks twice a second, since the one that runs backward stands still. There is one as long as there are models.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from fastddp._C import WaitClock, Waiting

PATIENCE = 2.0  # seconds
_PAUSE = PATIENCE / 4

Model = TypeVar("Model", bound=nn.Module)


class _Watched:
    def __init__(self, clock: WaitClock, report: Callable[[Any, Waiting], None]) -> None:
        self._clock = clock  # not the model's reducer: the thread must not be the last to hold that
        self._report = report
        self._reported = -1  # the window

    def look(self, this: weakref.ref[nn.Module]) -> None:
        waiting = self._clock.read()
        if waiting is None or waiting.seconds < PATIENCE or waiting.window == self._reported:
            return
        self._reported = waiting.window
        if (model := this()) is not None:
            with contextlib.suppress(Exception):  # without a store nobody learns of it; who asks says so
                self._report(model, waiting)


_watched: dict[weakref.ref[nn.Module], _Watched] = {}
_thread: threading.Thread | None = None
_lock = threading.Lock()


def watch(model: Model, clock: WaitClock, report: Callable[[Model, Waiting], None]) -> None:
    """Call ``report(model, waiting)``, from another thread, once in each window in which backward waits for long.

    Args:
        model: what trains; it is not kept alive.
        clock: of its reducer.
        report: what it raises is lost.
    """
    global _thread
    _watched[weakref.ref(model, lambda gone: _watched.pop(gone, None))] = _Watched(clock, report)
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look_now_and_then, name="fastddp long waits", daemon=True)
            _thread.start()


def _look_now_and_then() -> None:
    global _thread
    while True:
        time.sleep(_PAUSE)
        for this, watched in list(_watched.items()):
            watched.look(this)
        with _lock:
            if not _watched:
                _thread = None
                return
