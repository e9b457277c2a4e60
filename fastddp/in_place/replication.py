"""What a module has that is replicated in place: its wrapper, or how to make it when it is first used."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastddp.errors import see
from fastddp.in_place import local_training
from fastddp.in_place.hidden_wrapper import HiddenWrapper
from fastddp.torch_compat.compiling import is_exporting, leave_alone
from fastddp.torch_compat.refusals import REPLICATED

PLAIN_CLASS = "_fastddp_plain_class"
"""The attribute of a replicated class: the class that it was made of."""
_GROUPS = ("process_group", "device_mesh")  # arguments that say which ranks to average over


class Replication:
    """The wrapper of one module. It is made when a forward of the module, or of a submodule, needs it first.

    So parameters may be on the meta device until then, and copies that nobody trains have no engine.

    Args:
        arguments: of the wrapper's constructor.
        hook: the communication hook, after its state.
        of_copy: only a forward that trains needs the wrapper.
    """

    wrapper: HiddenWrapper | None = None

    def __init__(
        self, arguments: dict[str, Any], hook: tuple[object, Callable[..., Any]] | None = None, *, of_copy: bool = False
    ) -> None:
        self.arguments = arguments
        if (delayed := arguments.get("delay_all_reduce_named_params")) is not None:
            arguments["delay_all_reduce_named_params"] = list(delayed)  # it may be an iterator, and copies need it too
        self._hook = hook
        self._of_copy = of_copy
        self._synchronises = True
        self._module: Any = None

    def attach(self, module: nn.Module) -> None:
        """Belong to ``module``."""
        leave_alone(Replication.runs, Replication.ready)
        leave_alone(_FirstCall.__call__, where_inlined=False)
        self._module = weakref.ref(module)
        if self.wrapper is None:
            local_training.waiting[self] = None
            first = _FirstCall(self)
            for part in module.modules():
                if part is not module:
                    part.register_forward_pre_hook(first)

    def detach(self) -> None:
        """Belong to none."""
        local_training.waiting.pop(self, None)
        for part in self._module().modules() if self.wrapper is None else ():
            hooks = part._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, _FirstCall) or hook is _nothing]:
                del hooks[key]

    def parameters(self) -> list[nn.Parameter]:
        """The module's."""
        return [] if self._module is None or (module := self._module()) is None else list(module.parameters())

    def runs(self) -> bool:
        """Whether a forward of the module needs nothing: it is part of another one, or nobody trains with it."""
        if torch.jit.is_tracing():
            return True
        if self.wrapper is not None:
            return type(self.wrapper)._active_ddp_module is self.wrapper
        return self._of_copy and not (torch.is_grad_enabled() and any(one.requires_grad for one in self.parameters()))

    def ready(self) -> HiddenWrapper:
        """The wrapper. All ranks make it together."""
        return self.wrapper or self._make()

    @torch._disable_dynamo
    def _make(self) -> HiddenWrapper:
        module = self._module()
        with plain(module):
            wrapper = HiddenWrapper(module, **self.arguments)
            wrapper.plain_class = type(module)
            if self._hook is not None:
                wrapper.register_comm_hook(*self._hook)
        self.detach()
        wrapper.require_backward_grad_sync = self._synchronises
        self.wrapper = wrapper
        local_training.follow(module, wrapper)
        return wrapper

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Say whether the backwards that come average gradients."""
        self._synchronises = requires_gradient_sync
        if self.wrapper is not None:
            self.wrapper.require_backward_grad_sync = requires_gradient_sync

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """See the wrapper's."""
        if self.wrapper is not None:
            self.wrapper.register_comm_hook(state, hook)
        elif self._hook is not None:
            raise RuntimeError("A communication hook is already registered; replicate the module anew." + see("FD034"))
        self._hook = (state, hook)

    def _check_copyable(self) -> None:
        if self.wrapper is not None and self.wrapper._stand_ins is not None:
            raise RuntimeError(_HAS_DTENSORS + see("FD033"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Replication:
        self._check_copyable()
        kept = [self.arguments.get(name) for name in (*_GROUPS, "hierarchy")]
        memo |= {id(one): one for one in kept}
        return Replication(copy.deepcopy(self.arguments, memo), copy.deepcopy(self._hook, memo), of_copy=True)

    def __reduce__(self) -> Any:
        self._check_copyable()
        mesh = self.arguments.get("device_mesh")
        group = self.arguments.get("process_group") if mesh is None else mesh.get_group()
        if group is not None and group != dist.group.WORLD:
            raise RuntimeError(_OTHER_GROUP + see("FD039"))
        arguments = {name: value for name, value in self.arguments.items() if name not in _GROUPS}
        return _of_pickle, (arguments, self._hook)


def _of_pickle(arguments: dict[str, Any], hook: tuple[object, Callable[..., Any]] | None) -> Replication:
    return Replication(arguments, hook, of_copy=True)


class _FirstCall:
    """A hook before the forward of a submodule, which a method of the module may have called."""

    def __init__(self, replication: Replication) -> None:
        self._replication = weakref.ref(replication)

    def __call__(self, submodule: nn.Module, inputs: Any) -> None:
        if is_exporting():
            return
        replication = self._replication()
        if replication is not None and not replication.runs():
            replication.ready()

    def __reduce__(self) -> Any:
        return _get_nothing, ()  # a submodule may be copied alone


def _nothing(submodule: nn.Module, inputs: Any) -> None:
    """In the place of a hook that was copied."""


def _get_nothing() -> Any:
    return _nothing


def let_go(module: Any) -> Replication:
    """Make ``module`` plain, and return what it had."""
    replication: Replication = module.__dict__.pop(REPLICATED)
    module.__class__ = getattr(type(module), PLAIN_CLASS)
    replication.detach()
    return replication


@contextlib.contextmanager
def plain(module: Any) -> Iterator[Replication]:
    """Let ``module`` be plain for a while, so its class copies it as it always did."""
    kind, replication = type(module), let_go(module)
    try:
        yield replication
    finally:
        module.__class__ = kind
        module.__dict__[REPLICATED] = replication
        replication.attach(module)


_HAS_DTENSORS = (
    "A replicated module whose parameters are parts of DTensors cannot be copied or pickled: a copy would take them "
    "for whole parameters. Make the module anew, and load its state_dict()."
)
_OTHER_GROUP = (
    "Only a module that is replicated over the default process group can be pickled, since it is restored with that "
    "group. Save its state_dict() instead, or copy.copy(model), a plain module."
)
