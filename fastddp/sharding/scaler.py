"""``torch.amp.GradScaler`` with a sharded optimizer: each rank unscales its part, and all skip a step together."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.ranks.together import together
from fastddp.sharding.parts import OfParts
from fastddp.window.joining import check_all_have_inputs


@functools.cache
def let_scalers_unscale_parts() -> None:
    """``GradScaler`` has no hooks, so its method is wrapped, once."""
    unscale: Any = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_part(
        scaler: GradScaler, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, OfParts):
            return unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16:
            _check_none_in_fp16(optimizer)
        part = SimpleNamespace(param_groups=[{"params": optimizer.parts.holders_with_gradients()}])
        found = unscale(scaler, part, inv_scale, found_inf, allow_fp16)
        return _on_any_rank(found, optimizer.parts.now)

    GradScaler._unscale_grads_ = unscale_part  # type: ignore[assignment, method-assign]


def _check_none_in_fp16(optimizer: OfParts) -> None:
    """Torch would raise too, but only on the ranks that have a part of such a gradient."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(parameter.grad is not None and parameter.grad.dtype == torch.float16 for parameter in parameters):
        raise ValueError(
            "GradScaler cannot unscale gradients in fp16, which would underflow. Keep parameters in fp32 and compute "
            'under torch.autocast, or wrap the module with main_grads="grad".' + see("FD042")
        )


def _on_any_rank(found: dict[torch.device, Tensor], now: InForce) -> dict[torch.device, Tensor]:
    """Whether a rank has found what is not finite: 1.0 or 0.0. A collective; the host does not wait for a device."""
    check_all_have_inputs(now, "A GradScaler of a ShardedOptimizer")
    anywhere = torch.zeros((), device=now.device)
    for here in found.values():
        anywhere = torch.maximum(anywhere, here.to(now.device, non_blocking=True))
    together(dist.all_reduce, anywhere, op=dist.ReduceOp.MAX, group=now.process_group)
    return {now.device: anywhere}
