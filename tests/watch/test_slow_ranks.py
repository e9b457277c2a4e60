"""Who is slow, in real steps: a rank that sleeps is named with what it sleeps in, and a slow link is no slow rank."""

from __future__ import annotations

import copy
import math
import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import PostLocalSGDState
from fastddp.rank_times import PHASES, Delay, RankTimes
from logs import lines_of_the_logger
from models import RaisesOnRank
from ranks import RankPool

SLOW = 1  # the rank that sleeps
NAP = 0.05


class Naps:
    """Sleeps where it is told to, on the slow rank."""

    def __init__(self, is_slow: bool) -> None:
        self.where = "nowhere"
        self.is_slow = is_slow

    def at(self, place: str) -> None:
        if self.is_slow and self.where == place:
            time.sleep(NAP)


class Layers(nn.Module):
    def __init__(self, naps: Naps) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("constant", torch.zeros(3))  # rank 0's are waited for
        self.naps = naps

    def forward(self, x: Tensor) -> Tensor:
        self.naps.at("forward")
        between = self.first(x)
        between.register_hook(lambda gradient: self.naps.at("backward"))
        return self.second(between)


class Sgd(torch.optim.SGD):
    def __init__(self, model: nn.Module, naps: Naps) -> None:
        super().__init__(model.parameters(), lr=1e-3)
        self.naps = naps

    def step(self, closure: Any = None) -> Any:
        self.naps.at("optimizer")
        return super().step(closure)


def averaging(naps: Naps) -> Callable[..., torch.futures.Future]:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        naps.at("hook")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

    return hook


class Training:
    def __init__(self, is_slow: bool, with_hook: bool = True, **options: Any) -> None:
        self.naps = Naps(is_slow)
        self.model = fastddp.DistributedDataParallel(Layers(self.naps), **options)
        if with_hook:
            self.model.register_comm_hook(None, averaging(self.naps))
        self.optimizer = Sgd(self.model, self.naps)

    def step(self, micro_batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for index in range(micro_batches):
            self.naps.at("outside")
            with self.model.no_sync() if index + 1 < micro_batches else nullcontext():
                loss = self.model(torch.ones(2, 8)).sum()
                self.naps.at("loss")
                loss.backward()
        self.optimizer.step()

    def ranks(self) -> tuple[RankTimes, ...]:
        report = self.model.step_report()
        return () if report is None else report.ranks


def least_times(rank: int, micro_batches: int, bucket_cap_mb: float | None) -> list[tuple[str, list[dict[str, float]]]]:
    """By where the slow rank sleeps: of each rank the least own time of some steps, by phase."""
    training = Training(rank == 0, bucket_cap_mb=bucket_cap_mb)
    training.step()
    training.model.sample_steps(1, compare_ranks=True)
    found = []
    for place in PHASES:
        training.naps.where = place
        seen = []
        for _ in range(6):
            training.step(micro_batches)
            seen.append(list(training.ranks()))
        by_rank = zip(*seen[2:], strict=True)
        least = [{phase: min(getattr(of, phase) for of in times) for phase in PHASES} for times in by_rank]
        found.append((place, least))
    return found


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize(("micro_batches", "bucket_cap_mb"), [(1, 1e-6), (3, None)], ids=["buckets", "accumulating"])
def test_own_times_are_those_of_the_phase_in_which_a_rank_sleeps(
    ranks: RankPool, micro_batches: int, bucket_cap_mb: float | None
) -> None:
    for found in ranks.run(least_times, 2, micro_batches, bucket_cap_mb):
        assert [place for place, _ in found] == list(PHASES)
        for place, (slow, quick) in found:
            assert max(slow, key=slow.__getitem__) == place
            assert slow[place] > 1.5 * sum(quick.values())  # none of which is a wait for the slow one


Verdict = tuple[list[str], tuple[Delay, ...]]


def until(training: Training, is_said: Callable[[], bool], most: int = 100) -> None:
    """Steps of all ranks, until rank 0 has said so."""
    for _ in range(most):
        training.step()
        said = torch.tensor([float(is_said())])
        dist.broadcast(said, 0)
        if said.item():
            return


def verdicts(rank: int, place: str) -> tuple[Verdict, Verdict]:
    """While a rank sleeps, and when it does not any more."""
    training = Training(rank == SLOW, with_hook=place == "hook")
    training.naps.where = place
    training.model.sample_steps(1, compare_ranks=True)
    with lines_of_the_logger() as lines:
        until(training, lambda: any("rank 1 comes" in line for line in lines))
        training.step()  # and ranks that were not the first to know
        slow = (list(lines), training.model.step_report().delays)
        training.naps.where = "nowhere"
        lines.clear()
        until(training, lambda: any("in time again" in line for line in lines))
        training.step()
        return slow, (list(lines), training.model.step_report().delays)


WORDS = {"forward": "in forward", "outside": "outside of its steps", "hook": "in its communication hook"}


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("place", WORDS)
def test_rank_0_says_who_is_slow_once_and_when_that_is_over(ranks: RankPool, place: str) -> None:
    first, *others = ranks.run(verdicts, 3, place)
    for (_, delays), (_, later) in (first, *others):
        assert [(delay.rank, delay.cause) for delay in delays if delay.rank is not None] == [(SLOW, place)]
        assert SLOW not in [delay.rank for delay in later]
    (said, _), (said_later, _) = first
    (line,) = (line for line in said if "rank" in line and "no rank" not in line)
    assert re.match(rf"rank 1 comes [\d.,]+ ms late {WORDS[place]}.*, since step \d+", line)
    (line,) = (line for line in said_later if "rank 1" in line)
    assert line.startswith("rank 1 comes in time again")
    assert all(lines == [] for verdict in others for lines, _ in verdict)


def over_a_slow_link(state: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean; what rank `state` sends is long on its way."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()

    def send() -> None:
        if dist.get_rank() == state:
            time.sleep(NAP)
        dist.all_reduce(bucket.buffer())
        done.set_result(bucket.buffer() / dist.get_world_size())

    threading.Thread(target=send).start()
    return done


def slow_link(rank: int) -> Verdict:
    training = Training(is_slow=False, with_hook=False)
    training.model.register_comm_hook(2, over_a_slow_link)
    training.model.sample_steps(1, compare_ranks=True)
    with lines_of_the_logger() as lines:
        until(training, lambda: any("network" in line for line in lines))
        training.step()
        return list(lines), training.model.step_report().delays


@pytest.mark.tier("nightly")
def test_a_slow_link_is_said_to_be_one(ranks: RankPool) -> None:
    (lines, delays), *_ = ranks.run(slow_link, 3)
    (delay,) = delays
    assert (delay.rank, delay.cause) == (None, "network")
    assert delay.share > 0.5
    assert [line for line in lines if "no rank is slow" in line]
    assert not [line for line in lines if "comes" in line]


# ------------------------------------------------------------------------------------------------- what is started


def collectives(rank: int, every: int, compare: bool) -> list[int]:
    """Of each step."""
    training = Training(is_slow=False, with_hook=False)
    group: Any = training.model.process_group  # torch does not declare what counts its collectives
    training.step()
    training.step()  # buckets are rebuilt
    training.model.sample_steps(every, compare_ranks=compare)
    counts = []
    for _ in range(8):
        before = group._get_sequence_number_for_group()
        training.step()
        counts.append(group._get_sequence_number_for_group() - before)
    return counts


@pytest.mark.parametrize(("every", "compare"), [(0, True), (3, False), (3, True), (1, True)])
def test_a_sample_takes_one_collective_and_other_steps_none(ranks: RankPool, every: int, compare: bool) -> None:
    usual = 3  # buffers, one bucket, and the status
    # In the step behind the sampled one.
    more = {(3, True): [0, 1, 0, 0, 1, 0, 0, 1], (1, True): [0] + [1] * 7}.get((every, compare), [0] * 8)
    for counts in ranks.run(collectives, 2, every, compare):
        assert counts == [usual + count for count in more]


def alone(rank: int) -> tuple[RankTimes, ...]:
    training = Training(is_slow=False, with_hook=False)
    return some_ranks(training.model, training.step)


def test_one_rank_compares_nothing(ranks: RankPool) -> None:
    assert ranks.run(alone, 1) == [()]
    assert ranks.run(collectives, 1, 1, True) == ranks.run(collectives, 1, 1, False)


# ------------------------------------------------------------------------------------- with whatever else there is


def some_ranks(
    model: fastddp.DistributedDataParallel, steps: Callable[[], None], every: int = 2
) -> tuple[RankTimes, ...]:
    model.sample_steps(every, compare_ranks=True)
    for _ in range(12):
        steps()
    report = model.step_report()
    return () if report is None else report.ranks


def plain_step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()


def in_company(rank: int, what: str) -> tuple[RankTimes, ...]:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    if what == "subgroup":
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = fastddp.DistributedDataParallel(module, process_group=pairs[rank // 2])
    elif what == "weights":
        model = fastddp.DistributedDataParallel(module, gradient_average=lambda: 1.0 + rank)
    elif what == "audit":
        model = fastddp.DistributedDataParallel(module, audit_every=3)
    elif what == "compiled":
        model = fastddp.DistributedDataParallel(torch.compile(module, backend="eager"))
    elif what == "copied":
        original = fastddp.DistributedDataParallel(module)
        original.sample_steps(1, compare_ranks=True)
        model = copy.deepcopy(original)
    else:
        model = fastddp.DistributedDataParallel(module)
    if what == "noop":
        model.register_comm_hook(None, comm_hooks.noop_hook)
    if what == "local":
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        state = PostLocalSGDState(process_group=None, subgroup=pair, start_localSGD_iter=3)
        model.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    if what == "two wrappers":
        other = fastddp.DistributedDataParallel(nn.Linear(8, 8))
        other.sample_steps(3, compare_ranks=True)

        def both() -> None:
            plain_step(model)
            plain_step(other)

        found = some_ranks(model, both)
        assert len(other.step_report().ranks) == dist.get_world_size()
        return found
    found = some_ranks(model, lambda: plain_step(model))
    dist.barrier()
    return found


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize(
    "what", ["subgroup", "two wrappers", "weights", "audit", "compiled", "copied", "noop", "local"]
)
def test_ranks_are_compared_in_company(ranks: RankPool, what: str) -> None:
    for found in ranks.run(in_company, 4, what):
        assert [rank.rank for rank in found] == list(range(2 if what == "subgroup" else 4))
        assert all(rank.forward > 0 and rank.backward > 0 for rank in found)


class SecondOnly(Layers):
    """Uses its first layer in every second forward only."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.second(self.first(x) if self.forwards % 2 else x)


def two_windows_a_forward(rank: int, every: int) -> tuple[RankTimes, ...]:
    """A backward each for two losses."""
    model = fastddp.DistributedDataParallel(SecondOnly(Naps(is_slow=False)), find_unused_parameters=True)

    def step() -> None:
        model.zero_grad()
        out = model(torch.ones(2, 8))
        out[0].sum().backward(retain_graph=True)
        out[1].sum().backward()

    return some_ranks(model, step, every)


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_may_have_several_windows(ranks: RankPool, every: int) -> None:
    for found in ranks.run(two_windows_a_forward, 2, every):
        assert [math.isnan(rank.late) for rank in found] == [False, False]


def with_uneven_inputs(rank: int) -> tuple[RankTimes, ...]:
    model = fastddp.DistributedDataParallel(nn.Linear(8, 8))
    model.sample_steps(2, compare_ranks=True)
    with model.join():
        for _ in range(4 if rank == 0 else 12):
            plain_step(model)
    during = model.step_report().ranks
    for _ in range(6):
        plain_step(model)
    after = model.step_report().ranks
    assert [math.isnan(one.late) for one in after] == [False] * 3
    return during


def test_a_rank_without_inputs_has_no_times(ranks: RankPool) -> None:
    for found in ranks.run(with_uneven_inputs, 3):
        assert [math.isnan(rank.late) for rank in found] == [True, False, False]


class Raises(Layers):
    raises = False

    def forward(self, x: Tensor) -> Tensor:
        return RaisesOnRank.apply(super().forward(x), self.raises)


def with_a_backward_that_raises(rank: int) -> tuple[RankTimes, ...]:
    model = fastddp.DistributedDataParallel(Raises(Naps(is_slow=False)))
    model.sample_steps(1, compare_ranks=True)
    for step in range(12):
        model.module.raises = step == 4 and rank == 1
        try:
            plain_step(model)
        except (RuntimeError, ValueError):
            assert step == 4
    return model.step_report().ranks


def test_after_a_backward_that_raises_ranks_are_compared_again(ranks: RankPool) -> None:
    for found in ranks.run(with_a_backward_that_raises, 2):
        assert [math.isnan(rank.late) for rank in found] == [False, False]
