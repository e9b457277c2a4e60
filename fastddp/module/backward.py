"""Backwards: whether one runs, which raise, and calls at two moments: at the output of a forward, and at the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from fastddp import _C
from fastddp.module.nested import tensors_in

backwards_begun = 0
"""How many backwards that accumulate gradients this process has begun, but for those inside of another one."""


def is_inside_backward() -> bool:
    """Whether autograd's engine calls this thread now."""
    return torch._C._current_graph_task_id() != -1


def when_backward_reaches(output: Any, function: Callable[[], None]) -> None:
    """Call ``function`` in each backward, before it goes through a node that made a tensor in a forward's ``output``.

    Autograd's engine calls it, once for each such node, so it may use :func:`when_backward_ends`.
    """
    for node in {tensor.grad_fn for tensor in tensors_in(output)}:
        if node is not None:
            node.register_prehook(lambda gradients: function())


def when_backward_ends(function: Callable[[], None], also_after_error: bool = False) -> None:
    """Call ``function`` at the end of the backward that is running. If it raises, backward raises the same.

    With ``also_after_error`` it is called when the backward raises, too. Its own error is then only printed.
    """
    Variable._execution_engine.queue_callback(_CalledWhenDropped(function) if also_after_error else function)


class _CalledWhenDropped:
    """Calls a function once: when it is called itself, or else when nobody refers to it any longer.

    The engine calls a callback when a backward ends, and drops it when the backward raises.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()

    def __del__(self) -> None:
        self()


def _notice_errors() -> None:
    """Let a backward that raises tell the models whose gradients it was to bring.

    The engine tells nobody: one that raises before it reaches a model is seen by no hook of that model. So the function
    by which torch calls the engine is wrapped, once.
    """
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(run)
    def run_and_tell(roots: Any, *args: Any, **kwargs: Any) -> Any:
        global backwards_begun
        if not kwargs.get("accumulate_grad") or is_inside_backward():
            return run(roots, *args, **kwargs)
        backwards_begun += 1
        try:
            return run(roots, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # the caller gets the error of its backward
                _C.backward_raised([root for root in roots if isinstance(root, Tensor)])
            raise

    torch.autograd._engine_run_backward = run_and_tell  # type: ignore[assignment, attr-defined]


_notice_errors()
