"""Hooks that compress, in random training programs: as a program asks for them."""

from __future__ import annotations

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState
from programs import Hook


def compress(model: fastddp.DistributedDataParallel, hook: Hook) -> None:
    """Register it. What 8 bits leave out stays with the module, whoever wraps it."""
    if hook in ("fp16", "bf16"):
        model.register_comm_hook(None, getattr(comm_hooks, f"{hook}_compress_hook"))
        return
    state = getattr(model.module, "block_state", None) or BlockState(fp8="e5m2" if hook == "e5m2" else "e4m3")
    model.module.block_state = state  # type: ignore[assignment]
    is_int8 = hook == "int8"
    model.register_comm_hook(state, comm_hooks.int8_compress_hook if is_int8 else comm_hooks.fp8_compress_hook)


def blocks_of(model: fastddp.DistributedDataParallel) -> BlockState | None:
    """What remembers the errors of 8 bits; None: nothing does."""
    state = model._comm_hook[0] if model._comm_hook else None
    return state if isinstance(state, BlockState) else None
