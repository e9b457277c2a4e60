"""Codecs over transports put together by hand, also as no hook does: the mean arrives on all ranks, over lanes too."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C
from ranks import RankPool

ROWS, COLUMNS, LAYERS = 20, 12, 4
CODECS = {
    "own dtype": None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "low rank": None,
    "low rank, fp16": torch.float16,
    "int8": torch.uint8,
    "e4m3": torch.uint8,
}
TRANSPORTS = ["allreduce", "allreduce, two lanes", "shards", "shards, two levels, two lanes"]
# Shards are added up from 16 bits, and 8 bits in shards alone, on one level.
PIPELINES = [
    (codec, transport)
    for codec, transport in itertools.product(CODECS, TRANSPORTS)
    if ("shards" not in transport or CODECS[codec] is not None)
    and (CODECS[codec] != torch.uint8 or ("shards" in transport and "two levels" not in transport))
]
ROUNDING = {None: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.uint8: 0.15}


class Layers(nn.Module):
    """The gradient of each parameter is the input times a fixed matrix of rank 1, or a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(ROWS, COLUMNS) for _ in range(LAYERS))
        self.vectors = nn.ParameterList(torch.zeros(ROWS) for _ in range(LAYERS))

    def forward(self, x: float) -> Tensor:
        pairs = enumerate(zip(self.matrices, self.vectors, strict=True))
        return sum(x * ((one * outer(i)).sum() + (two * column(i)).sum()) for i, (one, two) in pairs)  # type: ignore


def column(layer: int) -> Tensor:
    return torch.linspace(0.5, 1.5, ROWS) + layer


def outer(layer: int) -> Tensor:
    return torch.outer(column(layer), torch.linspace(-1.0, 1.0, COLUMNS))


def codec_of(name: str, parameters: list[nn.Parameter]) -> _C.Codec:
    if CODECS[name] == torch.uint8:
        rank = dist.get_rank()
        return _C.Codec.block8(name, 128, _C.Block8Errors(), seed=None, first_window=0, rank=rank)
    if "low rank" not in name:
        return _C.Codec.cast(CODECS[name])
    settings = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0, "first_window": 0}
    memory = [
        (torch.zeros(ROWS, COLUMNS), torch.eye(2, COLUMNS)) if parameter.dim() == 2 else (None, None)
        for parameter in parameters
    ]
    return _C.Codec.low_rank(memory, [], **settings, wire=CODECS[name])


def transport_of(name: str) -> _C.Transport:
    lanes = [dist.group.WORLD, dist.new_group()] if "two lanes" in name else [dist.group.WORLD]
    if "shards" not in name:
        return _C.Transport.all_reduce(lanes)
    nodes = [rank // 2 if "two levels" in name else 0 for rank in range(dist.get_world_size())]
    return _C.Transport.sharded_sum(lanes, nodes, torch.device("cpu"))


def rebuilt(bucket_cap_mb: float) -> fastddp.DistributedDataParallel:
    """With buckets that will not change any more."""
    model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=bucket_cap_mb)
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


def through(rank: int, codec: str, transport: str) -> list[dict[str, Tensor]]:
    model = rebuilt(bucket_cap_mb=0.001)
    assert len(model.bucket_plan().buckets) > 2
    pipeline = _C.Exchange.pipeline(codec_of(codec, list(model.module.parameters())), transport_of(transport))
    model.reducer.set_exchange(pipeline)
    return trained(rank, model)


@pytest.mark.parametrize(("codec", "transport"), PIPELINES, ids=[" over ".join(names) for names in PIPELINES])
def test_the_mean_arrives_on_all_ranks(ranks: RankPool, codec: str, transport: str) -> None:
    world_size = 4 if "two levels" in transport else 2
    of_ranks = ranks.run(through, world_size, codec, transport)
    for step in range(4):
        scale = 2.0**step * (world_size + 1) / 2
        for layer in range(LAYERS):
            for name, fixed in {f"matrices.{layer}": outer(layer), f"vectors.{layer}": column(layer)}.items():
                mine, *others = (seen[step][name] for seen in of_ranks)
                atol = ROUNDING[CODECS[codec]] * scale * fixed.abs().max().item()
                torch.testing.assert_close(mine, scale * fixed, rtol=0, atol=atol)
                assert all(torch.equal(mine, other) for other in others)


def given_twice(rank: int) -> str:
    exchange = _C.Exchange.noop()
    models = [fastddp.DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    models[0].reducer.set_exchange(exchange)
    with pytest.raises(ValueError, match="belongs to one reducer") as raised:
        models[1].reducer.set_exchange(exchange)
    models[1](torch.ones(1, 2)).sum().backward()  # its own is still there
    return str(raised.value)


def test_an_exchange_belongs_to_one_reducer(ranks: RankPool) -> None:
    assert all("Make another one" in text for text in ranks.run(given_twice, 2))
