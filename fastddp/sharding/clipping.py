"""``fastddp.clip_grad_norm_``: torch's function, with the norm that the reducer already knows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fastddp.ddp import DistributedDataParallel
from fastddp.engine import Engine
from fastddp.errors import see
from fastddp.in_place.replicated import wrapper_of


def clip_grad_norm_(
    model: DistributedDataParallel | nn.Module, max_norm: float | Tensor, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of ``model`` so that their 2-norm is at most ``max_norm``, in one pass over them.

    This is :func:`torch.nn.utils.clip_grad_norm_` over the parameters that the model synchronises, with the norm of
    ``model.last_grad_norm()``. Gradients are always multiplied, by 1 where nothing is clipped, because the host would
    have to wait for the device to know.

    With a :class:`fastddp.ShardedOptimizer` each rank measures and scales its part of the gradients. Then all ranks
    have to call this, since they add 16 bytes up, and may also call it after ``GradScaler.unscale_``.

    Args:
        model: after the backward that synchronised its gradients, before they are changed.
        max_norm: the largest 2-norm of all gradients as one vector.
        error_if_nonfinite: raise if the norm is NaN or infinite, and call ``model.discard_step()``, since nobody steps
            with such gradients. The host then waits for the device.

    Returns:
        The norm before clipping, 0-dimensional, as ``last_grad_norm()``.

    Raises:
        RuntimeError: there are no gradients of a finished synchronisation, or (see above) their norm is not finite.
        TypeError: ``model`` is not the wrapper, but a module or parameters.
    """
    wrapper: DistributedDataParallel = wrapper_of(model)
    if not hasattr(wrapper, "last_grad_norm"):  # so an object that passes the wrapper's attributes on works too
        raise TypeError(
            "fastddp.clip_grad_norm_ takes a fastddp.DistributedDataParallel, which knows the norm, and got "
            f"{type(model).__name__}. Pass the wrapper, not its module or parameters, or use "
            "torch.nn.utils.clip_grad_norm_." + see("FD024")
        )
    norm = wrapper.last_grad_norm()
    if error_if_nonfinite and not torch.isfinite(norm):
        wrapper.discard_step()
        raise RuntimeError(
            f"The norm of the gradients is {norm.item()}, so they cannot be clipped. Lower the learning rate or the "
            "loss scale, or pass error_if_nonfinite=False to scale by it anyway." + see("FD017")
        )
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients: dict[torch.device, list[Tensor]] = {}
    for gradient in _gradients(wrapper.engine):
        gradients.setdefault(gradient.device, []).append(gradient)
    for device, tensors in gradients.items():
        torch._foreach_mul_(tensors, coefficient.to(device))
    return norm


def _gradients(engine: Engine) -> Iterator[Tensor]:
    """What this rank has: all gradients, or its part of the dense ones."""
    now, sharded = engine.now, engine.sharded
    whole = range(len(now.parameters.tensors)) if sharded is None else now.parameters.sparse
    for index in whole:
        gradient = now.main_gradients.gradient_of(now.parameters.tensors[index])
        if gradient is not None:
            yield gradient
    if sharded is not None:
        yield from sharded.gradients()
