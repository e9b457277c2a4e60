"""The class of a module that is replicated in place: a subclass of the one that it had."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from fastddp.torch_compat.refusals import REPLICATED

_PLAIN = "_fastddp_plain_class"


@functools.cache
def replicated_class(mixin: type, plain: type) -> type:
    """A subclass of both. Its ``__name__`` is that of ``plain``, since users write it into files."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": plain.__module__, "__doc__": plain.__doc__, _PLAIN: plain}
        namespace["__qualname__"] = f"Replicated{plain.__qualname__}"

    return types.new_class(plain.__name__, (mixin, plain), {}, fill)


def plain_class(kind: type) -> Any:
    """The class that a replicated one was made of."""
    return getattr(kind, _PLAIN)


def let_go(module: Any) -> Any:
    """Make ``module`` plain, and return what has replicated it."""
    held = module.__dict__.pop(REPLICATED)
    module.__class__ = plain_class(type(module))
    held.detach()
    return held


@contextlib.contextmanager
def plain(module: Any) -> Iterator[Any]:
    """Let ``module`` be plain for a while, and give what has replicated it."""
    kind, held = type(module), let_go(module)
    try:
        yield held
    finally:
        module.__class__ = kind
        module.__dict__[REPLICATED] = held
        held.attach(module)
