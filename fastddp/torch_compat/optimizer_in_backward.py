"""Optimizers that step a parameter as soon as its gradient is averaged, inside backward.

:func:`torch.distributed.optim._apply_optimizer_in_backward` attaches them. Without data parallelism they step when the
gradient comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastddp._C import Reducer
from fastddp.errors import see


def take_over_optimizers(reducer: Reducer, parameters: Sequence[Tensor], in_main_grad: bool) -> None:
    """Let ``reducer`` run the optimizers that were attached to ``parameters``, if any.

    Each steps after its parameter's bucket has been averaged. Then the gradient is None, as under torch's DDP. Raises
    RuntimeError if there are some, and gradients are ``in_main_grad``, where they do not look.
    """
    with_optimizer = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    if not with_optimizer:
        return
    if in_main_grad:
        raise RuntimeError(
            'An optimizer that steps inside backward reads parameter.grad, and with main_grads="main_grad" '
            'gradients are not there. Use main_grads="grad", or step after backward.' + see("FD030")
        )
    # Imported already if optimizers were attached. Others save its time, half that of `import torch`.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in with_optimizer:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()

    @torch.no_grad()
    def step(averaged: Sequence[int]) -> None:
        for index in averaged:
            parameter = parameters[index]
            if parameter.grad is None or not hasattr(parameter, "_in_backward_optimizers"):
                continue
            for optimizer in parameter._in_backward_optimizers:
                optimizer.step()
            parameter.grad = None

    reducer.on_averaged(step)
