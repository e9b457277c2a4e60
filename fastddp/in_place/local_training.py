"""Notices, before an optimizer's step, that a replicated module trains on each rank alone.

Nothing of fastddp's runs in a backward over parameters that the reducer does not know: all of them were replaced or
cast, the module is gone while its submodules train on, or no forward has needed its wrapper yet.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastddp.errors import see
from fastddp.in_place.hidden_wrapper import HiddenWrapper
from fastddp.module.backward import is_inside_backward
from fastddp.ranks.living import Living
from fastddp.torch_compat.surface import wrappers

waiting: Living[Any, None] = Living()
"""The ``Replication`` of each module without a wrapper."""
_orphans: list[list[weakref.ref[nn.Parameter]]] = []  # parameters of modules that are gone
_followed: Living[HiddenWrapper, None] = Living()


def follow(module: nn.Module, wrapper: HiddenWrapper) -> None:
    """Look after a module that has its wrapper from now on, and after its parameters when it is gone."""
    _followed[wrapper] = None
    parameters = [weakref.ref(parameter) for parameter in wrapper.engine.now.parameters.tensors]
    weakref.finalize(module, _orphans.append, parameters).atexit = False


def _check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not (_followed or waiting or _orphans) or is_inside_backward():  # there one steps as gradients are averaged
        return
    if waiting or _orphans:
        _check_without_wrapper({id(parameter) for group in optimizer.param_groups for parameter in group["params"]})
    for wrapper in _followed:
        if wrapper.module is not None:
            wrapper.engine.parameter_watch.check()


def _check_without_wrapper(stepped: set[int]) -> None:
    for replication in waiting:
        own = [parameter for parameter in replication.parameters() if id(parameter) in stepped]
        if any(one.grad is not None and one.grad.any() for one in own):  # zeros are made to load an optimizer's state
            raise RuntimeError(_HAS_NO_WRAPPER + see("FD012"))
    for gone in [each for each in list(_orphans) if all(one() is None for one in each)]:
        _orphans.remove(gone)
    averaged = {id(parameter) for model in wrappers for parameter in model.engine.now.parameters.tensors}
    if any(id(one()) in stepped - averaged for each in _orphans for one in each):
        raise RuntimeError(_MODULE_IS_GONE + see("FD012"))


register_optimizer_step_pre_hook(_check)


_HAS_NO_WRAPPER = (
    "fastddp: an optimizer is about to step with gradients of a replicated module that are this rank's alone. The "
    "module gets its wrapper in its first forward, or that of a submodule: its parameters were on the meta device when "
    "it was replicated, or torch's replicate() does so. But no forward has come. Call the module, or call "
    "fastddp.replicate() when its parameters have memory."
)
_MODULE_IS_GONE = (
    "fastddp: an optimizer is about to step parameters of a replicated module that is gone, and nothing averages "
    "gradients of its submodules without it. Keep the module that was given to fastddp.replicate(), or replicate the "
    "submodule that trains on."
)
