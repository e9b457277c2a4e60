"""What fastddp logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lines_of_the_logger(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What fastddp's logger is given inside, from this level on; by default from the one that it has."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fastddp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level or before)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
