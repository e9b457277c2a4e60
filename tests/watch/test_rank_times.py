"""Who is slow: the rule, on made-up samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fastddp.rank_times import PHASES, SAMPLES, Delay, RankHistory, changes, row
from fastddp.step_report import StepReport
from fastddp.trace.report import Split

OWN = {"outside": 20.0, "forward": 20.0, "loss": 2.0, "backward": 40.0, "hook": 3.0, "optimizer": 5.0}
STEP = 100.0
NETWORK = 4.0


def rows(window: int, more: dict[int, dict[str, float]], ranks: int = 4, network: float = NETWORK) -> Tensor:
    """A step in which some ranks take more ms in some phases, and the others wait for the last one."""
    own = [{phase: OWN[phase] + more.get(rank, {}).get(phase, 0.0) for phase in PHASES} for rank in range(ranks)]
    last = max(sum(times.values()) for times in own)
    said = [row(window, STEP + last - 90.0, network + last - sum(times.values()), times) for times in own]
    return torch.tensor(said, dtype=torch.float64)


def history(samples: Sequence[Tensor]) -> RankHistory:
    found = RankHistory()
    for sample in samples:
        found.add(sample)
    return found


def same(
    more: dict[int, dict[str, float]], ranks: int = 4, count: int = SAMPLES, network: float = NETWORK
) -> list[Tensor]:
    """From step 11 on, every tenth."""
    return [rows(10 * (1 + index), more, ranks, network) for index in range(count)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_a_rank_that_is_slow_in_a_phase_is_named_with_it(phase: str, ranks: int) -> None:
    samples = same({1: {phase: 25.0}}, ranks)
    assert history(samples[:-1]).delays == ()
    (delay,) = history(samples).delays
    assert (delay.rank, delay.cause, delay.since) == (1, phase, 11)
    assert delay.ms == delay.in_cause == pytest.approx(25)
    assert delay.share == pytest.approx(25 / 125)


@pytest.mark.parametrize(
    ("more", "slow"),
    [
        ({}, []),
        ({0: {"forward": 20.0}, 3: {"forward": 20.0}}, [0, 3]),  # of four two may be slow
        ({rank: {"forward": 20.0} for rank in (0, 1, 2)}, []),  # and most are not
        ({1: {"forward": 30.0, "backward": -30.0}}, []),  # what it saves elsewhere in its own work counts
        # Others wait in code of the user: all reduce the loss before backward.
        ({1: {"forward": 50.0}, **{rank: {"loss": 50.0} for rank in (0, 2, 3)}}, [1]),
    ],
)
def test_who_is_slow(more: dict[int, dict[str, float]], slow: list[int]) -> None:
    assert [delay.rank for delay in history(same(more)).delays] == slow


@pytest.mark.parametrize("kind", ["other amounts", "network now and then", "one late", "fast network"])
def test_what_is_no_verdict(kind: str) -> None:
    samples = same({}, network=9.0 if kind == "fast network" else 40.0 if kind == "network now and then" else NETWORK)
    if kind == "other amounts":
        samples = [rows(10 * (1 + index), {2: {"outside": 6.0 + 60 * (index % 2)}}) for index in range(SAMPLES)]
    elif kind == "network now and then":
        samples[4] = rows(50, {}, network=5.0)
    elif kind == "one late":  # each sample counts once
        late = same({1: {"forward": 30.0}})
        samples = [*late[:-1], *late[-3:-1]]
    assert history(samples).delays == ()


def test_a_pause_is_no_verdict() -> None:
    samples = same({}, count=40)
    for index in (7, *range(14, 25), 30):
        samples[index] = rows(10 * (1 + index), {2: {"outside": 3000.0}})
    found = RankHistory()
    for sample in samples:
        found.add(sample)
        assert found.delays == ()


@pytest.mark.parametrize(
    ("ms", "step", "is_late"), [(4.0, 100, False), (6.0, 100, True), (0.9, 5, False), (1.1, 5, True)]
)
def test_little_is_no_verdict(ms: float, step: float, is_late: bool) -> None:
    samples = same({0: {"forward": ms}})
    for sample in samples:
        sample[:, 1] = step
        sample[:, 2] = 0.0
    assert bool(history(samples).delays) == is_late


def test_a_verdict_ends_when_most_of_the_last_samples_are_in_time() -> None:
    found = history(same({3: {"backward": 30.0}}))
    seen = []
    for window in range(200, 270, 10):
        found.add(rows(window, {}))
        seen.append([delay.since for delay in found.delays])
    assert seen == [[11]] * 5 + [[]] * 2


def test_a_verdict_that_fades_keeps_its_cause() -> None:
    found = history(same({3: {"hook": 30.0, "outside": 5.0}}))
    for window in range(200, 270, 10):
        found.add(rows(window, {3: {"outside": 4.0}}))
    (delay,) = found.delays
    assert delay.cause == "hook"
    assert delay.ms == pytest.approx(4)
    assert delay.in_cause == pytest.approx(0)


def test_a_verdict_holds_while_the_rank_is_late_by_half() -> None:
    found = history(same({3: {"backward": 30.0}}))
    for window in range(200, 400, 10):
        found.add(rows(window, {3: {"backward": 3.0}}))
    assert [delay.rank for delay in found.delays] == [3]
    for window in range(400, 600, 10):
        found.add(rows(window, {3: {"backward": 2.0}}))
    assert found.delays == ()


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", ["normal", "outliers", "one noisy rank"])
def test_noise_is_no_verdict(ranks: int, kind: str) -> None:
    torch.manual_seed(ranks)
    found = RankHistory()
    for window in range(400):
        noise = 10 * torch.randn(ranks, len(PHASES), dtype=torch.float64)
        if kind == "outliers":
            noise = noise.exp().clamp(max=500) / 10
        if kind == "one noisy rank":
            noise[1:] /= 20
        sample = rows(window, {}, ranks)
        sample[:, 3:] = (sample[:, 3:] + noise).clamp(min=0)
        found.add(sample)
        assert [delay for delay in found.delays if delay.rank is not None] == []


def test_where_the_others_vary_more_than_a_rank_is_late_there_is_no_verdict() -> None:
    found = RankHistory()
    for index in range(SAMPLES):
        sign = 1 - 2 * (index % 2)
        more = {rank: {"forward": sign * (15.0 if rank % 2 else -15.0)} for rank in range(1, 7)}
        found.add(rows(index, {0: {"forward": 8.0}, **more}, ranks=8))
    assert found.delays == ()


def test_a_slow_rank_is_seen_through_noise() -> None:
    torch.manual_seed(0)
    found = RankHistory()
    for window in range(SAMPLES):
        sample = rows(window, {5: {"backward": 40.0}}, 8)
        sample[:, 3:] += 2 * torch.randn(8, len(PHASES), dtype=torch.float64)
        found.add(sample)
    assert [(delay.rank, delay.cause) for delay in found.delays] == [(5, "backward")]


def test_a_pause_hides_no_slow_rank() -> None:
    samples = same({1: {"backward": 25.0}})
    samples[4] = rows(50, {1: {"backward": 900.0}})
    assert [delay.rank for delay in history(samples).delays] == [1]


def test_the_network_s_verdict_holds_while_it_takes_half() -> None:
    found = history(same({}, network=40.0))
    for network, since in ((6.0, [11]), (4.0, [])):
        for window in range(found.step + 9, found.step + 9 + 10 * SAMPLES, 10):
            found.add(rows(window, {}, network=network))
        assert [delay.since for delay in found.delays] == since


def test_two_slow_ranks_are_both_named() -> None:
    found = history(same({0: {"outside": 20.0}, 3: {"backward": 30.0}, 2: {"forward": 2.0}}, ranks=6))
    assert [(delay.rank, delay.cause) for delay in found.delays] == [(0, "outside"), (3, "backward")]
    # Without it the step would last as long as on rank 2, which is not slow.
    assert [delay.share for delay in found.delays] == pytest.approx([18 / 130, 28 / 130])


def test_a_second_slow_rank_begins_a_verdict_of_its_own() -> None:
    found = history(same({3: {"backward": 30.0}}))
    before = found.delays
    for window in range(200, 200 + 10 * SAMPLES, 10):
        found.add(rows(window, {3: {"backward": 30.0}, 1: {"forward": 30.0}}))
    begun, over = changes(before, found.delays)
    assert [(delay.rank, delay.since) for delay in begun] == [(1, 201)]
    assert over == []
    assert [(delay.rank, delay.since) for delay in found.delays] == [(1, 201), (3, 11)]


def test_a_slow_link_is_no_slow_rank() -> None:
    (delay,) = history(same({}, network=40.0)).delays
    assert (delay.rank, delay.cause, delay.since) == (None, "network", 11)
    assert delay.ms == pytest.approx(40)
    assert delay.share == pytest.approx(0.4)


def test_where_a_rank_is_slow_the_others_wait_and_the_network_is_not_blamed() -> None:
    samples = same({2: {"forward": 50.0}})
    assert samples[0][0, 2] > 0.3 * STEP  # exposed on rank 0
    assert [delay.rank for delay in history(samples).delays] == [2]


def test_the_network_takes_over_when_the_slow_rank_is_gone() -> None:
    found = history(same({2: {"forward": 50.0}}, network=40.0))
    for window in range(200, 200 + 10 * SAMPLES, 10):
        found.add(rows(window, {}, network=40.0))
    assert [delay.rank for delay in found.delays] == [None]


def test_late_in_two_phases() -> None:
    (delay,) = history(same({1: {"forward": 20.0, "backward": 30.0}})).delays
    assert delay.cause == "backward"
    assert (delay.ms, delay.in_cause) == pytest.approx((50, 30))
    assert str(delay) == ("rank 1 comes 50 ms late (30 of them in backward), since step 11; costs 33 % of every step")


def test_a_rank_without_times_is_left_out() -> None:
    """It has run out of inputs, or its device lags behind; or it sampled another step."""
    samples = same({1: {"forward": 30.0}})
    for index, sample in enumerate(samples):
        sample[3] = math.nan
        sample[2, 0] -= index % 2
    found = history(samples)
    assert [delay.rank for delay in found.delays] == [1]
    assert [math.isnan(rank.late) for rank in found.ranks] == [False, False, True, True]
    nothing = torch.full_like(samples[0], math.nan)
    found.add(nothing)
    assert [delay.rank for delay in found.delays] == [1]
    assert found.step == 10 * SAMPLES + 1


def test_one_rank_has_nobody_to_be_compared_with() -> None:
    found = history(same({0: {"forward": 30.0}}, ranks=1))
    assert not found.delays
    assert not found.ranks


def test_ranks_are_told_as_they_were_in_the_last_sample() -> None:
    found = history([rows(7, {1: {"hook": 12.0}}, ranks=3)])
    assert found.step == 8
    assert [rank.rank for rank in found.ranks] == [0, 1, 2]
    assert [rank.late for rank in found.ranks] == [0, 12, 0]
    assert [rank.exposed for rank in found.ranks] == [16, 4, 16]
    slow = found.ranks[1]
    assert {phase: getattr(slow, phase) for phase in PHASES} == {**OWN, "hook": 15}


def test_a_verdict_is_a_sentence() -> None:
    delay = Delay(3, "hook", 212.3, 212.0, 0.0912, 410)
    assert str(delay) == "rank 3 comes 212 ms late in its communication hook, since step 410; costs 9 % of every step"
    assert "rank 3 comes in time again, at step 900: it was late in its communication" in delay.over(900)
    assert "12,346 ms late in forward" in str(Delay(0, "forward", 12345.6, 12345.6, 0.5, 1))
    network = Delay(None, "network", 88.1, 88.1, 0.351, 12)
    assert str(network) == "no rank is slow: 88.1 ms, 35 % of every step, go to the network, since step 12"
    assert "the network takes less again, at step 99" in network.over(99)


def report(rank: int) -> StepReport:
    found = history(same({1: {"backward": 25.0}}, ranks=2))
    return StepReport(Split(60, 10, 20, 0), 10.0, (), found.ranks, found.delays, rank)


def test_a_report_has_the_lateness_of_all_ranks() -> None:
    found = report(0)
    assert str(found).endswith(
        "outside 10.0; rank 1 comes 25 ms late in backward, since step 11; costs 20 % of every step"
    )
    assert found.scalars("")["late_ms"] == 25
    assert found.scalars("")["network_ms"] == NETWORK


def test_prometheus_has_a_gauge_for_each_rank_once_in_a_job() -> None:
    lines = report(0).prometheus({"rank": "0", "job": "a"}).splitlines()
    assert 'fastddp_late_seconds{rank="0",job="a"} 0.025' in lines
    assert 'fastddp_network_seconds{rank="0",job="a"} 0.004' in lines
    assert [line for line in lines if "rank_late" in line] == [
        "# TYPE fastddp_rank_late_seconds gauge",
        'fastddp_rank_late_seconds{rank="0",job="a"} 0',
        'fastddp_rank_late_seconds{rank="1",job="a"} 0.025',
    ]
    assert "rank_late" not in report(1).prometheus()
