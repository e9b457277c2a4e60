"""``device_mesh``, and modules that tensor parallelism has spread over another dimension of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastddp.errors import see
from fastddp.module.stand_ins import check_replaceable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def group_of_mesh(device_mesh: DeviceMesh, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of a mesh. Raises RuntimeError if it has several dimensions, or ``process_group`` is given too."""
    if process_group is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments: each says which ranks to average over. Give "
            "one of them." + see("FD033")
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"device_mesh must have one dimension, that of the ranks to average over, but got {device_mesh}. Pass a "
            'slice of it, such as device_mesh["dp"].' + see("FD033")
        )
    return device_mesh.get_group(mesh_dim=0)


_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


def keeps_refused_module(constructor: _Constructor) -> _Constructor:
    """Decorate a wrapper's constructor: if it raises, the parameters that it found in ``module`` are put back.

    Each rank's parts replace DTensors before the checks, which are about the parts.
    """

    @functools.wraps(constructor)
    def construct(self: object, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        owners = [owner._parameters for owner in module.modules()] if isinstance(module, nn.Module) else []
        found = [(parameters, name, parameter) for parameters in owners for name, parameter in parameters.items()]
        try:
            constructor(self, module, *args, **kwargs)
        except BaseException:
            for parameters, name, parameter in found:
                parameters[name] = parameter
            raise

    return cast("_Constructor", construct)


class LocalParts:
    """Replaces DTensor parameters by each rank's parts of them. The parts are averaged, saved and optimized.

    Torch's DDP does so too, but its module has no parameters left after the first forward.

    The constructor replaces those of ``module``, a shared one by one part. It raises ValueError if one is spread over
    ranks of ``process_group``, which gradients are averaged over, or part of ``module`` is compiled by TorchScript.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup) -> None:
        self._specs: dict[nn.Parameter, Any] = {}
        if all(type(parameter) is nn.Parameter for parameter in module.parameters()):
            return
        from torch.distributed.tensor import DTensor  # the import takes a second

        spread = [
            (name, parameter)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if isinstance(parameter, DTensor)
        ]
        if spread:
            check_replaceable(module, "Tensor parallelism")
        for name, parameter in spread:
            _check_apart(name, parameter, process_group)
        parts = {parameter: _part_of(parameter) for parameter in dict(spread).values()}
        self._specs = {part: parameter._spec for parameter, part in parts.items()}
        for name, parameter in spread:
            owner, _, own_name = name.rpartition(".")
            module.get_submodule(owner)._parameters[own_name] = parts[parameter]

    def __bool__(self) -> bool:
        return bool(self._specs)

    def as_dtensor(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """A step of stand-ins: the DTensor of which ``tensor``, which stands for ``parameter``, is a part."""
        spec = self._specs.get(parameter)
        if spec is None:
            return tensor
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )


def _part_of(parameter: DTensor) -> nn.Parameter:
    part = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
    if part.requires_grad:
        part.register_hook(_arrived)
    return part


def _arrived(gradient: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return gradient.wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient


def _check_apart(name: str, parameter: DTensor, process_group: dist.ProcessGroup) -> None:
    spread_over = set(parameter.device_mesh.mesh.flatten().tolist())
    both = sorted(spread_over.intersection(dist.get_process_group_ranks(process_group)) - {dist.get_rank()})
    if both:
        raise ValueError(
            f"Parameter {name} is a DTensor over ranks {sorted(spread_over)}, and gradients would be averaged over "
            f"{both} of them too. Use one dimension of a mesh for tensor parallelism and another one for "
            'DistributedDataParallel: parallelize_module(module, mesh["tp"], ...), device_mesh=mesh["dp"].'
            + see("FD033")
        )
