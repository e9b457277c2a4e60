"""A Python thread that looks now and then, because the training thread may stand still. One for all models."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable

PAUSE = 0.5  # seconds between two looks

_lookouts: dict[weakref.ref[object], list[Callable[[], None]]] = {}
_thread: threading.Thread | None = None
_lock = threading.Lock()


def look_now_and_then(owner: object, look: Callable[[], None]) -> None:
    """Call ``look()`` twice a second in a thread, errors lost, while ``owner`` lives, which it must not keep alive."""
    global _thread
    with _lock:
        _lookouts.setdefault(weakref.ref(owner, lambda gone: _lookouts.pop(gone, None)), []).append(look)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="fastddp lookout", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    while True:
        time.sleep(PAUSE)
        for looks in list(_lookouts.values()):
            for look in looks:
                with contextlib.suppress(Exception):
                    look()
        with _lock:
            if not _lookouts:
                _thread = None
                return
