"""Who is slow, in real steps: a rank that sleeps is named with what it sleeps in, and a slow link is no slow rank."""

from __future__ import annotations

import math
import re
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp.times.rank_times import PHASES, Delay
from fastddp.watch.gathering import Gathering
from logs import lines_of_the_logger
from models import RaisesInBackward
from on_ranks import on_ranks
from ranks import RankPool

SLOW = 1  # the rank that sleeps
NAP = 0.05


class Layers(nn.Module):
    """Naps where it is told to, on the slow rank."""

    def __init__(self, is_slow: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("constant", torch.zeros(3))  # rank 0's are waited for
        self.where, self.is_slow = "nowhere", is_slow

    def nap(self, place: str) -> None:
        if self.is_slow and self.where == place:
            time.sleep(NAP)

    def forward(self, x: Tensor) -> Tensor:
        self.nap("forward")
        between = self.first(x)
        between.register_hook(lambda gradient: self.nap("backward"))
        return self.second(between)

    def mean(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook."""
        self.nap("hook")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


class Training:
    def __init__(self, is_slow: bool, with_hook: bool = True, **options: Any) -> None:
        self.module = Layers(is_slow)
        self.model = fastddp.DistributedDataParallel(self.module, **options)
        if with_hook:
            self.model.register_comm_hook(None, self.module.mean)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer.register_step_pre_hook(lambda *_: self.module.nap("optimizer"))

    def step(self, micro_batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for index in range(micro_batches):
            self.module.nap("outside")
            with self.model.no_sync() if index + 1 < micro_batches else nullcontext():
                loss = self.model(torch.ones(2, 8)).sum()
                self.module.nap("loss")
                loss.backward()
        self.optimizer.step()


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize(("micro_batches", "bucket_cap_mb"), [(1, 1e-6), (3, None)], ids=["buckets", "accumulating"])
@on_ranks(2)
def test_own_times_are_those_of_the_phase_in_which_a_rank_sleeps(
    rank: int, micro_batches: int, bucket_cap_mb: float | None
) -> None:
    """The least of some steps."""
    training = Training(rank == 0, bucket_cap_mb=bucket_cap_mb)
    training.step()
    training.model.sample_steps(1, compare_ranks=True)
    for place in PHASES:
        training.module.where = place
        seen = []
        for _ in range(6):
            training.step(micro_batches)
            report = training.model.step_report()
            seen.append(report.ranks if report else ())
        by_rank = zip(*seen[2:], strict=True)
        slow, quick = ({phase: min(getattr(of, phase) for of in times) for phase in PHASES} for times in by_rank)
        assert max(slow, key=slow.__getitem__) == place
        assert slow[place] > 1.5 * sum(quick.values())  # none of which is a wait for the slow one


Verdict = tuple[list[str], tuple[Delay, ...]]


def verdicts(rank: int, place: str) -> list[Verdict]:
    """While a rank is slow, and when it is not any more."""
    training = Training(rank == SLOW, with_hook=place == "hook")
    training.model.sample_steps(1, compare_ranks=True)
    found = []
    for where, words in ((place, WORDS[place]), ("nowhere", IN_TIME)):
        training.module.where = where
        with lines_of_the_logger() as lines:
            for _ in range(100):  # until rank 0 has said so
                training.step()
                said = torch.tensor([float(any(re.match(words, line) for line in lines))])
                dist.broadcast(said, 0)
                if said.item():
                    break
            training.step()  # and ranks that were not the first to know
        found.append((lines, training.model.step_report().delays))
    return found


WORDS = {
    "forward": r"rank 1 comes [\d.,]+ ms late in forward.*, since step \d+",
    "outside": r"rank 1 comes [\d.,]+ ms late outside of its steps.*, since step \d+",
    "hook": r"rank 1 comes [\d.,]+ ms late in its communication hook",
}
IN_TIME = "rank 1 comes in time again"


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("place", WORDS)
def test_rank_0_says_who_is_slow_once_and_when_that_is_over(ranks: RankPool, place: str) -> None:
    first, *others = ranks.run(verdicts, 3, place)
    for (_, delays), (_, later) in (first, *others):
        assert (SLOW, place) in [(delay.rank, delay.cause) for delay in delays]
        assert {delay.rank for delay in delays} <= {None, SLOW}
        assert SLOW not in [delay.rank for delay in later]
    for (lines, _), words in zip(first, (WORDS[place], IN_TIME), strict=True):
        # Lines about the network may come before or after it.
        (line,) = (line for line in lines if "rank 1" in line)
        assert re.match(words, line)
    assert all(lines == [] for verdict in others for lines, _ in verdict)


@pytest.mark.parametrize(
    ("every", "compare", "more"),
    [
        (0, True, [0] * 8),
        (3, False, [0] * 8),
        (3, True, [0, 1, 0, 0, 1, 0, 0, 1]),  # in the step after the sampled one
        (1, True, [0] + [1] * 7),
    ],
)
@on_ranks(2)
def test_a_sample_takes_one_collective_and_other_steps_none(
    rank: int, every: int, compare: bool, more: list[int]
) -> None:
    training = Training(is_slow=False, with_hook=False)
    group: Any = training.model.process_group  # torch does not declare what counts its collectives
    training.step()
    training.step()  # buckets are rebuilt
    training.model.sample_steps(every, compare_ranks=compare)
    counts = [group._get_sequence_number_for_group()]
    for _ in range(8):
        training.step()
        counts.append(group._get_sequence_number_for_group())
    usual = 2  # buffers, and one bucket with the status
    assert [after - before - usual for before, after in pairwise(counts)] == more


@on_ranks(1)
def test_one_rank_compares_nothing(rank: int) -> None:
    training = Training(is_slow=False, with_hook=False)
    training.model.sample_steps(1, compare_ranks=True)
    for _ in range(3):
        training.step()
    assert training.model.step_report().ranks == ()


def plain_step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()


class Eventful(Layers):
    """May leave out its first layer in every second forward, and raise in backward."""

    forwards, skips, raises = 0, False, False

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        out = self.second(x) if self.skips and self.forwards % 2 == 0 else super().forward(x)
        return RaisesInBackward.apply(out) if self.raises else out


@pytest.mark.parametrize(
    ("what", "every"),
    [("two windows a forward", 1), ("two windows a forward", 3), ("a backward that raises", 1), ("join", 2)],
)
@on_ranks(3)
def test_ranks_are_compared_where_they_have_times(rank: int, what: str, every: int) -> None:
    model = fastddp.DistributedDataParallel(Eventful(), find_unused_parameters=what == "two windows a forward")
    model.module.skips = what == "two windows a forward"
    model.sample_steps(every, compare_ranks=True)
    if what == "join":
        with model.join():
            for _ in range(4 if rank == 0 else 12):
                plain_step(model)
        assert [math.isnan(one.late) for one in model.step_report().ranks] == [True, False, False]
    for step in range(12):
        model.module.raises = what == "a backward that raises" and step == 4 and rank == 1
        model.zero_grad()
        out = model(torch.ones(2, 8))
        try:
            if model.module.skips:
                out[0].sum().backward(retain_graph=True)
            out[1].sum().backward()
        except (RuntimeError, ArithmeticError):
            assert step == 4
    assert [math.isnan(one.late) for one in model.step_report().ranks] == [False] * 3


@on_ranks(2)
def test_a_collective_that_nobody_waits_for_is_no_event_of_a_profiler(rank: int) -> None:
    """A profiler that stops frees its events, and gloo writes into that of a collective when it ends."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        gathering = Gathering(torch.tensor([float(rank)]), dist.group.WORLD)
        dist.all_reduce(torch.zeros(1))
    assert gathering.has_arrived(None)
    assert gathering.rows().tolist() == [[0.0], [1.0]]
    names = {event.name for event in recorded.events()}
    assert "gloo:all_reduce" in names
    assert "gloo:all_gather" not in names
