"""No optimizer step with gradients that are only partly synchronised."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastddp.wrapper import Wrapper


def check_before_each_step(model: Wrapper) -> None:
    """From now on, for as long as ``model`` lives, its optimizers raise instead of using incomplete gradients.

    A backward that leaves out a parameter returns normally, since another backward may bring the missing gradient; the
    optimizer is the last one who can notice that none did. The hook is global to torch.optim, which costs other
    optimizers one comparison a step.
    """
    handle = register_optimizer_step_pre_hook(functools.partial(_check, weakref.ref(model)))
    weakref.finalize(model, handle.remove).atexit = False


def _check(
    model_ref: weakref.ref[Wrapper], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    model = model_ref()
    if model is None or model.reducer.state not in ("partial", "failed"):
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) in stepped for parameter in model._parameters_to_reduce.tensors):
        model._check_reducer_finalized()
