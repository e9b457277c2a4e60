"""``comm_hooks.auto_hook`` in training: what is decided when, that ranks agree, and what a checkpoint keeps."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import AutoState
from fastddp.compression import auto
from fastddp.compression.choice import Cost
from fastddp.compression.costs import greatest_over
from fastddp.compression.plan import CompressionPlan
from fastddp.exchange.descriptions import AllReduce
from logs import lines_of_the_logger
from on_ranks import of_ranks, on_ranks
from ranks import RankPool

WINDOWS_UNTIL_PLAN = auto.SETTLED + auto.MEASURED  # plain ones
WINDOWS_UNTIL_VERDICT = WINDOWS_UNTIL_PLAN + 1 + auto.MEASURED
SLOW = {"plain": Cost(0.0, 1.0), "bf16": Cost(0.0, 0.5), "int8": Cost(0.0, 0.25), "fp8": Cost(0.0, 0.24)}
FAST = {name: Cost(0.0, 0.0) for name in SLOW}
WAVE = torch.sin(torch.arange(768.0)).view(32, 24)


class Pair(nn.Module):
    """Two matrices and a vector in a bucket each; the gradient of each is its input times a fixed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(32, 24))
        self.second = nn.Parameter(torch.zeros(32, 24))
        self.bias = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        return x * ((self.first * WAVE).sum() + (self.second * WAVE.square()).sum() + self.bias.sum())


@contextlib.contextmanager
def with_costs(costs: dict[str, Cost], *window_seconds: float) -> Iterator[list[list[str]]]:
    """Inside, these are what is measured; gives what was to be tried."""
    tried: list[list[str]] = []

    def measured(trials: dict[str, Any], agree: Callable[..., Any], largest: int) -> dict[str, Cost]:
        tried.append([*trials])
        return {name: costs[name] for name in trials}

    lengths = iter(window_seconds)
    put_in: dict[str, Any] = {"measure_costs": measured}
    if window_seconds:
        put_in["window_times"] = lambda reducer: [next(lengths)]
    with mock.patch.multiple(auto, **put_in):
        yield tried


def hooked(state: AutoState | None, two_levels: bool = False, **options: Any) -> fastddp.DistributedDataParallel:
    mesh = dist.init_device_mesh("cpu", (2, 2)) if two_levels else None
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0.0001, hierarchy=mesh, **options)
    model.register_comm_hook(state, comm_hooks.auto_hook)
    return model


def of_matrices(plan: CompressionPlan) -> set[str]:
    """What their buckets travel as; the vector's takes so short that anything is within the slack."""
    return {bucket.choice for bucket in plan.buckets if bucket.bytes > 1000}


def train(model: fastddp.DistributedDataParallel, windows: int, rank: int, begin: int = 0) -> list[list[Tensor]]:
    """The gradients of windows ``begin``, ``begin + 1``, ..."""
    seen = []
    for window in range(begin, begin + windows):
        model.zero_grad()
        model(torch.tensor(1.0 + rank + 0.1 * window)).backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
    return seen


def plans_of(model: fastddp.DistributedDataParallel, windows: int, rank: int) -> list[CompressionPlan | None]:
    """The plan in each window's backward."""
    plans = []
    for window in range(windows):
        train(model, 1, rank, window)
        plans.append(model.compression_plan())
    return plans


def slow_network(rank: int, two_levels: bool) -> tuple[Any, ...]:
    """Also of a copy of the model, which measures anew."""
    # Arithmetic may differ between machines, and ranks that chose differently would wait for ever: rank 0 chooses.
    with with_costs(SLOW if rank == 0 else FAST, 1.0, 0.5, 1.0, 0.5) as tried:
        model = hooked(AutoState(), two_levels)
        plans = plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank)
        return [*tried], plans, plans_of(copy.deepcopy(model), WINDOWS_UNTIL_PLAN + 1, rank), train(model, 1, rank)[0]


@pytest.mark.parametrize(("world_size", "two_levels"), [(2, False), (3, False), (4, True)])
def test_a_slow_network_compresses_within_the_budget(ranks: RankPool, world_size: int, two_levels: bool) -> None:
    for tried, plans, of_copy, gradients in ranks.run(slow_network, world_size, two_levels):
        assert tried == [["plain", "bf16", "int8"]], "once, and fp8 is beyond the default budget"
        assert plans[:WINDOWS_UNTIL_PLAN] == [None] * WINDOWS_UNTIL_PLAN
        plan, last = plans[WINDOWS_UNTIL_PLAN], plans[-1]
        assert of_matrices(plan) == {"int8"}
        assert plan.reason.startswith("Compressed: ")
        assert (plan.measured_plain_seconds, plan.measured_seconds, last.measured_seconds) == (1.0, None, 0.5)
        assert last.buckets == plan.buckets
        assert of_copy[:-1] == [None] * WINDOWS_UNTIL_PLAN
        assert of_copy[-1].compresses
        torch.testing.assert_close(gradients[2], torch.full((40,), (world_size + 1) / 2), rtol=0.02, atol=0)


@on_ranks(2)
def test_on_the_cpu_no_bucket_is_ready_before_the_last_one(rank: int) -> None:
    """Also an exchange that backward hides takes processors from it."""
    with with_costs(SLOW, 1.0, 0.5), mock.patch.object(auto, "choose", wraps=auto.choose) as choose:
        plans_of(hooked(AutoState()), WINDOWS_UNTIL_PLAN + 1, rank)
    (choice,) = choose.call_args_list
    assert len(choice.args[0]) > 1
    assert len({load.ready for load in choice.args[0]}) == 1


@on_ranks(2)
def test_what_counts_is_the_slowest_ranks_time(rank: int) -> None:
    assert greatest_over(dist.group.WORLD, torch.device("cpu"))([1.0 + rank, 5.0 - rank]) == [2.0, 5.0]


@on_ranks(2)
def test_a_fast_network_stays_plain(rank: int) -> None:
    with with_costs(FAST):
        model = hooked(AutoState())
        plans = plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank)
    assert not plans[-1].compresses
    assert plans[-1] == plans[WINDOWS_UNTIL_PLAN], "nothing is looked at again"
    assert "compression would gain less than 3 %" in plans[-1].reason
    assert model.engine.now.exchange == AllReduce()


@on_ranks(2)
def test_what_is_slower_after_all_goes_back_for_good(rank: int) -> None:
    with lines_of_the_logger(logging.INFO) as records, with_costs(SLOW, 1.0, 1.04 + 0.001 * rank):
        state = AutoState()
        model = hooked(state)
        plans = plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank)
        (gradients,) = train(model, 1, rank)
    assert plans[WINDOWS_UNTIL_VERDICT - 1].compresses
    assert not plans[-1].compresses
    assert "with compression steps took 1.04e+03 ms, and 1e+03 ms without" in plans[-1].reason
    assert {bucket.reason for bucket in plans[-1].buckets} == {"steps were slower with compression"}
    torch.testing.assert_close(gradients[0], 1.5 * WAVE)
    assert state.state_dict()["blocks"]["errors"] == {f"rank {rank}": {}}, "nothing is remembered any more"
    assert len(records) == (2 if rank == 0 else 0), "rank 0 says what was decided, and what became of it"


@on_ranks(2)
def test_noise_is_not_slower(rank: int) -> None:
    with with_costs(SLOW, 1.0, 1.02 + 0.001 * rank):
        assert plans_of(hooked(AutoState()), WINDOWS_UNTIL_VERDICT + 1, rank)[-1].compresses


def why_plain(rank: int, dtype: torch.dtype) -> str:
    model = fastddp.DistributedDataParallel(Pair().to(dtype))
    assert model.compression_plan() is None
    model.register_comm_hook(None, comm_hooks.auto_hook)
    return plans_of(model, WINDOWS_UNTIL_PLAN + 1, rank)[-1].reason


def test_where_there_is_nothing_to_decide_nothing_is_tried(ranks: RankPool) -> None:
    (alone,) = ranks.run(why_plain, 1, torch.float32)
    assert "a single rank" in alone
    for reason in ranks.run(why_plain, 2, torch.float64):
        assert "an error budget of 0.01 allows nothing that compresses float64" in reason


@pytest.mark.parametrize("two_levels", [False, True])
@on_ranks(4)
def test_measuring_leaves_ranks_alike(rank: int, two_levels: bool) -> None:
    """With nothing put in: the ranks' own times, whatever they are."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = hooked(AutoState(error_budget=1), two_levels)
    (*_, last) = train(model, WINDOWS_UNTIL_VERDICT + 2, rank)
    assert torch.equal(before, torch.get_rng_state()), "random numbers are the program's"
    plans, gradients = zip(*of_ranks((str(model.compression_plan()), last)), strict=True)
    assert len(set(plans)) == 1
    for of_rank in gradients:
        assert all(map(torch.equal, of_rank, last))


def errors_in(state: dict[str, Any], candidate: str, rank: int) -> dict[str, Tensor]:
    part = state["power_sgd"][candidate] if candidate == "powersgd4" else state["blocks"]
    return {name: error.clone() for name, error in part["errors"][f"rank {rank}"].items()}


@pytest.mark.parametrize("candidate", ["int8", "powersgd4"])
@on_ranks(2)
def test_a_checkpoint_keeps_what_was_left_out_until_it_is_used_again(rank: int, candidate: str) -> None:
    first, again = (AutoState(error_budget=1, candidates=[candidate]) for _ in range(2))
    with with_costs({"plain": Cost(0.0, 1.0), candidate: Cost(0.0, 0.1)}, 1.0, 0.5, 1.0, 0.5):
        train(hooked(first), WINDOWS_UNTIL_VERDICT + 2, rank)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        model = hooked(again)
        again.load_state_dict(torch.load(file, weights_only=True))
        train(model, WINDOWS_UNTIL_PLAN, rank)
        model(torch.tensor(1.0))  # which makes the plan
    saved, used = (errors_in(state.state_dict(), candidate, rank) for state in (first, again))
    assert {"first", "second"} <= saved.keys()
    assert saved.keys() == used.keys()
    assert any(bool(error.any()) for error in saved.values())
    assert all(torch.equal(saved[name], used[name]) for name in saved)


@pytest.mark.parametrize("options", [{"bucket_cap_mb": "auto"}, {"gradient_average": "sum"}], ids=str)
@on_ranks(2)
def test_where_it_cannot_decide_it_is_refused(rank: int, options: dict[str, Any]) -> None:
    model = fastddp.DistributedDataParallel(Pair(), **options)
    with pytest.raises(ValueError, match=r'bucket_cap_mb="auto"|PowerSGD keeps'):
        model.register_comm_hook(AutoState(error_budget=1), comm_hooks.auto_hook)
