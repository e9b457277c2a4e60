"""Several exchanges share the buckets of a plan: each bucket gets, bit for bit, what its exchange alone makes of it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastddp
from fastddp import _C
from ranks import RankPool
from test_pipeline import codec_of, rebuilt, trained, transport_of

# By how many ticks behind a bucket's first the last collective starts: 0, 1, 1, 1, 3, 3.
WAYS = {
    "plain": ("own dtype", "allreduce"),
    "bf16": ("bf16", "shards"),
    "int8": ("int8", "shards"),
    "low rank": ("low rank", "allreduce"),
    "bf16, two levels": ("bf16", "shards, two levels, two lanes"),
    "low rank in shards": ("low rank, fp16", "shards"),
}
DEALT = {"in turn": [0, 1], "the third": [0, 0, 1], "the first": [1, 0, 0]}


def small() -> fastddp.DistributedDataParallel:
    return rebuilt(bucket_cap_mb=0.0005)


def exchange_of(way: str, model: fastddp.DistributedDataParallel) -> _C.Exchange:
    codec, transport = WAYS[way]
    return _C.Exchange.pipeline(codec_of(codec, list(model.module.parameters())), transport_of(transport))


def sharing(ways: tuple[str, ...], of_buckets: list[int]) -> fastddp.DistributedDataParallel:
    """A model the exchange of whose buckets is the one of that number."""
    model = small()
    model.reducer.set_exchange(_C.Exchange.per_bucket([exchange_of(way, model) for way in ways], of_buckets))
    return model


def dealt_to(count: int, dealt: str) -> list[int]:
    """Of each bucket, which of two exchanges has it."""
    return (
        [0] * (count - 1) + [1] if dealt == "the last" else [DEALT[dealt][i % len(DEALT[dealt])] for i in range(count)]
    )


def plan() -> list[list[str]]:
    return [[parameter.name for parameter in bucket.parameters] for bucket in small().bucket_plan().buckets]


def are_equal(way: str, mine: Tensor, alone: Tensor) -> bool:
    """In all bits; where factors go through a ring of several ranks, their place in the wire decides who adds first."""
    if way == "low rank" and dist.get_world_size() > 2:
        return torch.allclose(mine, alone, rtol=1e-4, atol=1e-5 * alone.abs().max().item())
    return torch.equal(mine, alone)


def alone_and_shared(rank: int, ways: tuple[str, str], dealt: str) -> list[str]:
    """Names of the gradients that are not what the bucket's exchange alone makes of them, by window."""
    of_buckets = dealt_to(len(plan()), dealt)
    assert set(of_buckets) == {0, 1}
    shared = trained(rank, sharing(ways, of_buckets))
    different = []
    for number, way in enumerate(ways):
        model = small()
        model.reducer.set_exchange(exchange_of(way, model))
        own = [name for names, owner in zip(plan(), of_buckets, strict=True) if owner == number for name in names]
        for window, (mine, alone) in enumerate(zip(shared, trained(rank, model), strict=True)):
            different += [f"{window}, {name}" for name in own if not are_equal(way, mine[name], alone[name])]
    return different


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize(
    ("ways", "dealt"),
    [
        *itertools.product(itertools.permutations(WAYS, 2), DEALT),
        *((("plain", way), "the last") for way in WAYS if way != "plain"),
    ],
    ids=str,
)
def test_a_bucket_gets_what_its_exchange_alone_makes_of_it(ranks: RankPool, ways: tuple[str, str], dealt: str) -> None:
    world_size = 4 if any("levels" in way for way in ways) else 2
    assert ranks.run(alone_and_shared, world_size, ways, dealt) == [[]] * world_size


def collectives_of_windows(rank: int) -> tuple[int, int, int]:
    """Of two windows under plain allreduces, then shared with PowerSGD; and the number of buckets."""
    count = dist.group.WORLD._get_sequence_number_for_group
    buckets = len(plan())
    windows = []
    for model in (small(), sharing(("plain", "low rank"), [index % 2 for index in range(buckets)])):
        model(1.0).backward()
        before = count()
        model(1.0).backward()
        windows.append(count() - before)
    return windows[0], windows[1], buckets


def test_a_later_leg_without_company_is_a_collective_more(ranks: RankPool) -> None:
    for plain, shared, buckets in ranks.run(collectives_of_windows, 2):
        assert shared - plain == buckets // 2


def refused(rank: int) -> list[str]:
    plain = transport_of("allreduce")
    other = _C.Transport.all_reduce([dist.new_group()])
    pipelines = [_C.Exchange.pipeline(_C.Codec.cast(), transport) for transport in (plain, other)]
    texts = []
    for exchanges, of_buckets in [
        ([], [0]),
        (pipelines, [0, 1]),
        ([pipelines[0]], [1]),
        ([_C.Exchange.python_hook(None, print, "print", dist.group.WORLD, [])], [0]),
    ]:
        with pytest.raises(ValueError, match="fastddp: ") as raised:
            _C.Exchange.per_bucket(exchanges, of_buckets)
        texts.append(str(raised.value))
    model = sharing(("plain",), [0])
    with pytest.raises(RuntimeError, match="chosen for other buckets"):
        model(1.0).backward()
    return texts


def test_what_cannot_share_buckets_is_refused(ranks: RankPool) -> None:
    said = ["no exchange", "number 1 goes over another one than number 0", "no exchange 1 among 1", "all buckets"]
    for texts in ranks.run(refused, 2):
        assert all(words in text for words, text in zip(said, texts, strict=True))


def tried(rank: int, way: str) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that two trials have left, and the parameters of this rank."""
    parameters = [torch.full((24, 16), rank + 1.0), torch.linspace(0.0, rank + 1.0, 40)]
    codec, transport = WAYS[way]
    trial = _C.Trial(parameters, _C.Exchange.pipeline(codec_of(codec, []), transport_of(transport)))
    assert all(trial.seconds() > 0 for _ in range(2))
    return trial.gradients, parameters


@pytest.mark.parametrize("way", ["plain", "bf16", "int8"])
def test_a_trial_averages_what_it_is_given(ranks: RankPool, way: str) -> None:
    of_ranks = ranks.run(tried, 2, way)
    means = [sum(parameters) / 2 for parameters in zip(*(given for _, given in of_ranks), strict=True)]
    for gradients, given in of_ranks:
        for gradient, mean in zip(gradients, means, strict=True):
            torch.testing.assert_close(gradient, mean, rtol=0, atol=0.0 if way == "plain" else 0.02)
        assert all(parameter.grad is None for parameter in given), "what it was given stays as it is"
