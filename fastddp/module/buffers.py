"""Buffers before and after a forward: rank 0's for all ranks, or as a hook synchronises them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from fastddp.errors import see
from fastddp.module.backward import when_backward_ends, when_backward_reaches


def buffer_hook(state: object, hook: Callable[..., Any], location: _BufferCommHookLocation) -> _BufferCommHook:
    """Torch's record of a hook that replaces the broadcast. Raises TypeError for what is no hook or location."""
    if not callable(hook):
        raise TypeError(f"A hook for buffers must be callable, got {type(hook).__name__}." + see("FD024"))
    if not isinstance(location, _BufferCommHookLocation):
        raise TypeError(
            "comm_hook_location must be torch.nn.parallel.distributed._BufferCommHookLocation.PRE_FORWARD or "
            f"POST_FORWARD, got {location!r}." + see("FD024")
        )
    return _BufferCommHook(hook, state, location)


class BufferSync:
    """Calls the hook of one model's buffers, and waits for the futures that it returns."""

    def __init__(self) -> None:
        self._running: list[torch.futures.Future] = []

    def call(self, hook: _BufferCommHook, buffers: Mapping[str, Tensor]) -> None:
        """Let ``hook`` synchronise ``buffers``; it returns None, a future or a list of futures."""
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            running = hook.buffer_comm_hook(hook.buffer_comm_hook_state, buffers)
        self._running += [running] if isinstance(running, torch.futures.Future) else running or []

    def follow(self, output: Any) -> None:
        """If futures are running, wait for them at the end of each backward that goes through ``output``."""
        if self._running:
            when_backward_reaches(output, lambda: when_backward_ends(self.wait))

    def wait(self) -> None:
        """Wait for all futures; raise what one of them raises."""
        running, self._running = self._running, []
        if running:  # torch.jit.trace cannot follow a future, not even that of an empty list
            torch.futures.wait_all(running)

    def __getstate__(self) -> dict[str, Any]:
        self.wait()  # so that a copy has the synchronised buffers
        return self.__dict__
