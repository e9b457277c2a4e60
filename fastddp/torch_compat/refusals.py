"""What is refused: helpers of torch's reducer, wrappers that have it, and contexts of torch.distributed.autograd."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp.errors import see

Class = TypeVar("Class", bound=type)

REPLICATED = "_fastddp_replicated"
"""The attribute of a module that is replicated in place: what replicates it."""

SERVE_TORCHS_REDUCER = (
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_check_manual_backward_finalization_supported",
    "_clear_grad_buffer",
    "_ddp_init_helper",
    "_delayed_all_reduce_hook",
    "_fire_reducer_autograd_hook",
    "_lazy_init",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_module_wait_for_copy_hook",
    "_register_accum_grad_hook",
    "_register_delay_all_reduce_hook",
    "_root_copy_hook",
    "_setup_in_backward_optimizers",
)


def refuse_torchs_helpers(cls: Class) -> Class:
    """Let each of :data:`SERVE_TORCHS_REDUCER` raise ``RuntimeError``, unless ``cls`` defines it."""
    for name in SERVE_TORCHS_REDUCER:
        if name not in vars(cls):
            setattr(cls, name, _refusal(name))
    return cls


def _refusal(name: str) -> Any:
    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{name}() of torch's DistributedDataParallel serves torch's own reducer. "
            "fastddp.DistributedDataParallel has another one, and no such step: call forward and backward, or use "
            "torch.nn.parallel.DistributedDataParallel." + see("FD038")
        )

    refuse.__name__ = name
    return refuse


def replication_of(module: object) -> Any:
    """What replicates ``module`` in place; None: nothing does, though it may have been made of one that is."""
    found = getattr(module, "__dict__", {}).get(REPLICATED)
    return found if found is not None and found.module() is module else None


def check_not_replicated(module: nn.Module) -> None:
    """Raise ValueError if ``module``, or a part of it, is replicated in place, and so has its gradients averaged."""
    for name, child in module.named_modules():
        if replication_of(child) is not None:
            raise ValueError(
                f"{name or 'The module'} ({type(child).__name__}) is replicated in place already, so its gradients are "
                "averaged. Train it as it is, or replicate or wrap the whole model alone." + see("FD013")
            )


def is_torchs(model: object) -> bool:
    """Whether it is a wrapper that has torch's reducer."""
    return isinstance(model, TorchDDP) and "engine" not in vars(model)


def check_beside_torchs(other: object, parameters: Collection[Tensor]) -> None:
    """Raise RuntimeError if ``other`` is torch's wrapper of some of these parameters, and moves their gradients."""
    if not is_torchs(other) or not other.gradient_as_bucket_view:  # type: ignore[attr-defined]
        return
    if not {id(parameter) for parameter in parameters}.isdisjoint(map(id, other.parameters())):  # type: ignore[attr-defined]
        raise RuntimeError(
            "A DistributedDataParallel of torch's, with gradient_as_bucket_view=True, is around or inside this one, "
            "and a gradient lives in the buckets of one of them only. Make it without gradient_as_bucket_view, or wrap "
            "these parameters once." + see("FD013")
        )


def refuse_distributed_autograd() -> None:
    """Raise ``NotImplementedError`` inside a ``torch.distributed.autograd.context()``, which would keep gradients.

    The reducer itself notices a context's backward over a forward from outside of it: a gradient comes that is not in
    ``parameter.grad``, which is an error whatever the cause.
    """
    if rpc.is_available() and rpc._is_current_rpc_agent_set() and _inside_context():
        raise NotImplementedError(
            "fastddp does not support torch.distributed.autograd yet: this forward ran inside one of its contexts, "
            "whose gradients would not be averaged. Run forward outside of the context and call loss.backward(), or "
            "use torch.nn.parallel.DistributedDataParallel." + see("FD038")
        )


def _inside_context() -> bool:
    try:
        torch._C._distributed_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:  # there is none
        return False
    return True
