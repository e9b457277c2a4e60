"""Tests that run on ranks, where what they assert is looked at.

    @on_ranks(2)
    def test_ranks_add_up(rank: int) -> None:
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 3

What ranks are compared for takes ``ranks.run`` (ranks.py), which returns what each of them has found.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any


def on_ranks(world_size: int, pool: str = "ranks", **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on so many ranks of that pool, each with its ``rank``; other arguments are those of a pytest test.

    ``how``: what ``RankPool.run`` takes beside arguments of the function.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            arguments.pop(pool).run(_run_on_rank, world_size, test.__module__, test.__name__, arguments, **how)

        named = inspect.Parameter(pool, inspect.Parameter.KEYWORD_ONLY)
        signature = inspect.signature(test)
        others = [p.replace(kind=p.KEYWORD_ONLY) for name, p in signature.parameters.items() if name != "rank"]
        run.__signature__ = signature.replace(parameters=[named, *others])  # type: ignore[attr-defined]
        return run

    return decorate


def _run_on_rank(rank: int, module: str, test: str, arguments: dict[str, Any]) -> None:
    try:
        getattr(importlib.import_module(module), test).__wrapped__(rank, **arguments)
    except AssertionError as error:
        with_values = traceback.TracebackException.from_exception(error, capture_locals=True)
        raise AssertionError("".join(with_values.format())) from None
