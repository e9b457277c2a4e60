"""device_mesh: a mesh in place of a process group, and tensor parallelism over its other dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import fastddp
from ranks import RankPool

BOTH = (fastddp.DistributedDataParallel, TorchDDP)


class Mlp(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.25))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return x * self.scale

    def body(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())


def spread(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    # The norm's ranks see a part of the batch each: its gradients are sums over them, which arrive asynchronously.
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    return parallelize_module(module, mesh["tp"], plan)


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def batch(replica: int, step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * replica + step))


def train(model: nn.Module, replica: int, steps: int = 3) -> list[Tensor]:
    """Loss and gradients of each step, in one list. The parameters are those that the wrapper had at construction."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1)
    seen: list[Tensor] = []
    for step in range(steps):
        loss = model(batch(replica, step)).float().square().mean()
        loss.backward()
        seen += [loss.detach(), *(parameter.grad.clone() for parameter in parameters)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def one_dimension(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    ours, theirs = (train(cls(Mlp(), device_mesh=mesh), rank) for cls in BOTH)
    assert fastddp.DistributedDataParallel(Mlp(), device_mesh=mesh).device_mesh is mesh
    return same(ours, theirs)


def test_over_a_mesh_of_one_dimension_gradients_are_torchs(ranks: RankPool) -> None:
    assert ranks.run(one_dimension, 2) == [True, True]


class Gathered(nn.Module):
    """Gathers its weight, each time it runs; the weight's gradient is on its way when it comes."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        weight = self.weight.redistribute(placements=[Replicate()], async_op=True)
        product = DTensor.from_local(x, self.mesh, [Shard(0)]) @ weight
        assert isinstance(product, DTensor)
        return product.to_local()


def two_dimensions(rank: int, gathered: bool) -> tuple[bool, float]:
    mesh = two_by_two()
    replica = mesh["dp"].get_local_rank()
    modules = [Gathered(mesh["tp"]) if gathered else spread(Mlp(), mesh) for _ in BOTH]
    ours, theirs = (
        train(cls(module, device_mesh=mesh["dp"]), replica) for cls, module in zip(BOTH, modules, strict=True)
    )
    return same(ours, theirs), ours[0].item()


@pytest.mark.parametrize("gathered", [False, True])
def test_with_tensor_parallelism_over_the_other_dimension_gradients_are_torchs(ranks: RankPool, gathered: bool) -> None:
    results = ranks.run(two_dimensions, 4, gathered)
    assert all(same for same, _ in results)
    losses = [loss for _, loss in results]
    assert losses[0] != losses[2]  # the replicas' batches differ
    assert gathered or (losses[0], losses[2]) == (losses[1], losses[3])


def parameters_stay(rank: int) -> list[bool]:
    mesh = two_by_two()
    module = spread(Mlp(), mesh)
    module.tied = module.up
    module.tied_weight = module.up.weight
    # 3 rows on one rank and 2 on the other.
    module.frozen = nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh["tp"], [Shard(0)]), requires_grad=False)
    model = fastddp.DistributedDataParallel(module, device_mesh=mesh["dp"])
    before = dict(model.named_parameters())
    inside: list[tuple[type, torch.Size]] = []
    model.module.register_forward_pre_hook(lambda mlp, _: inside.append((type(mlp.up.weight), mlp.frozen.shape)))
    train(model, mesh["dp"].get_local_rank())
    after = dict(model.named_parameters())
    return [
        list(after) == list(before) and all(after[name] is before[name] for name in before),
        module.tied_weight is module.up.weight,
        list(model.state_dict()) == [f"module.{name}" for name in module.state_dict()],
        not any(isinstance(parameter, DTensor) for parameter in model.parameters()),
        module.frozen.shape == (3 - mesh["tp"].get_local_rank(), 4) and not module.frozen.requires_grad,
        inside == [(DTensor, (5, 4))] * 3,
    ]


def test_parameters_are_the_same_local_parts_before_and_after_a_step(ranks: RankPool) -> None:
    assert ranks.run(parameters_stay, 4) == [[True] * 6] * 4


def checkpointed(rank: int) -> bool:
    mesh = two_by_two()
    replica = mesh["dp"].get_local_rank()
    models = [
        fastddp.DistributedDataParallel(spread(Mlp(again), mesh), device_mesh=mesh["dp"]) for again in (False, True)
    ]
    plain, again = (train(model, replica) for model in models)
    return same(plain, again)


def test_what_checkpointing_runs_again_is_tensor_parallel_too(ranks: RankPool) -> None:
    assert ranks.run(checkpointed, 4) == [True] * 4


def in_low_precision(rank: int) -> list[float]:
    """How far the gradients in bf16 are from those in fp32, in parts of their norm."""
    mesh = two_by_two()
    replica = mesh["dp"].get_local_rank()
    config = _MixedPrecision(torch.bfloat16, torch.bfloat16)
    models = [
        fastddp.DistributedDataParallel(spread(Mlp(), mesh), device_mesh=mesh["dp"], mixed_precision=precision)
        for precision in (None, config)
    ]
    full, low = (train(model, replica, steps=1) for model in models)
    assert all(gradient.dtype == torch.float32 for gradient in low)
    return [((a - b).norm() / a.norm()).item() for a, b in zip(full, low, strict=True)]


def test_tensor_parallelism_goes_with_mixed_precision(ranks: RankPool) -> None:
    for errors in ranks.run(in_low_precision, 4):
        assert all(0 < error < 0.03 for error in errors), errors


def wrap(rank: int, what: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"device_mesh": mesh["dp"]}
    module: nn.Module = Mlp()
    if what == "both":
        options["process_group"] = dist.group.WORLD
    elif what == "two dimensions":
        options["device_mesh"] = mesh
    else:
        parallelize_module(module, mesh["dp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    dist.barrier()  # a rank that fails leaves, and another one may still be making its groups
    fastddp.DistributedDataParallel(module, **options)


@pytest.mark.parametrize(
    ("what", "type_name", "text"),
    [
        ("both", "RuntimeError", "Cannot specify both process_group and device_mesh arguments"),
        ("two dimensions", "RuntimeError", "must have one dimension, that of the ranks to average over, but got"),
        ("same ranks", "ValueError", "Parameter up.weight is a DTensor over ranks [0, 1]"),
    ],
)
def test_meshes_that_make_no_sense_are_refused(ranks: RankPool, what: str, type_name: str, text: str) -> None:
    for error in ranks.errors(wrap, 2, what):
        assert error.type_name == type_name
        assert text in error.message


def refused(rank: int, how: str) -> list[bool]:
    """Whether the constructor raised, and left each parameter where it was."""
    mesh = two_by_two()
    module = spread(Mlp(), mesh)
    module.tied = module.up
    options: dict[str, Any] = {"device_mesh": mesh["dp"]}
    if how == "by its options":
        options["bucket_cap_mb"] = -1
    elif how == "by another rank":
        module.scale = nn.Parameter(torch.ones(4 + rank // 2))  # the model differs between replicas
    elif how == "by its last step":
        options["mixed_precision"] = "float16"
    elif how == "by a part":
        module.late = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["dp"], [Shard(0)]))
    else:
        module.compiled = torch.jit.script(nn.Linear(2, 2))
    before = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        fastddp.DistributedDataParallel(module, **options)
    after = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    return [after == before, isinstance(module.up.weight, DTensor), module.tied is module.up]


@pytest.mark.parametrize(
    "how", ["by its options", "by another rank", "by its last step", "by a part", "by TorchScript"]
)
def test_a_module_that_is_refused_keeps_its_parameters(ranks: RankPool, how: str) -> None:
    assert ranks.run(refused, 4, how) == [[True] * 3] * 4
