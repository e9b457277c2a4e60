"""Several exchanges share the buckets of a plan: each bucket gets, bit for bit, what its exchange alone makes of it."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastddp
from fastddp import _C
from ranks import RankPool
from test_pipeline import Layers, codec_of, transport_of

# By how many ticks behind a bucket's first the last collective starts: 0, 1, 1, 1, 3, 3.
WAYS = {
    "plain": ("own dtype", "allreduce"),
    "bf16": ("bf16", "shards"),
    "int8": ("int8", "shards"),
    "low rank": ("low rank", "allreduce"),
    "bf16, two levels": ("bf16", "shards, two levels, two lanes"),
    "low rank in shards": ("low rank, fp16", "shards"),
}
PAIRS = [(first, second) for first, second in itertools.permutations(WAYS, 2)]


def exchange_of(way: str, model: fastddp.DistributedDataParallel) -> _C.Exchange:
    codec, transport = WAYS[way]
    return _C.Exchange.pipeline(codec_of(codec, list(model.module.parameters())), transport_of(transport))


def rebuilt() -> fastddp.DistributedDataParallel:
    """With buckets that will not change any more."""
    model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0.0005)
    for _ in range(2):
        model(1.0).backward()
    return model


def trained(
    rank: int, model: fastddp.DistributedDataParallel, raises_behind: int | None, failing: int = 1
) -> list[dict[str, Tensor]]:
    """The gradients of four windows, by name. In the third one rank ``failing`` fails, if any does; it has none."""
    seen = []
    for step in range(4):
        model.zero_grad()
        fails = step == 2 and raises_behind is not None
        loss = model(2.0**step * (rank + 1), raises_behind if fails and rank == failing else None)
        with pytest.raises((ArithmeticError, RuntimeError)) if fails else contextlib.nullcontext():
            loss.backward()
        if not fails:
            seen.append({name: parameter.grad.clone() for name, parameter in model.module.named_parameters()})
    return seen


def are_equal(way: str, mine: Tensor, alone: Tensor) -> bool:
    """In all bits; where factors go through a ring of several ranks, their place in the wire decides who adds first."""
    if way == "low rank" and dist.get_world_size() > 2:
        return torch.allclose(mine, alone, rtol=1e-4, atol=1e-5 * alone.abs().max().item())
    return torch.equal(mine, alone)


def alone_and_shared(rank: int, ways: tuple[str, ...], dealt: list[int], raises_behind: int | None) -> list[str]:
    """Names of the gradients that are not what the bucket's exchange alone makes of them, by window."""
    model = rebuilt()
    plan = [[parameter.name for parameter in bucket.parameters] for bucket in model.bucket_plan().buckets]
    of_buckets = [dealt[index % len(dealt)] for index in range(len(plan))]
    model.reducer.set_exchange(_C.Exchange.per_bucket([exchange_of(way, model) for way in ways], of_buckets))
    shared = trained(rank, model, raises_behind)
    different = []
    for number, way in enumerate(ways):
        other = rebuilt()
        other.reducer.set_exchange(exchange_of(way, other))
        for window, (mine, alone) in enumerate(zip(shared, trained(rank, other, raises_behind), strict=True)):
            for index, owner in enumerate(of_buckets):
                if owner != number:
                    continue
                names = [name for name in plan[index] if not are_equal(way, mine[name], alone[name])]
                different += [f"window {window}, {name}" for name in names]
    assert len(of_buckets) > 3
    assert set(of_buckets) == set(range(len(ways)))
    return different


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("dealt", [[0, 1], [0, 0, 1], [1, 0, 0]], ids=["in turn", "the third", "the first"])
@pytest.mark.parametrize("ways", PAIRS, ids=" and ".join)
def test_a_bucket_gets_what_its_exchange_alone_makes_of_it(
    ranks: RankPool, ways: tuple[str, str], dealt: list[int]
) -> None:
    world_size = 4 if any("levels" in way for way in ways) else 2
    assert ranks.run(alone_and_shared, world_size, ways, dealt, None) == [[]] * world_size


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("raises_behind", [0, 2, 3], ids=["last", "in the middle", "first"])
@pytest.mark.parametrize(
    "ways",
    [("plain", "int8"), ("int8", "low rank"), ("plain", "bf16", "int8", "low rank"), ("low rank in shards", "bf16")],
    ids=" and ".join,
)
def test_a_window_that_fails_costs_that_window_only(ranks: RankPool, ways: tuple[str, ...], raises_behind: int) -> None:
    of_ranks = ranks.run(windows_around_a_failure, 2, ways, raises_behind)
    for mine, other in zip(*of_ranks, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine), "ranks have the same gradients"
    # What a void step had lost is in the errors of the ranks that were well: a seventh of this mean at most.
    for name, gradient in of_ranks[0][3].items():
        expected = of_ranks[0][2][name]
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0.15 * expected.abs().max().item())


def windows_around_a_failure(rank: int, ways: tuple[str, ...], raises_behind: int) -> list[dict[str, Tensor]]:
    """Of windows 0, 1 and 3, and then the mean that window 3 has to have."""
    model = rebuilt()
    of_buckets = [index % len(ways) for index in range(len(model.bucket_plan().buckets))]
    model.reducer.set_exchange(_C.Exchange.per_bucket([exchange_of(way, model) for way in ways], of_buckets))
    seen = trained(rank, model, raises_behind)
    plain = rebuilt()
    return [*seen, trained(rank, plain, None)[3]]


def collectives_of_windows(rank: int) -> tuple[int, int, int]:
    """Of two windows under plain allreduces, then shared with PowerSGD; and the number of buckets."""
    model = rebuilt()
    count = dist.group.WORLD._get_sequence_number_for_group
    buckets = len(model.bucket_plan().buckets)

    def of_a_window() -> int:
        model(1.0).backward()
        before = count()
        model(1.0).backward()
        return count() - before

    plain = of_a_window()
    exchanges = [exchange_of(way, model) for way in ("plain", "low rank")]
    model.reducer.set_exchange(_C.Exchange.per_bucket(exchanges, [index % 2 for index in range(buckets)]))
    return plain, of_a_window(), buckets


def test_a_later_leg_without_company_is_a_collective_more(ranks: RankPool) -> None:
    for plain, shared, buckets in ranks.run(collectives_of_windows, 2):
        assert shared - plain == buckets // 2


def last_bucket_apart(rank: int, way: str) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Gradients where one exchange has the last bucket and plain allreduces the rest; and as they have to be."""
    model = rebuilt()
    buckets = len(model.bucket_plan().buckets)
    exchanges = [exchange_of("plain", model), exchange_of(way, model)]
    model.reducer.set_exchange(_C.Exchange.per_bucket(exchanges, [0] * (buckets - 1) + [1]))
    return trained(rank, model, None), trained(rank, rebuilt(), None)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_the_last_bucket_may_be_the_slowest(ranks: RankPool, way: str) -> None:
    for found, expected in ranks.run(last_bucket_apart, 4 if "levels" in way else 2, way):
        for mine, plain in zip(found, expected, strict=True):
            for name, gradient in plain.items():
                torch.testing.assert_close(mine[name], gradient, rtol=0, atol=0.03 * gradient.abs().max().item())


def refused(rank: int) -> list[str]:
    model = rebuilt()
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
        texts.append(str(raised.value).splitlines()[0])
    model.reducer.set_exchange(_C.Exchange.per_bucket([_C.Exchange.pipeline(_C.Codec.cast(), plain)], [0]))
    with pytest.raises(RuntimeError, match="chosen for other buckets"):
        model(1.0).backward()
    return texts


def test_what_cannot_share_buckets_is_refused(ranks: RankPool) -> None:
    for texts in ranks.run(refused, 2):
        assert texts == [
            "fastddp: no exchange to carry the buckets",
            (
                "fastddp: exchanges that share buckets go over one process group, and number 1 goes over another one "
                "than number 0"
            ),
            "fastddp: there is no exchange 1 among 1",
            "fastddp: this exchange carries all buckets of a plan, or none.",
        ]


def tried(rank: int, way: str) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that two trials have left, and the parameters of this rank."""
    parameters = [torch.full((24, 16), rank + 1.0), torch.linspace(0.0, rank + 1.0, 40)]
    codec, transport = WAYS[way]
    if way == "plain":
        exchange = _C.Exchange.pipeline(_C.Codec.cast(), transport_of(transport))
    else:
        exchange = _C.Exchange.pipeline(codec_of(codec, []), transport_of(transport))
    trial = _C.Trial(parameters, exchange)
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
