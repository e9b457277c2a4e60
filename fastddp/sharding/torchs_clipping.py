"""torch's ``clip_grad_norm_`` under a patch: it clips sharded gradients, too."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_

from fastddp.ddp import DistributedDataParallel
from fastddp.sharding import clipping
from fastddp.sharding.notice import ShardedGradient
from fastddp.torch_compat.surface import wrappers


def model_of(params: Any) -> DistributedDataParallel | None:
    """The model that trains exactly these parameters, or those of these groups; None: there is none, or several."""
    groups = [one["params"] if isinstance(one, dict) and "params" in one else [one] for one in params]
    given = {id(one) for group in groups for one in group}
    found = [model for model in wrappers if given == set(map(id, model.engine.now.parameters.tensors))]
    return found[0] if len(found) == 1 else None


@functools.wraps(torchs_clip_grad_norm_)
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Torch's function. All gradients of a model may be sharded, too; then all ranks call it, with the 2-norm."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    is_sharded = any(isinstance(parameter.grad, ShardedGradient) for parameter in parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    model = model_of(trained) if is_sharded and norm_type == 2 else None
    if model is None:
        return torchs_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return clipping.clip_grad_norm_(model, max_norm, error_if_nonfinite)
