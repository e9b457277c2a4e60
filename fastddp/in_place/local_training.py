"""Notices, before an optimizer's step, that a replicated module trains on each rank alone.

Nothing of fastddp's runs in a backward over parameters that the reducer does not know: all of them were replaced or
cast, the module is gone while its submodules train on, or it has never been called. And a rank whose backward reaches
no parameter takes no part in a window that the other ranks wait in.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastddp.errors import see
from fastddp.torch_compat.surface import wrappers

if TYPE_CHECKING:
    from fastddp.in_place.hidden_wrapper import HiddenWrapper

waiting: weakref.WeakSet[Any] = weakref.WeakSet()
"""The ``Deferred`` of each module that was not used yet."""

_orphans: list[list[weakref.ref[nn.Parameter]]] = []  # of modules that are gone
_followed: weakref.WeakKeyDictionary[HiddenWrapper, _Steps] = weakref.WeakKeyDictionary()


class _Steps:
    """What the reducer of one module had done at the last step of each optimizer."""

    def __init__(self) -> None:
        self.windows = 0  # at the last step of any optimizer
        self.of_optimizer: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def note_end_of(module: nn.Module, wrapper: HiddenWrapper) -> None:
    """Follow a module that is replicated from now on, and its parameters after its end."""
    _followed[wrapper] = _Steps()
    parameters = [weakref.ref(parameter) for parameter in wrapper.engine.now.parameters.tensors]
    weakref.finalize(module, _orphans.append, parameters).atexit = False


def _check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not (_followed or waiting or _orphans):
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for deferred in tuple(waiting):
        if any(id(parameter) in stepped for parameter in deferred.parameters()):
            raise RuntimeError(_NEVER_CALLED + see("FD012"))
    _check_orphans(stepped)
    runs_backward = any(callable(argument) for argument in (*args, *kwargs.values()))
    for wrapper, steps in tuple(_followed.items()):
        _check_windows(wrapper, steps, optimizer, runs_backward or not _trains(wrapper, stepped))


def _check_orphans(stepped: set[int]) -> None:
    _orphans[:] = [alive for alive in ([one for one in each if one() is not None] for each in _orphans) if alive]
    averaged = {id(parameter) for model in wrappers for parameter in model.engine.now.parameters.tensors}
    if any(id(one()) in stepped - averaged for each in _orphans for one in each):
        raise RuntimeError(_MODULE_IS_GONE + see("FD012"))


def _trains(wrapper: HiddenWrapper, stepped: set[int]) -> bool:
    return any(id(parameter) in stepped for parameter in wrapper.engine.now.parameters.tensors)


def _check_windows(wrapper: HiddenWrapper, steps: _Steps, optimizer: Optimizer, has_other_aim: bool) -> None:
    windows = wrapper.reducer.windows()
    if windows == steps.windows and wrapper.module is not None:
        wrapper.engine.parameter_watch.check()  # no gradient has come since the last step: maybe none can
    steps.windows = windows
    if has_other_aim:
        return
    stands_aside = steps.of_optimizer.get(optimizer) == windows and windows > 0
    steps.of_optimizer[optimizer] = windows
    if stands_aside:
        wrapper.engine.local_steps.tell_of_no_window(optimizer, _REACHES_NONE)


register_optimizer_step_pre_hook(_check)


_NEVER_CALLED = (
    "fastddp: an optimizer is about to step parameters of a replicated module that has not been called, so its "
    "gradients are this rank's alone. Its parameters were on the meta device when replicate() was called, or it is a "
    "copy of a replicated module. Call the module or one of its submodules in each loss, or call fastddp.replicate() "
    "once its parameters have memory."
)
_MODULE_IS_GONE = (
    "fastddp: an optimizer is about to step parameters of a replicated module that is gone, and nothing averages "
    "gradients of its submodules without it. Keep the module that was given to fastddp.replicate(), or replicate the "
    "submodule that trains on."
)
_REACHES_NONE = (
    "no backward has reached a parameter of the model since the last step, so this rank has taken no part in an "
    "exchange that the other ranks may wait in. Likely cause: this rank's loss does not depend on the model (an empty "
    "batch, a mask without elements, a detached output). Add 0 * sum(p.sum() for p in model.parameters()) to the loss, "
    "or skip the backward on all ranks."
)
