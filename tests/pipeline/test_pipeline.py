"""Codecs over transports put together by hand, also as no hook does. What hooks make of them: tests/contract."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C
from on_ranks import on_ranks
from ranks import RankPool

ROWS, COLUMNS, LAYERS = 20, 12, 4
# Codec, what it rounds by, and transport.
WAYS = {
    "plain": ("own dtype", 1e-5, "allreduce"),
    "bf16": ("bf16", 3e-2, "shards"),
    "int8": ("int8", 0.15, "shards"),
    "low rank": ("low rank", 1e-5, "allreduce"),
    "bf16, two levels": ("bf16", 3e-2, "shards, two levels, two lanes"),
    "low rank in shards": ("low rank, fp16", 4e-3, "shards"),
    "plain, two lanes": ("own dtype", 1e-5, "allreduce, two lanes"),
    "fp16, two lanes": ("fp16", 4e-3, "allreduce, two lanes"),
    "low rank, two lanes": ("low rank", 1e-5, "allreduce, two lanes"),
    "low rank, two levels": ("low rank, fp16", 4e-3, "shards, two levels, two lanes"),
    "e4m3": ("e4m3", 0.15, "shards"),
}


class Layers(nn.Module):
    """The gradient of each parameter is the input times a fixed matrix of rank 1, or a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(ROWS, COLUMNS) for _ in range(LAYERS))
        self.vectors = nn.ParameterList(torch.zeros(ROWS) for _ in range(LAYERS))

    def forward(self, x: float) -> Tensor:
        pairs = zip(self.named_parameters(), fixed().values(), strict=True)
        return x * torch.stack([(parameter * gradient).sum() for (_, parameter), gradient in pairs]).sum()


def fixed() -> dict[str, Tensor]:
    """The gradients, by name, where the input is 1."""
    columns = [torch.linspace(0.5, 1.5, ROWS) + layer for layer in range(LAYERS)]
    matrices = {f"matrices.{i}": column.outer(torch.linspace(-1.0, 1.0, COLUMNS)) for i, column in enumerate(columns)}
    return matrices | {f"vectors.{i}": column for i, column in enumerate(columns)}


def codec_of(name: str, parameters: list[nn.Parameter]) -> _C.Codec:
    if name in ("int8", "e4m3"):
        return _C.Codec.block8(name, 128, _C.Block8Errors(), seed=None, first_window=0, rank=dist.get_rank())
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name.split(", ")[-1])
    if "low rank" not in name:
        return _C.Codec.cast(wire)
    settings = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0, "first_window": 0}
    memory = [
        (torch.zeros(ROWS, COLUMNS), torch.eye(2, COLUMNS)) if parameter.dim() == 2 else (None, None)
        for parameter in parameters
    ]
    return _C.Codec.low_rank(memory, [], **settings, wire=wire)


def transport_of(name: str) -> _C.Transport:
    lanes = [dist.group.WORLD, dist.new_group()] if "two lanes" in name else [dist.group.WORLD]
    if "shards" not in name:
        return _C.Transport.all_reduce(lanes)
    nodes = [rank // 2 if "two levels" in name else 0 for rank in range(dist.get_world_size())]
    return _C.Transport.sharded_sum(lanes, nodes, torch.device("cpu"))


def ranks_of(way: str) -> int:
    return 4 if "levels" in way else 2


def exchange_of(way: str, parameters: list[nn.Parameter]) -> _C.Pipeline:
    codec, _, transport = WAYS[way]
    return _C.Pipeline(codec_of(codec, parameters), transport_of(transport))


def rebuilt() -> fastddp.DistributedDataParallel:
    """With buckets that will not change any more."""
    model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0.0005)
    for _ in range(2):
        model(1.0).backward()
    return model


def trained(rank: int, model: fastddp.DistributedDataParallel) -> list[dict[str, Tensor]]:
    """The gradients of four windows, by name."""
    seen = []
    for step in range(4):
        model.zero_grad()
        model(2.0**step * (rank + 1)).backward()
        seen.append({name: parameter.grad.clone() for name, parameter in model.module.named_parameters()})
    return seen


def trained_alone(rank: int, way: str) -> list[dict[str, Tensor]]:
    model = rebuilt()
    model.reducer.set_exchange(exchange_of(way, list(model.module.parameters())))
    return trained(rank, model)


@pytest.mark.parametrize("way", WAYS)
def test_the_mean_arrives_on_all_ranks(ranks: RankPool, way: str) -> None:
    of_ranks = ranks.run(trained_alone, ranks_of(way), way)
    for step, (name, gradient) in itertools.product(range(4), fixed().items()):
        mean = 2.0**step * (len(of_ranks) + 1) / 2 * gradient
        mine, *others = (seen[step][name] for seen in of_ranks)
        torch.testing.assert_close(mine, mean, rtol=0, atol=WAYS[way][1] * mean.abs().max().item())
        assert all(torch.equal(mine, other) for other in others)


@on_ranks(2)
def test_an_exchange_of_another_reducer_is_refused(rank: int) -> None:
    noop = _C.Exchange.noop()
    first, second = rebuilt(), rebuilt()
    first.reducer.set_exchange(noop)
    with pytest.raises(ValueError, match=r"(?s)belongs to one reducer.*Make another one"):
        second.reducer.set_exchange(noop)
    second(1.0).backward()  # its own is still there
