"""Hooks that compress, in random training programs: as a program asks for them, and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import AutoState, BlockState
from fastddp.compression import auto
from fastddp.compression.choice import Choice, Cost, Load
from programs import Hook

CANDIDATES = ("plain", "bf16", "int8", "fp8")


def compress(model: fastddp.DistributedDataParallel, hook: Hook) -> None:
    """Register it. What 8 bits leave out stays with the module, whoever wraps it."""
    if "auto" in hook:
        model.register_comm_hook(AutoState(error_budget=0.04, candidates=CANDIDATES), comm_hooks.auto_hook)
        return
    if hook in ("fp16", "bf16"):
        model.register_comm_hook(None, getattr(comm_hooks, f"{hook}_compress_hook"))
        return
    state = getattr(model.module, "block_state", None) or BlockState(fp8="e5m2" if hook == "e5m2" else "e4m3")
    model.module.block_state = state  # type: ignore[assignment]
    is_int8 = hook == "int8"
    model.register_comm_hook(state, comm_hooks.int8_compress_hook if is_int8 else comm_hooks.fp8_compress_hook)


def blocks_of(model: fastddp.DistributedDataParallel) -> BlockState | None:
    """What remembers the errors of 8 bits; another object once ``auto_hook`` has forgotten all; None: nothing does."""
    state = model._comm_hook[0] if model._comm_hook else None
    return state._blocks if isinstance(state, AutoState) else state if isinstance(state, BlockState) else None


@contextmanager
def plans_at_once(hook: Hook) -> Iterator[None]:
    """``auto_hook`` plans after one window, deals the candidates in turn, and finds what the program says."""

    def in_turn(loads: Sequence[Load]) -> Choice:
        names = [[name for name in CANDIDATES if name in load.seconds] for load in loads]
        dealt = tuple(known[(number + 2) % len(known)] for number, known in enumerate(names))
        return Choice(dealt, end=1.0, plain_end=2.0)

    def free(trials: dict[str, Any], agree: Callable[..., Any], largest: int) -> dict[str, Cost]:
        return {name: Cost(0.0, 1.0) for name in trials}

    seconds = iter([1.0] + [2.0 if hook == "auto, then plain" else 0.5] * 1000)
    put_in = {"choose": in_turn, "measure_costs": free, "window_times": lambda reducer: [next(seconds)]}
    with mock.patch.multiple(auto, SETTLED=0, MEASURED=1, **put_in):
        yield
