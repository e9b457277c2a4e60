"""Codecs over transports put together by hand, also as no hook does: alone, and several on the buckets of a plan.

What hooks make of them: tests/contract. What fails where buckets are shared: random programs with ``auto_hook``.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C
from on_ranks import of_ranks, on_ranks
from ranks import RankPool

ROWS, COLUMNS, LAYERS = 20, 12, 4
# Codec, what it rounds by, and transport. By how many ticks after a bucket's first the last collective starts: 0, 1,
# 1, 1, 3, 3. The others are not shared.
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
SHARED = list(WAYS)[:6]
DEALT = {"in turn": [0, 1], "the third": [0, 0, 1], "the first": [1, 0, 0]}


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


def ranks_of(*ways: str) -> int:
    return 4 if any("levels" in way for way in ways) else 2


def exchange_of(way: str, parameters: list[nn.Parameter]) -> _C.Pipeline:
    codec, _, transport = WAYS[way]
    return _C.Pipeline(codec_of(codec, parameters), transport_of(transport))


def rebuilt() -> fastddp.DistributedDataParallel:
    """With buckets that will not change any more."""
    model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0.0005)
    for _ in range(2):
        model(1.0).backward()
    return model


def sharing(ways: tuple[str, ...], of_buckets: list[int]) -> fastddp.DistributedDataParallel:
    """A model the exchange of whose buckets is the one of that number."""
    model = rebuilt()
    exchanges = [exchange_of(way, list(model.module.parameters())) for way in ways]
    model.reducer.set_exchange(_C.Pipeline.per_bucket(exchanges, of_buckets))
    return model


def plan() -> list[list[str]]:
    return [[parameter.name for parameter in bucket.parameters] for bucket in rebuilt().bucket_plan().buckets]


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


def are_equal(way: str, mine: Tensor, other: Tensor) -> bool:
    """In all bits; where factors go through a ring of several ranks, their place in the wire decides who adds first."""
    if way == "low rank" and dist.get_world_size() > 2:
        return torch.allclose(mine, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())
    return torch.equal(mine, other)


def alone_and_shared(rank: int, ways: tuple[str, str], dealt: str) -> list[str]:
    """Names of the gradients that are not what the bucket's exchange alone makes of them, by window."""
    buckets = plan()
    order = DEALT.get(dealt, [0] * (len(buckets) - 1) + [1])
    of_buckets = [order[index % len(order)] for index in range(len(buckets))]
    assert set(of_buckets) == {0, 1}
    shared = trained(rank, sharing(ways, of_buckets))
    different = []
    for number, way in enumerate(ways):
        own = [name for names, owner in zip(buckets, of_buckets, strict=True) if owner == number for name in names]
        for window, (mine, other) in enumerate(zip(shared, trained_alone(rank, way), strict=True)):
            different += [f"{window}, {name}" for name in own if not are_equal(way, mine[name], other[name])]
    return different


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize(
    ("ways", "dealt"),
    [
        *itertools.product(itertools.permutations(SHARED, 2), DEALT),
        *((("plain", way), "the last") for way in SHARED if way != "plain"),
    ],
    ids=str,
)
def test_a_bucket_gets_what_its_exchange_alone_makes_of_it(ranks: RankPool, ways: tuple[str, str], dealt: str) -> None:
    assert ranks.run(alone_and_shared, ranks_of(*ways), ways, dealt) == [[]] * ranks_of(*ways)


@on_ranks(2)
def test_a_later_leg_without_company_is_a_collective_more(rank: int) -> None:
    """In windows under plain allreduces, and shared with PowerSGD."""
    count = dist.group.WORLD._get_sequence_number_for_group
    buckets = len(plan())
    windows = []
    for model in (rebuilt(), sharing(("plain", "low rank"), [index % 2 for index in range(buckets)])):
        model(1.0).backward()
        before = count()
        model(1.0).backward()
        windows.append(count() - before)
    assert windows[1] - windows[0] == buckets // 2


@on_ranks(2)
def test_what_cannot_share_buckets_or_a_reducer_is_refused(rank: int) -> None:
    groups = [dist.group.WORLD, dist.new_group()]
    plain, other = (_C.Pipeline(_C.Codec.cast(), _C.Transport.all_reduce([group])) for group in groups)
    shared = _C.Pipeline.per_bucket([plain, plain], [0, 1])
    for pipelines, of_buckets, words in [
        ([], [0], "no pipeline"),
        ([plain, other], [0, 1], "number 1 goes over another one than number 0"),
        ([plain], [1], "no pipeline 1 among 1"),
        ([shared], [0], "number 0 has 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            _C.Pipeline.per_bucket(pipelines, of_buckets)
    model = sharing(("plain",), [0])
    with pytest.raises(RuntimeError, match="chosen for other buckets"):
        model(1.0).backward()
    noop = _C.Exchange.noop()
    first, second = rebuilt(), rebuilt()
    first.reducer.set_exchange(noop)
    with pytest.raises(ValueError, match=r"(?s)belongs to one reducer.*Make another one"):
        second.reducer.set_exchange(noop)
    second(1.0).backward()  # its own is still there


@pytest.mark.parametrize("way", ["plain", "bf16", "int8"])
@on_ranks(2)
def test_a_trial_averages_what_it_is_given(rank: int, way: str) -> None:
    parameters = [torch.full((24, 16), rank + 1.0), torch.linspace(0.0, rank + 1.0, 40)]
    trial = _C.Trial(parameters, exchange_of(way, []))
    assert all(trial.seconds() > 0 for _ in range(2))
    for gradient, parameter in zip(trial.gradients, parameters, strict=True):
        assert parameter.grad is None, "what it was given stays as it is"
        mean = sum(of_ranks(parameter)) / 2
        torch.testing.assert_close(gradient, mean, rtol=0, atol=0.0 if way == "plain" else 0.02)
