"""torch's ``ZeroRedundancyOptimizer`` under a patch: it shards what a fastddp model trains."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer as TorchZero
from torch.optim import Optimizer

from fastddp.ddp import DistributedDataParallel
from fastddp.sharding.optimizer import ShardedOptimizer
from fastddp.sharding.torchs_clipping import model_of
from fastddp.watch import presence

# torch's class stays the one that its name stands for. While its metaclass is this one, calls of it may make another
# optimizer, also where code has kept a reference to the class. Classes that code derives from it make their own.


class ShardsWherePossible(type(TorchZero)):  # type: ignore[misc]  # torch's metaclass is what it is
    """The metaclass of torch's class under a patch: a call returns a sharded optimizer where that does the same."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """As torch's constructor."""
        make = super().__call__
        return _made(make, *args, **options) if cls is TorchZero else make(*args, **options)


def _made(
    make: Callable[..., TorchZero],
    params: Any,
    optimizer_class: Any,
    process_group: dist.ProcessGroup | None = None,
    parameters_as_bucket_view: bool = False,
    overlap_with_ddp: bool = False,
    **defaults: Any,
) -> Any:
    params = params if isinstance(params, Tensor) else list(params)
    options = {"parameters_as_bucket_view": parameters_as_bucket_view, "overlap_with_ddp": overlap_with_ddp}
    torchs = functools.partial(make, params, optimizer_class, process_group, **options, **defaults)
    ranks_of = dist.get_process_group_ranks
    model = model_of(params) if not overlap_with_ddp and _is_steppable(optimizer_class) else None
    if model is None or ranks_of(process_group) != ranks_of(model.process_group):
        return torchs()
    try:
        return ShardedZero(model, optimizer_class, params, **defaults)
    except ValueError as reason:
        optimizer = torchs()
        warnings.warn(f"This ZeroRedundancyOptimizer stays torch's. {reason}", stacklevel=3)
        return optimizer


def _is_steppable(optimizer_class: Any) -> bool:
    """Not a functional optimizer; and LBFGS has to evaluate the model again, for all parameters at once."""
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    return is_class and not issubclass(optimizer_class, torch.optim.LBFGS)


class ShardedZero(ShardedOptimizer):
    """A sharded optimizer with the methods of torch's ``ZeroRedundancyOptimizer``, whose instance it counts as."""

    def __init__(
        self, model: DistributedDataParallel, optimizer_class: type[Optimizer], params: Any, **settings: Any
    ) -> None:
        super().__init__(model, optimizer_class, params, **settings)
        self.process_group = model.process_group
        self._consolidated: dict[str, Any] = {}
        presence.say_on_rank_0(
            f"ZeroRedundancyOptimizer is a fastddp.ShardedOptimizer: {optimizer_class.__name__}, "
            f"{self.process_group.size()} parts, and parameter.grad has no values after backward",
            self.process_group,
        )

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Put the whole state together on the CPU of rank ``to``. A collective."""
        self._consolidated = self._full_state_dict(keep=self.process_group.rank() == to)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """What this rank has consolidated last, as of a whole model; RuntimeError: it has not."""
        if not self._consolidated:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Call "
                f"consolidate_state_dict(to={self.process_group.rank()}) on all ranks before."
            )
        return self._consolidated


TorchZero.register(ShardedZero)
