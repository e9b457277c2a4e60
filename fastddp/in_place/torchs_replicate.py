"""Torch's functions that replicate a module in place. Under a patch fastddp's does their work, where it does the same.

Neither makes anything before the first forward, so parameters may be on the meta device, and become others, until then.
Names in ``torch.distributed._composable`` and FSDP2 are imported where they are used: FSDP2 takes half a second.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _get_root_modules

from fastddp.errors import see
from fastddp.in_place.replicate import check_module
from fastddp.in_place.replicated import Replicated, hold
from fastddp.in_place.replication import Replication, let_go
from fastddp.torch_compat.refusals import REPLICATED

COMPOSABLE = "torch.distributed._composable"
COMPOSABLE_DDP = f"{COMPOSABLE}.replicate"
COMPOSABLE_FSDP = f"{COMPOSABLE}.replicate_with_fsdp"


@functools.cache
def of_ddp() -> tuple[Any, Any]:
    """``torch.distributed._composable.replicate``, which hides a DDP of torch's, and what stands in its place."""
    torchs = importlib.import_module(COMPOSABLE_DDP).replicate

    @functools.wraps(torchs)
    def replicate(module: nn.Module, ignored_modules: Iterable[nn.Module] | None = None, **options: Any) -> Any:
        if any("fully_shard" in _applied(part) for part in module.modules()):
            return torchs(module, ignored_modules, **options)
        if "device_id" in options:  # may be a device that is the CPU, so that code need not ask
            device = torch.device(options.pop("device_id"))
            options["device_ids"] = None if device.type == "cpu" else [device]
        left_out = [tensor for part in ignored_modules or () for tensor in [*part.parameters(), *part.buffers()]]
        return _later(module, options, left_out)

    return torchs, replicate


@functools.cache
def of_fsdp() -> tuple[Any, Any]:
    """``replicate`` of :mod:`torch.distributed._composable.replicate_with_fsdp`, and what stands in its place.

    It is called for blocks first, and then for what is around them, which takes their parameters over.
    """
    torchs = importlib.import_module(COMPOSABLE_FSDP).replicate

    @functools.wraps(torchs)
    def replicate(module: nn.Module | list[nn.Module], **options: Any) -> Any:
        roots = [module] if isinstance(module, nn.Module) else _get_root_modules(list(module))
        left_out = set(options.get("ignored_params") or ())
        for part in [part for root in roots for part in root.modules() if part not in roots]:
            if isinstance(part, _in_fsdps_way()):
                if "gradient_average" in part.__dict__[REPLICATED].arguments:
                    raise NotImplementedError(_TOLD_TOO_EARLY + see("FD038"))
                left_out |= {p for name, p in part.named_parameters() if name in part._ddp_params_and_buffers_to_ignore}  # type: ignore[operator]
                let_go(part)
                _applied(part).pop("replicate", None)
        reason = _why_not(roots, left_out, **options)
        if reason:
            _warn_once(reason)
            return torchs(module, **(options | ({"ignored_params": left_out} if left_out else {})))
        mesh = options.get("mesh")
        arguments = {"find_unused_parameters": True, **({} if mesh is None else {"device_mesh": mesh})}
        if (device := _device_type(mesh)) != "cpu":  # FSDP2 moves inputs there, too
            arguments["device_ids"] = [torch.get_device_module(device).current_device()]
        for root in roots:
            if any(True for _ in root.parameters()):
                _later(root, arguments, left_out, _in_fsdps_way())
        return module

    return torchs, replicate


def _later(module: nn.Module, arguments: dict[str, Any], left_out: Collection[Tensor], add: type = Replicated) -> Any:
    """Replicate ``module`` in its first forward. Buffers are each rank's own, unless ``arguments`` speak of them."""
    from torch.distributed._composable.contract import RegistryItem

    wanted = {id(tensor) for tensor in left_out}
    if not {"broadcast_buffers", "forward_sync_buffers"} & arguments.keys():
        arguments = {**arguments, "forward_sync_buffers": False}
        wanted |= {id(buffer) for buffer in module.buffers()}
    check_module(module, arguments)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names: Any = [name for name, tensor in named if id(tensor) in wanted]
    module._ddp_params_and_buffers_to_ignore = names
    _applied(module)["replicate"] = RegistryItem()  # fully_shard() of what is around leaves it alone
    return hold(module, Replication(arguments), add)


def _applied(module: nn.Module) -> dict[str, Any]:
    """Which of torch's functions replicate or shard ``module``, by their names."""
    from torch.distributed._composable.contract import REGISTRY_KEY

    return module.__dict__.setdefault(REGISTRY_KEY, {})  # type: ignore[no-any-return]


@functools.cache
def _in_fsdps_way() -> type:
    """What such a module is, too: code looks for FSDP2's class, and tells each module how to divide gradients."""
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
    from torch.distributed.fsdp import FSDPModule

    class InFsdpsWay(Replicated, ReplicateModule):
        def set_gradient_divide_factor(self: Any, factor: float) -> None:
            """1: gradients are sums over ranks; the number of ranks: they are averages."""
            replication = self.__dict__[REPLICATED]
            mesh = replication.arguments.get("device_mesh")
            average = {1: "sum", dist.get_world_size() if mesh is None else mesh.size(): "mean"}.get(factor)
            if average is None or replication.wrapper is not None:
                raise NotImplementedError(
                    "Under fastddp gradients are sums over ranks (a factor of 1) or averages (the number of ranks), "
                    f"and that is said before the first forward; got a factor of {factor}." + see("FD038")
                )
            replication.arguments["gradient_average"] = average

        def _get_fsdp_state(self) -> Any:
            raise NotImplementedError(
                "This method of FSDP2 is for what it shards or moves, and fastddp has put its own replication in the "
                "place of FSDP2's. Leave the call out, or replicate outside of fastddp.patch()." + see("FD038")
            )

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]

    for name in (
        "reshard",
        "set_reshard_after_forward",
        "set_reshard_after_backward",
        "set_modules_to_forward_prefetch",
    ):
        setattr(InFsdpsWay, name, lambda self, *args, **options: None)  # parameters are whole at any time
    return InFsdpsWay


_TOLD_TOO_EARLY = (
    "A block has been told how to divide gradients, and now what is around it is replicated, which divides all alike. "
    "Call set_gradient_divide_factor() on that, after the last replicate()."
)


def _device_type(mesh: Any) -> str:
    return torch._C._get_accelerator().type if mesh is None else mesh.device_type  # the CPU, if there is none


def _why_not(roots: list[nn.Module], left_out: Collection[Tensor], **options: Any) -> str:
    """What fastddp's does not do; empty: it does the same."""
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy
    from torch.distributed.tensor import DTensor

    parts = [part for root in roots for part in root.modules()]
    parameters = [one for part in parts for one in part.parameters(recurse=False) if one not in left_out]
    mesh, policy = options.get("mesh"), options.get("mp_policy")
    dtypes = [getattr(policy, name, None) for name in ("param_dtype", "reduce_dtype", "output_dtype")]
    known = ("mesh", "mp_policy", "offload_policy", "ignored_params")
    reasons = {
        "its mp_policy has dtypes": any(dtypes),
        "its offload_policy moves parameters": type(options.get("offload_policy")) not in (type(None), OffloadPolicy),
        "it has other options": any(value is not None for name, value in options.items() if name not in known),
        "its mesh has several dimensions": mesh is not None and mesh.ndim != 1,
        "its parameters are DTensors": any(isinstance(parameter, DTensor) for parameter in parameters),
        "a part of it is torch's already": any(
            isinstance(part, FSDPModule) and not isinstance(part, _in_fsdps_way()) for part in parts
        ),
        "it was compiled before": any("_orig_mod" in root._modules for root in roots),
        "its parameters are not on the mesh's device": not {one.device.type for one in parameters}
        <= {"meta", _device_type(mesh)},
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"A module that is replicated in FSDP2's way stays torch's: {reason}.", stacklevel=3)
