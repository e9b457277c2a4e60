"""Who is slow: the rule, on made-up samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fastddp.times.rank_times import PHASES, SAMPLES, RankHistory, row
from fastddp.times.split import Split
from fastddp.times.step_report import StepReport

OWN = {"outside": 20.0, "forward": 20.0, "loss": 2.0, "backward": 40.0, "hook": 3.0, "optimizer": 5.0}
STEP = 100.0
NETWORK = 4.0
More = dict[int, dict[str, float]]
"""ms that a rank takes more, by phase."""


def rows(window: int, more: More, ranks: int = 4, network: float = NETWORK) -> Tensor:
    """A step in which some ranks take more ms in some phases, and the others wait for the last one."""
    own = [{phase: OWN[phase] + more.get(rank, {}).get(phase, 0.0) for phase in PHASES} for rank in range(ranks)]
    last = max(sum(times.values()) for times in own)
    said = [row(window, STEP + last - 90.0, network + last - sum(times.values()), times) for times in own]
    return torch.tensor(said, dtype=torch.float64)


def same(more: More, ranks: int = 4, count: int = SAMPLES, network: float = NETWORK) -> list[Tensor]:
    """From step 11 on, every tenth."""
    return [rows(10 * (1 + index), more, ranks, network) for index in range(count)]


def history(samples: Sequence[Tensor]) -> RankHistory:
    found = RankHistory()
    for sample in samples:
        found.add(sample)
    return found


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_a_rank_that_is_slow_in_a_phase_is_named_with_it(phase: str, ranks: int) -> None:
    samples = same({1: {phase: 25.0}}, ranks)
    assert history(samples[:-1]).delays == ()
    (delay,) = history(samples).delays
    assert (delay.rank, delay.cause, delay.since) == (1, phase, 11)
    assert delay.ms == delay.in_cause == pytest.approx(25)
    assert delay.share == pytest.approx(25 / 125)


def with_one(samples: list[Tensor], more: More, network: float = NETWORK) -> list[Tensor]:
    """The fifth is another one."""
    samples[4] = rows(50, more, network=network)
    return samples


ALL_BUT_1 = {rank: {"loss": 50.0} for rank in (0, 2, 3)}
LATE = same({1: {"forward": 30.0}})


@pytest.mark.parametrize(
    ("samples", "slow"),
    [
        (same({}), []),
        (same({0: {"forward": 20.0}, 3: {"forward": 20.0}}), [0, 3]),  # of four two may be slow
        (same({rank: {"forward": 20.0} for rank in (0, 1, 2)}), []),  # and most are not
        (same({1: {"forward": 30.0, "backward": -30.0}}), []),  # what it saves elsewhere in its own work counts
        # Others wait in code of the user: all reduce the loss before backward.
        (same({1: {"forward": 50.0}, **ALL_BUT_1}), [1]),
        (same({0: {"forward": 30.0}}, ranks=1), []),  # it has nobody to be compared with
        ([*LATE[:-1], *LATE[-3:-1]], []),  # each sample counts once
        ([rows(10 * index, {2: {"outside": 6.0 + 60 * (index % 2)}}) for index in range(SAMPLES)], []),
        (with_one(same({1: {"backward": 25.0}}), {1: {"backward": 900.0}}), [1]),  # a pause hides nothing
        (same({}, network=9.0), []),
        (same({}, network=40.0), [None]),
        (with_one(same({}, network=40.0), {}, network=5.0), []),
        (same({2: {"forward": 50.0}}), [2]),  # the others wait, which is exposed: the network is not blamed
    ],
)
def test_who_is_slow(samples: list[Tensor], slow: list[int | None]) -> None:
    assert [delay.rank for delay in history(samples).delays] == slow


@pytest.mark.parametrize(
    ("ms", "step", "is_late"), [(4.0, 100, False), (6.0, 100, True), (0.9, 5, False), (1.1, 5, True)]
)
def test_little_is_no_verdict(ms: float, step: float, is_late: bool) -> None:
    samples = same({0: {"forward": ms}})
    for sample in samples:
        sample[:, 1] = step
        sample[:, 2] = 0.0
    assert bool(history(samples).delays) == is_late


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    "kind",
    [
        lambda normal: normal,
        lambda outliers: outliers.exp().clamp(max=500) / 10,
        lambda of_one_rank: torch.cat([of_one_rank[:1], of_one_rank[1:] / 20]),
    ],
)
def test_noise_is_no_verdict(ranks: int, kind: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(ranks)
    found = RankHistory()
    for window in range(400):
        sample = rows(window, {}, ranks)
        noise = kind(10 * torch.randn(ranks, len(PHASES), dtype=torch.float64))
        sample[:, 3:] = (sample[:, 3:] + noise).clamp(min=0)
        found.add(sample)
        assert [delay for delay in found.delays if delay.rank is not None] == []


SLOW: More = {3: {"backward": 30.0}}
SAID = (3, "backward", 11)


@pytest.mark.parametrize(
    ("first", "then", "count", "network", "last"),
    [
        (SLOW, {}, 5, (NETWORK, NETWORK), [SAID]),  # until most of the last samples are in time
        (SLOW, {}, 6, (NETWORK, NETWORK), []),
        (SLOW, {3: {"backward": 3.0}}, 20, (NETWORK, NETWORK), [SAID]),  # while the rank is late by half
        (SLOW, {3: {"backward": 2.0}}, 20, (NETWORK, NETWORK), []),
        # A second slow rank begins a verdict of its own.
        (SLOW, {**SLOW, 1: {"forward": 30.0}}, SAMPLES, (NETWORK, NETWORK), [(1, "forward", 201), SAID]),
        # One that fades keeps its cause.
        ({3: {"hook": 30.0, "outside": 5.0}}, {3: {"outside": 4.0}}, 7, (NETWORK, NETWORK), [(3, "hook", 11)]),
        # The network: while it takes half of the least that makes a verdict; and when the slow rank is gone.
        ({}, {}, SAMPLES, (40.0, 6.0), [(None, "network", 11)]),
        ({}, {}, SAMPLES, (40.0, 4.0), []),
        ({2: {"forward": 50.0}}, {}, SAMPLES, (40.0, 40.0), [(None, "network", 71)]),
    ],
)
def test_how_long_a_verdict_holds(
    first: More, then: More, count: int, network: tuple[float, float], last: list[tuple[int | None, str, int]]
) -> None:
    """Behind a dozen samples of the one kind, and some of the other: rank, cause, since when."""
    samples = same(first, network=network[0])
    samples += [rows(window, then, network=network[1]) for window in range(200, 200 + 10 * count, 10)]
    assert [(delay.rank, delay.cause, delay.since) for delay in history(samples).delays] == last


def test_a_rank_without_times_is_left_out() -> None:
    """It has run out of inputs, or its device lags behind; or it sampled another step."""
    samples = same({1: {"forward": 30.0}})
    for index, sample in enumerate(samples):
        sample[3] = math.nan
        sample[2, 0] -= index % 2
    found = history([*samples, torch.full_like(samples[0], math.nan)])
    assert [delay.rank for delay in found.delays] == [1]
    assert [math.isnan(rank.late) for rank in found.ranks] == [False, False, True, True]
    assert found.step == 10 * SAMPLES + 1


def test_a_report_has_the_lateness_of_all_ranks_and_prometheus_has_it_once_in_a_job() -> None:
    found = history(same({1: {"backward": 25.0}}, ranks=2))
    first, second = (StepReport(Split(60, 10, 20, 0), 10.0, (), found.ranks, found.delays, rank) for rank in range(2))
    assert "rank 1 comes 25 ms late in backward, since step 11; costs 20 % of every step" in str(first)
    assert (first.scalars("")["late_ms"], first.scalars("")["network_ms"]) == (25, NETWORK)
    lines = first.prometheus({"rank": "0", "job": "a"}).splitlines()
    assert 'fastddp_late_seconds{rank="0",job="a"} 0.025' in lines
    assert 'fastddp_network_seconds{rank="0",job="a"} 0.004' in lines
    assert [line for line in lines if "rank_late" in line] == [
        "# TYPE fastddp_rank_late_seconds gauge",
        'fastddp_rank_late_seconds{rank="0",job="a"} 0',
        'fastddp_rank_late_seconds{rank="1",job="a"} 0.025',
    ]
    assert "rank_late" not in second.prometheus()
