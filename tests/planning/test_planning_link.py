"""What collectives of a group cost, and when what was measured supports no bandwidth; in closed form."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.planning.link import fit, largest_bucket, measure_link
from fastddp.planning.model import Link
from on_ranks import of_ranks, on_ranks
from ranks import RankPool
from test_planning import Layers, auto, sizes

KIB, MIB = 2**10, 2**20
SIZES = [4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB]
Cost = Callable[[int, int], float]
"""Seconds of an allreduce: of so many bytes, as the n-th one."""


def samples_of(cost: Cost, sizes: Sequence[int] = SIZES, rounds: int = 5) -> list[list[float]]:
    """By size, as :func:`measure_link` takes them: sizes in turn."""
    return [[cost(size, round_ * len(sizes) + place) for round_ in range(rounds)] for place, size in enumerate(sizes)]


@contextmanager
def collectives_that_take(cost: Cost) -> Iterator[list[int]]:
    """By a clock that shows nothing else; the list says how many bytes each had."""
    all_reduce = dist.all_reduce
    now = 0.0
    calls: list[int] = []

    def slow(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal now
        if "op" not in kwargs:  # not those in which ranks agree
            now += cost(tensor.nbytes, len(calls))
            calls.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    def clock() -> float:
        return now

    with mock.patch.object(dist, "all_reduce", slow), mock.patch.object(time, "perf_counter", clock):
        yield calls


def line(size: int, number: int) -> float:
    """20 ms, and 10 ns a byte."""
    return 0.02 + 1e-8 * size


def far_away(size: int, number: int) -> float:
    """A latency of 0.15 s, 1 GB/s, and a few ms that vary."""
    return 0.15 + 1e-9 * size + 0.001 * (number * 7 % 5)


def all_the_same(size: int, number: int) -> float:
    """A latency of 0.15 s that varies, and nothing else."""
    return 0.15 + 0.02 * (number * 7 % 11 / 11)


def just_above_noise(above: float) -> Cost:
    """Samples of a size lie within 10 ms, and those of the largest one so much above the others."""
    return lambda size, number: 0.15 + 0.01 * (number // 5 % 5 / 4) + above * (size == SIZES[-1])


# ------------------------------------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize(
    ("sizes", "samples", "latency", "bandwidth"),
    [
        (SIZES, samples_of(line), pytest.approx(0.02), pytest.approx(1e8)),
        # 10 % more for the largest: by absolute errors the latency would become 7 ms.
        ([4 * KIB, MIB, 16 * MIB], [[1e-4], [1.1e-2], [1.9e-1]], pytest.approx(1e-4, rel=0.5), mock.ANY),
        # 117 MB/s but for the first 250 kB, a burst that passes at once.
        (SIZES[:-1], [[6e-4], [6e-4], [9e-4], [1.76e-2]], mock.ANY, pytest.approx(1.2e8, rel=0.05)),
        (SIZES[-2:], [[1e-3], [1e-1]], 0.0, 16 * MIB / 1e-1),  # no negative latency
        (SIZES, samples_of(just_above_noise(0.008)), mock.ANY, pytest.approx(16 * MIB / 0.008, rel=0.1)),
    ],
    ids=["a line", "small ones count", "burst", "no latency", "above noise"],
)
def test_the_fit_of_few_samples(sizes: list[int], samples: list[list[float]], latency: Any, bandwidth: Any) -> None:
    link = fit(sizes, samples)
    assert isinstance(link, Link)
    assert (link.latency, link.bandwidth) == (latency, bandwidth)
    assert link.seconds(sizes[-1]) == pytest.approx(samples[-1][0], rel=0.1)


@pytest.mark.parametrize(
    ("cost", "sizes"),
    [
        (lambda size, number: 0.15, SIZES),  # any bandwidth at all would fit
        (lambda size, number: 0.15 + (0.1 if size == 2 * MIB else 1e-9 * size), SIZES),  # not the largest: another one
        (just_above_noise(0.004), SIZES),
        (line, SIZES[:1]),
    ],
    ids=["constant", "not the largest", "within noise", "one size"],
)
def test_a_bandwidth_that_the_times_do_not_support_is_not_stated(cost: Cost, sizes: list[int]) -> None:
    words = fit(sizes, samples_of(cost, sizes))
    assert isinstance(words, str)
    assert re.match(r"allreduces took: 4 KiB [\d.]+ ms", words)


def test_a_bucket_grows_up_to_what_was_measured_or_as_long_as_its_latency_counts() -> None:
    for device, largest in ((torch.device("cpu"), 16 * MIB), (torch.device("cuda", 0), 64 * MIB)):
        assert largest_bucket(Link(latency=1e-5, bandwidth=1e9), device) == largest
        assert largest_bucket(Link(latency=0.1, bandwidth=1e9), device) == pytest.approx(1.6e9)


# ---------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("lanes", [1, 2])
@on_ranks(2)
def test_ranks_measure_the_same(rank: int, lanes: int) -> None:
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(lanes - 1))]
    link = measure_link(groups, torch.device("cpu"), 2**20)
    assert of_ranks(link) == [link] * 2
    assert isinstance(link, str) or 1e-6 < link.seconds(2**20) < 1  # words: on a busy machine


def very_slow(size: int, number: int) -> float:
    """1 Mbit/s."""
    return 0.001 + size / 125_000


@pytest.mark.parametrize(
    ("cost", "largest", "chosen", "latency", "bandwidth"),
    [
        (line, 16 * MIB, SIZES, 0.02, 1e8),
        (line, 4, SIZES[:-1], 0.02, 1e8),  # a small model, with sizes that tell a bandwidth
        (far_away, 16 * MIB, SIZES, 0.152, 1e9),
        (very_slow, 16 * MIB, SIZES[:3], 0.001, 125_000),  # two sizes, and a third that took too long
    ],
    ids=["a line", "a small model", "a long latency", "a slow network"],
)
@on_ranks(2)
def test_latency_and_bandwidth_are_told_apart(
    rank: int, cost: Cost, largest: int, chosen: list[int], latency: float, bandwidth: float
) -> None:
    with collectives_that_take(cost) as calls:
        link = measure_link([dist.distributed_c10d._get_default_group()], torch.device("cpu"), largest)
    assert set(calls) == set(chosen)
    assert isinstance(link, Link)
    assert link.latency == pytest.approx(latency, rel=0.02)
    assert link.bandwidth == pytest.approx(bandwidth, rel=0.2 if cost is far_away else 1e-6)


# ------------------------------------------------------------------------------------------- and if there is no telling


def stays_at_the_default(rank: int) -> tuple[list[str], int]:
    model = auto(Layers())
    with warnings.catch_warnings(record=True) as caught, collectives_that_take(all_the_same) as calls:
        warnings.simplefilter("always")
        for _ in range(9):  # past the second plan
            model(1.0).backward()
    assert sizes(model) == [6]
    return [str(warning.message) for warning in caught if "bucket_cap_mb" in str(warning.message)], len(calls)


def test_rank_0_says_once_that_the_default_buckets_stay(ranks: RankPool) -> None:
    ((warning,), _), (silent, _) = ranks.run(stays_at_the_default, 2)
    assert silent == []
    assert warning.startswith('bucket_cap_mb="auto" keeps the default buckets: over gloo, allreduces took: 4 KiB 15')
    assert "give a number of MiB" in warning
    assert ranks.run(stays_at_the_default, 1) == [([], 0)]  # one rank measures nothing, and says nothing
