"""For tests that wait for another process or thread, and for those of what is written to stderr by C++."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE = 50.0  # seconds; for a machine that has much to do


def until(holds: Callable[[], bool]) -> bool:
    """Whether it has come to hold."""
    end = time.monotonic() + DEADLINE
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def stderr_of_the_process() -> Iterator[Callable[[], str]]:
    """What is called inside, or after it, returns what was written so far."""
    with tempfile.NamedTemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name).read_text
        finally:
            os.dup2(before, 2)
            os.close(before)
