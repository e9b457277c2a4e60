"""The norm of the averaged gradients, which the reducer measures anyway."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.ranks.together import together
from fastddp.window.joining import check_all_have_inputs


def measured(now: InForce, own: Sequence[Tensor] | None) -> Tensor:
    """The sum of squares of the synchronised gradients, and how many elements are not finite; in fp64.

    ``own`` is this rank's part of the gradients, where they are sharded. They are measured as they are now, and the
    parts are added up, in a collective. What is not finite then counts once a tensor.

    Raises RuntimeError if no synchronisation has ended since the last forward.
    """
    if now.reducer.state != "finished":
        raise RuntimeError(
            "The norm of gradients, and whether they are finite, is known between the backward that synchronises them "
            "and the next forward. Ask for it after backward() and before the model is called again; a backward whose "
            "forward ran under no_sync() synchronises nothing." + see("FD014")
        )
    if own is None:
        return now.reducer.measure()
    check_all_have_inputs(now, "The norm of sharded gradients, or whether they are finite,")
    # All ranks have whole sparse gradients, which count once.
    group = now.setting.sharding_group
    parts = _of([*own, *(_sparse(now) if group.rank() == 0 else ())], now.device)
    together(dist.all_reduce, parts, group=group)
    return parts


def _sparse(now: InForce) -> list[Tensor]:
    gradients = [now.parameters.tensors[index].grad for index in now.parameters.sparse]
    return [gradient.coalesce().values() for gradient in gradients if gradient is not None]


def _of(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Squares of numbers in fp32 cannot overflow in fp64, so a norm is finite if all elements are."""
    numbers = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
    norms = torch._foreach_norm(numbers, dtype=torch.float64) if numbers else []
    none = torch.zeros((), dtype=torch.float64, device=device)
    all_norms = torch.stack([none, *(norm.to(device, non_blocking=True) for norm in norms)])
    return torch.stack([all_norms.square().sum(), all_norms.isfinite().logical_not().sum().double()])
