"""What a hook's state knows of its model, even when the model is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastddp import _C
from fastddp.exchange.descriptions import Setting


class OfModel:
    """A model's windows, reducer and setting, for the state of a hook, which may outlive the model and be saved then.

    Args:
        reducer: returns the model's reducer, as long as there is a model.
        setting: returns the model's setting, as long as there is a model.
        name: the model's part of keys in the store of its process group.
    """

    def __init__(self, reducer: Callable[[], _C.Reducer], setting: Callable[[], Setting], name: str) -> None:
        self.reducer = reducer
        self.name = name
        self._setting = setting
        self._last: tuple[int, Setting] | None = None

    def windows(self) -> int:
        """How many windows there have been."""
        return self.reducer().windows() if self._last is None else self._last[0]

    def setting(self) -> Setting:
        """The setting. When the model is gone, its parameters are tensors without memory."""
        return self._setting() if self._last is None else self._last[1]

    def end(self, windows: int, setting: Setting) -> None:
        """Keep the last number of windows and the last setting of a model that goes."""
        self._last = (windows, setting)


@contextmanager
def all_or_nothing(state: object) -> Iterator[None]:
    """If this context ends by an error, give a hook's ``state``, and dicts in it, what they had when it began."""
    own = getattr(state, "__dict__", {})
    before = [(one, dict(one)) for one in (own, *own.values()) if type(one) is dict]
    try:
        yield
    except BaseException:
        for one, what in before:
            one.clear()
            one.update(what)
        raise
