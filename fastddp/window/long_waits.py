"""Lets other ranks know what this one has when its backward waits for them for long: they may ask."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from fastddp.watch.lookout import look_now_and_then

if TYPE_CHECKING:
    from fastddp._C import Progress, Waiting

PATIENCE = 2.0  # seconds

Model = TypeVar("Model", bound=nn.Module)


class _Watched:
    def __init__(self, model: nn.Module, progress: Progress, report: Callable[[Any, Waiting], None]) -> None:
        self._model = weakref.ref(model)
        self._progress = progress  # not the model's reducer: the thread must not be the last to hold that
        self._report = report
        self._reported = -1  # the window

    def look(self) -> None:
        waiting = self._progress.waiting()
        if waiting is None or waiting.seconds < PATIENCE or waiting.window == self._reported:
            return
        self._reported = waiting.window
        if (model := self._model()) is not None:
            self._report(model, waiting)  # without a store nobody learns of it; who asks says so


def watch(model: Model, progress: Progress, report: Callable[[Model, Waiting], None]) -> None:
    """Call ``report(model, waiting)``, from another thread, once in each window in which backward waits for long.

    Args:
        model: what trains; it is not kept alive.
        progress: of its reducer.
        report: what it raises is lost.
    """
    look_now_and_then(model, _Watched(model, progress, report).look)
