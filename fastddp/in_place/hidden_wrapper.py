"""The wrapper of a module that is replicated in place. Nobody sees it: the module calls it, and a backward does."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp.ddp import DistributedDataParallel
from fastddp.errors import see
from fastddp.in_place.classes import plain_class
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

    _steps_before_window: int | None = None  # of optimizers, when the last window was opened
    _synchronises = True
    _is_alone = True

    # ------------------------------------------------------------------------------------------------------ its module

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            self.__dict__["_module"] = weakref.ref(value)
        else:
            super().__setattr__(name, value)

    @property
    def module(self) -> Any:  # type: ignore[override]  # torch's class has an attribute
        """None: it is gone."""
        return self.__dict__["_module"]()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's."""
        return iter(self.module.named_parameters(*args, **kwargs))

    def _callee(self) -> Callable[..., Any]:
        module = self.module
        return types.MethodType(plain_class(type(module)).__call__, module)

    # ------------------------------------------------------------------------------------------------------ its windows

    def _make_engine(self) -> None:
        leave_alone(HiddenWrapper.forward)
        self._recipe = dataclasses.replace(self._recipe, module=weakref.proxy(self.module))
        super()._make_engine()
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
        """Run the module as the wrapper does, where this forward may have a backward that opens a window."""
        if torch.is_grad_enabled() and self.reducer.state != "partial":
            return super().forward(*inputs, **kwargs)
        # One rank alone may evaluate. And another backward may bring what a partial window lacks.
        if self.engine.sharded is not None:
            self.engine.sharded.check_parameters()
        return self._run_ddp_forward(*inputs, **kwargs)

    def _open_in_backward(self) -> None:
        if self._stand_ins is not None:
            raise RuntimeError(_ONLY_BY_FORWARD + see("FD038"))
        self._begin(synchronises=True, grad_enabled=True)
        self._arm(())
        self.require_forward_param_sync = True

    def _rebuild_buckets(self) -> None:
        """Not within the first step of a static graph, which may have several backwards, and so several windows."""
        taken, before = self.engine.steps.taken, self._steps_before_window
        self._steps_before_window = taken
        if not (self.static_graph and is_inside_backward() and taken == before):
            super()._rebuild_buckets()

    def will_sync_module_buffers(self) -> bool:
        """Not where one rank alone may run the forward (under ``no_grad``), or the graph still needs the buffers."""
        may = self.engine.now.is_uneven if is_inside_backward() else torch.is_grad_enabled()
        return may and super().will_sync_module_buffers()

    # ------------------------------------------------------------------------------ what the module asks of its wrapper

    def runs(self, module: nn.Module) -> bool:
        """Whether a forward of the module is part of one that runs, or of one that nobody follows."""
        return TorchDDP._active_ddp_module is self or not is_followed()

    def has_changed(self) -> bool:
        """Whether the module has other parameters than it had, so that this is of no use to it."""
        try:
            self.engine.parameter_watch.check()
        except RuntimeError:
            return True
        return False

    def ready(self, module: nn.Module) -> HiddenWrapper:
        """This."""
        return self

    def when_ready(self, method: str, *args: Any) -> None:
        """Call a method now."""
        getattr(self, method)(*args)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Say whether the backwards that come average gradients."""
        self.require_backward_grad_sync = requires_gradient_sync

    def attach(self, module: nn.Module) -> None:
        """Do nothing: the constructor has got the module."""

    def detach(self) -> None:
        """Do nothing: whoever wants no engine drops this."""

    def to_copy(self) -> dict[str, Any]:
        """The arguments of a ``Deferred`` of a copy in this process."""
        return {"state": self._without_engine() | {"process_group": self.process_group}}

    def to_pickle(self) -> dict[str, Any]:
        """The same for another process."""
        return {"state": self.__getstate__()}

    def kept_in_copies(self) -> list[Any]:
        """What a copy has in common with this."""
        return [self.process_group, self._recipe.hierarchy, self.__dict__.get("device_mesh")]

    def _without_engine(self) -> dict[str, Any]:
        state = super()._without_engine()
        del state["_module"]
        state["_recipe"] = dataclasses.replace(self._recipe, module=None)  # type: ignore[arg-type]  # another one comes
        return state


def is_followed() -> bool:
    """Whether forwards of modules are what users run, and not what torch runs to see what they do."""
    return not (torch.jit.is_tracing() or torch.compiler.is_exporting())


_ONLY_BY_FORWARD = (
    "fastddp: a backward has begun that no forward of the replicated module has led to. Its parameters are parts of "
    "DTensors, which stand in their places during its own forward alone. Call the module itself, not a method or a "
    "submodule of it, and call backward once."
)
