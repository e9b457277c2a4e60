"""device_mesh: a mesh in place of a process group, and tensor parallelism over its other dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fastddp
from on_ranks import Wrap, of_ranks, on_ranks, same_under_both


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh()) * self.scale


class Gathered(nn.Module):
    """Gathers its weight, each time it runs; the weight's gradient is on its way when it comes."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.redistribute(placements=[Replicate()], async_op=True)  # type: ignore[attr-defined]
        product: Any = DTensor.from_local(x, self.mesh, [Shard(0)]) @ weight
        return product.to_local()


def spread(module: nn.Module, mesh: DeviceMesh) -> Any:
    # The norm's ranks see a part of the batch each: its gradients are sums over them, which arrive asynchronously.
    norm, up = SequenceParallel(sequence_dim=0), ColwiseParallel(input_layouts=Shard(0))
    return parallelize_module(module, mesh["tp"], {"norm": norm, "up": up, "down": RowwiseParallel()})


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def train(model: nn.Module, mesh: DeviceMesh) -> list[Tensor]:
    """Loss and gradients of each of three steps. The parameters are those that the wrapper had at construction."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1)
    seen: list[Tensor] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * mesh.get_local_rank() + step)
        loss = model(torch.randn(4, 4, generator=generator)).float().square().mean()
        loss.backward()
        seen += [loss.detach(), *(parameter.grad.clone() for parameter in parameters)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@same_under_both()
def test_over_a_mesh_of_one_dimension_gradients_are_torchs(wrap: Wrap, rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = wrap(Mlp(), device_mesh=mesh)
    return [model.device_mesh is mesh, train(model, mesh)]


@pytest.mark.parametrize("gathered", [False, True])
@same_under_both(4)
def test_with_tensor_parallelism_inside_gradients_are_torchs(wrap: Wrap, rank: int, gathered: bool) -> Any:
    mesh = two_by_two()
    module = Gathered(mesh["tp"]) if gathered else spread(Mlp(), mesh)
    found = train(wrap(module, device_mesh=mesh["dp"]), mesh["dp"])
    losses = of_ranks(found[0].item())
    assert losses[0] != losses[2]  # the replicas' batches differ
    assert gathered or losses[::2] == losses[1::2]
    return found


@on_ranks(4)
def test_parameters_are_the_same_local_parts_before_and_after_a_step(rank: int) -> None:
    mesh = two_by_two()
    module = spread(Mlp(), mesh)
    module.tied = module.up
    module.tied_weight = module.up.weight
    # 3 rows on one rank and 2 on the other.
    module.frozen = nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh["tp"], [Shard(0)]), requires_grad=False)
    model = fastddp.DistributedDataParallel(module, device_mesh=mesh["dp"])
    before = dict(model.named_parameters())
    inside: list[Any] = []
    model.module.register_forward_pre_hook(lambda mlp, _: inside.append((type(mlp.up.weight), mlp.frozen.shape)))
    train(model, mesh["dp"])
    assert inside == [(DTensor, (5, 4))] * 3
    assert [(name, id(p)) for name, p in model.named_parameters()] == [(name, id(p)) for name, p in before.items()]
    assert not any(isinstance(parameter, DTensor) for parameter in before.values())
    assert module.tied_weight is module.up.weight
    assert module.frozen.shape == (3 - mesh["tp"].get_local_rank(), 4)
    assert not module.frozen.requires_grad


@on_ranks(2)
def test_parameters_that_are_spread_over_the_ranks_to_average_over_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"Parameter up\.weight is a DTensor over ranks \[0, 1\]"):
        fastddp.DistributedDataParallel(module, device_mesh=mesh)


@pytest.mark.parametrize(
    "how", ["by its options", "by another rank", "by its last step", "by a part", "by TorchScript"]
)
@on_ranks(4)
def test_a_module_that_is_refused_keeps_its_parameters(rank: int, how: str) -> None:
    mesh = two_by_two()
    module = spread(Mlp(), mesh)
    module.tied = module.up
    options: dict[str, Any] = {"by its options": {"bucket_cap_mb": -1}, "by its last step": {"mixed_precision": "fp16"}}
    if how == "by another rank":
        module.scale = nn.Parameter(torch.ones(4 + rank // 2))  # the model differs between replicas
    elif how == "by a part":
        module.late = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["dp"], [Shard(0)]))
    elif how == "by TorchScript":
        module.compiled = torch.jit.script(nn.Linear(2, 2))
    before = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        fastddp.DistributedDataParallel(module, device_mesh=mesh["dp"], **options.get(how, {}))
    after = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    assert after == before
    assert isinstance(module.up.weight, DTensor)
    assert module.tied is module.up
