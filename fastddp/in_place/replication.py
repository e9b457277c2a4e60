"""What a module has that is replicated in place: its wrapper, or how to make it when it is first used."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastddp.errors import see
from fastddp.in_place import local_training
from fastddp.in_place.hidden_wrapper import HiddenWrapper
from fastddp.torch_compat.compiling import is_exporting, leave_alone, runs_here
from fastddp.torch_compat.refusals import REPLICATED, replication_of

PLAIN_CLASS = "_fastddp_plain_class"
"""The attribute of a replicated class: the class that it was made of."""


class Replication:
    """The wrapper of one module. It is made when a forward of the module, or of a submodule, needs it first.

    So parameters may be on the meta device until then.

    Args:
        arguments: of the wrapper's constructor.
        hook: the communication hook, after its state.
    """

    wrapper: HiddenWrapper | None = None
    require_backward_grad_sync = True  # the wrapper's, as soon as there is one

    def __init__(self, arguments: dict[str, Any], hook: tuple[object, Callable[..., Any]] | None = None) -> None:
        self.arguments = arguments
        if (delayed := arguments.get("delay_all_reduce_named_params")) is not None:
            arguments["delay_all_reduce_named_params"] = list(delayed)  # it may be an iterator, and a constructor raise
        self._hook = hook
        self.module: Callable[[], Any] = lambda: None
        self._makes = threading.RLock()

    def attach(self, module: nn.Module) -> None:
        """Belong to ``module``."""
        leave_alone(Replication.runs, Replication.ready)
        leave_alone(_FirstCall.__call__, where_inlined=False)
        self.module = weakref.ref(module)
        local_training.waiting[self] = None
        first = _FirstCall(weakref.ref(self))
        for part in module.modules():
            if part is not module:
                part.register_forward_pre_hook(first)

    def parameters(self) -> list[nn.Parameter]:
        """The module's."""
        return [] if (module := self.module()) is None else list(module.parameters())

    def runs(self, part: nn.Module) -> bool:
        """Whether a forward of ``part`` needs nothing: it is within one of the module, or is a copy's."""
        module = self.module()
        if part is not module and (module is None or all(part is not one for one in module.modules())):
            return True
        return (self.wrapper is not None and runs_here(self.wrapper)) or torch.jit.is_tracing()

    def ready(self) -> HiddenWrapper:
        """The wrapper. All ranks make it together."""
        return self.wrapper or self._make()

    @torch._disable_dynamo
    def _make(self) -> HiddenWrapper:
        with self._makes:
            if self.wrapper is not None:  # another thread's forward came first
                return self.wrapper
            module = self.module()
            wrapper = HiddenWrapper(module, **self.arguments)
            if self._hook is not None:
                wrapper.register_comm_hook(*self._hook)
            local_training.waiting.pop(self, None)
            forget_first_calls(module)
            wrapper.require_backward_grad_sync = self.require_backward_grad_sync
            local_training.follow(module, wrapper)
            self.wrapper = wrapper
            return wrapper

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """See the wrapper's."""
        if self.wrapper is not None:
            self.wrapper.register_comm_hook(state, hook)
        elif self._hook is not None:
            raise RuntimeError("A communication hook is already registered; replicate the module anew." + see("FD034"))
        self._hook = (state, hook)

    def leaves_traces(self) -> bool:
        """Whether the module's parts are not as they would be without it."""
        return self.wrapper is None or self.wrapper._stand_ins is not None

    def put_whole_parameters(self, memo: dict[Any, Any]) -> None:
        """Let a deep copy have DTensors where the module has its rank's parts of them."""
        if self.wrapper is not None and (stand_ins := self.wrapper._stand_ins) is not None:
            for one in self.parameters():
                memo[id(one)] = nn.Parameter(stand_ins._make(one).detach().clone(), one.requires_grad)

    def __reduce__(self) -> Any:
        return type(None), ()  # it is one module's


class _FirstCall:
    """A hook before the forward of a submodule, which a method of the module may have called."""

    def __init__(self, replication: Callable[[], Replication | None] = lambda: None) -> None:
        self._replication = replication

    def __call__(self, submodule: nn.Module, inputs: Any) -> None:
        if is_exporting():
            return
        replication = self._replication()
        if replication is not None and not replication.runs(submodule):
            replication.ready()

    def __reduce__(self) -> Any:
        return _FirstCall, ()  # of none: a submodule may be copied alone


def forget_first_calls(module: nn.Module) -> None:
    """Take the hooks off that wait for a first forward."""
    for part in module.modules():
        hooks = part._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _FirstCall)]:
            del hooks[key]


set_class = vars(object)["__class__"].__set__
"""``set_class(object, kind)``: its class may define how ``__class__`` is assigned."""


def let_go(module: Any) -> None:
    """Make ``module`` plain."""
    if (found := replication_of(module)) is not None:
        local_training.waiting.pop(found, None)
        forget_first_calls(module)
    module.__dict__.pop(REPLICATED, None)
    set_class(module, getattr(type(module), PLAIN_CLASS, type(module)))
