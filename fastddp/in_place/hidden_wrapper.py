"""The wrapper of a module that is replicated in place. Nobody sees it: the module calls it, and a backward does."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fastddp.ddp import DistributedDataParallel
from fastddp.engine import Carried
from fastddp.errors import see
from fastddp.module.backward import is_inside_backward
from fastddp.torch_compat.compiling import leave_alone

# Note [Who holds whom]
# The module holds its wrapper, so nothing that the wrapper has may hold the module, which would then be freed by the
# garbage collector alone, long after its user dropped it. Submodules may be held.


class HiddenWrapper(DistributedDataParallel):
    """Does for its module what the wrapper of torch's DDP does.

    The module's own forward goes through :meth:`forward`. A backward to which no forward has led, since the loss came
    by another method or a submodule, opens its window by its first gradient (note [Windows without a forward],
    ``csrc/reducer/reducer.cpp``). What stays local is decided in backward.
    """

    _is_alone = True
    _synchronises = True
    _steps_before: int | None = None  # those of optimizers, when the last window was opened

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            self.__dict__["_module"] = weakref.ref(value)  # note [Who holds whom]
        else:
            super().__setattr__(name, value)

    @property
    def module(self) -> Any:  # type: ignore[override]  # torch's class has an attribute
        """None: it is gone."""
        return self.__dict__["_module"]()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's."""
        return iter(self.module.named_parameters(*args, **kwargs))

    def _make_engine(self, carried: Carried | None = None) -> None:
        leave_alone(HiddenWrapper.forward, HiddenWrapper._callee)
        module: Any = weakref.proxy(self.module)
        self._recipe = dataclasses.replace(self._recipe, module=module)
        super()._make_engine(carried)
        this = weakref.ref(self)

        @torch.no_grad()
        def open_window() -> None:
            if (wrapper := this()) is not None:
                wrapper._open_in_backward()

        self.reducer.opens_by(open_window)
        self.reducer.set_local(not self._synchronises)

    @property
    def require_backward_grad_sync(self) -> bool:  # type: ignore[override]  # torch's class has an attribute
        """Whether the next backward averages gradients. Torch's DDP asks when a forward begins."""
        return self._synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._synchronises = value
        if "reducer" in self.__dict__:
            self.reducer.set_local(not value)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. As a wrapper does, if this forward may have a backward that opens a window."""
        is_partial = self.reducer.state == "partial"  # another backward may bring what it lacks
        if torch.is_grad_enabled() and not is_partial:
            return super().forward(*inputs, **kwargs)
        if not is_partial:  # one rank alone may evaluate, but other ranks may wait until it repairs a window
            self.reducer.begin_forward(grad_enabled=False)
        if self.engine.sharded is not None:
            self.engine.sharded.check_parameters()
        return self._run_ddp_forward(*inputs, **kwargs)

    def _callee(self) -> Callable[..., Any]:
        return types.MethodType(self.module.__class__.__call__, self.module)  # the plain class

    def _open_in_backward(self) -> None:
        if self._stand_ins is not None:
            raise RuntimeError(_ONLY_BY_FORWARD + see("FD033"))
        self._begin(synchronises=True, grad_enabled=True)
        self._arm(())
        self.require_forward_param_sync = True

    def _rebuild_buckets(self) -> None:
        """Not within the first step of a static graph, which may have several backwards, and so several windows."""
        taken, before = self.engine.steps.taken, self._steps_before
        self._steps_before = taken
        if not (self.static_graph and is_inside_backward() and taken == before):
            super()._rebuild_buckets()

    def will_sync_module_buffers(self) -> bool:
        """Not where one rank alone may run the forward (under ``no_grad``), or the graph still needs the buffers."""
        may = self.engine.now.is_uneven if is_inside_backward() else torch.is_grad_enabled()
        return may and super().will_sync_module_buffers()


_ONLY_BY_FORWARD = (
    "fastddp: a backward has begun that no forward of the replicated module has led to. Its parameters are parts of "
    "DTensors, which stand in their places during its own forward alone. Call the module itself, not a method or a "
    "submodule of it, and call backward once."
)
