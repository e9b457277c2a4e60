"""``bucket_cap_mb="auto"``: the plan that is made after the first steps, on all ranks, and what it is made from."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fake_cuda
import fastddp
from fastddp import comm_hooks
from fastddp.planning.link import largest_bucket
from fastddp.planning.model import Gradient, Link, best_plan
from hooks_by_name import averages
from on_ranks import of_ranks, on_ranks
from parts import Parts, gradients
from ranks import RankPool

STEPS = 4  # after which the first plan is made, at the next forward
BETWEEN = 3  # from there to the second
SLOW_NETWORK = Link(latency=1e-9, bandwidth=1e3)


class Layers(nn.Module):
    """Parameters of 4 KiB whose gradients come one by one, from the last to the first."""

    def __init__(self, layers: int = 6, pause: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((1024,), 1.0 + i)) for i in range(layers)])
        self.pause = pause
        self.fails = False  # its next backward, halfway

    def forward(self, x: float) -> Tensor:
        y = torch.full((1024,), x)
        for number, weight in enumerate(self.weights):
            y = y * weight
            y.register_hook(lambda gradient: time.sleep(self.pause))
            if self.fails and number == len(self.weights) // 2:
                y.register_hook(lambda gradient: 1 / 0)
        return y.sum()


class Sum(nn.Module):
    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self) -> Tensor:
        return sum(value.sum().float() for value in self.values)


def auto(module: nn.Module, **options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(module, bucket_cap_mb="auto", **options)


def train(model: nn.Module, steps: int, *inputs: Any) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(*inputs).sum().backward()


@contextmanager
def a_network_of(*links: Link) -> Iterator[mock.Mock]:
    """By the number of lanes, from one on."""

    def measured(lanes: Sequence[object], *rest: object) -> Link:
        return links[len(lanes) - 1]

    with mock.patch("fastddp.planning.planner.measure_link", side_effect=measured) as measure:
        yield measure


@contextmanager
def what_is_planned() -> Iterator[list[tuple[list[Gradient], Link]]]:
    """What each search is given."""
    given = []

    def searched(gradients: list[Gradient], link: Link, largest: float) -> list[list[int]]:
        given.append((gradients, link))
        return best_plan(gradients, link, largest)

    with mock.patch("fastddp.planning.planner.best_plan", searched):
        yield given


def sizes(model: fastddp.DistributedDataParallel) -> list[int]:
    return [len(bucket.parameters) for bucket in model.bucket_plan().buckets]


# ------------------------------------------------------------------------------------------------------------- the plan


@on_ranks(2)
def test_after_four_steps_all_ranks_have_the_best_plan_for_what_was_measured(rank: int, tmp_path: Path) -> None:
    with a_network_of(Link(latency=1e-3, bandwidth=1e6)), what_is_planned() as given:
        model = auto(Layers(pause=0.002 + 0.01 * rank))
        for _ in range(STEPS):
            assert sizes(model) == [6]
            train(model, 1, 1.0)
        assert len(model.reducer.ready_times()) == STEPS - 1  # all windows but the first
        train(model, 1, 1.0)
    path = tmp_path / f"{rank}.json"
    ((measured, link),) = given
    names = [f"weights.{number}" for number in reversed(range(6))]  # as in the first plan
    best = best_plan(measured, link, largest_bucket(link, torch.device("cpu")))
    plan = model.bucket_plan()
    assert [[p.name for p in bucket.parameters] for bucket in plan.buckets] == [[names[i] for i in b] for b in best]
    plan.save(path)
    assert fastddp.DistributedDataParallel(Layers(), buckets=path).bucket_plan() == plan
    ready = [gradient.ready for gradient in measured]
    for earlier, later in itertools.pairwise(ready):
        assert later - earlier >= 0.012  # the slower rank's
    assert len(set(of_ranks((str(plan), str(ready))))) == 1


@pytest.mark.tier("nightly")
@on_ranks(2)
def test_a_second_plan_is_made_of_what_the_first_one_shows(rank: int) -> None:
    with a_network_of(Link(latency=0.05, bandwidth=1e12)) as measure:
        model = auto(Layers(pause=0.0))
        train(model, STEPS + 1, 1.0)
        assert sizes(model) == [6]
        model.module.pause = 0.1  # as if what travels under backward slowed it down
        train(model, 2 * BETWEEN, 1.0)
    assert not model.engine.planner.is_due(model.reducer)
    assert model.reducer.ready_times() == []
    # The windows that were measured: one whose gradients came at once, two that paused before each.
    assert (sizes(model), measure.call_count) == ([5, 1], 1)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("view", [True, False])
@on_ranks(2)
def test_gradients_are_the_mean_before_and_after_the_plan(rank: int, view: bool, set_to_none: bool) -> None:
    with a_network_of(SLOW_NETWORK):
        model = auto(Layers(), gradient_as_bucket_view=view)
        for step in range(STEPS + 2):
            assert sizes(model) == ([1, 5] if step > STEPS else [6])
            model.zero_grad(set_to_none)
            model(1.0 + rank + step).backward()
            alone = Layers()
            ((alone(1.0 + step) + alone(2.0 + step)) / 2).backward()
            for parameter, of_mean in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, of_mean.grad)


# ---------------------------------------------------------------------------------------------------- what was measured


@on_ranks(2)
def test_times_are_of_windows_and_from_their_first_forward_on(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Layers(layers=3, pause=0.01))
    train(model, 2, 1.0)
    assert model.reducer.ready_times() == []  # nobody has asked for them
    model.reducer.record_ready_times(True)
    with model.no_sync():
        train(model, 1, 1.0)  # no window
    time.sleep(0.05)  # between forwards of one window
    model(1.0).backward()
    train(model, 1, 1.0)
    accumulated, plain = model.reducer.ready_times()
    for first, second, third in (accumulated, plain):  # by parameter; the last one's gradient comes first
        assert third + 0.01 <= second <= first - 0.01
    assert plain[2] >= 0.01
    assert accumulated[2] >= 0.03 + 0.05 + 0.01
    model.reducer.record_ready_times(False)
    train(model, 1, 1.0)
    assert model.reducer.ready_times() == []


SLOW, FAST = Link(1e-3, 1e9), Link(1e-3, 2e9)


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize(("one", "two", "several"), [(SLOW, FAST, True), (FAST, SLOW, False)])
@on_ranks(2)
def test_a_large_model_gets_the_lanes_that_are_faster(rank: int, one: Link, two: Link, several: bool) -> None:
    with a_network_of(one, two) as measure:
        model = auto(Sum([torch.zeros(7 * 2**20) for _ in range(2)]))
        train(model, STEPS + 1)
    assert (model.engine.now.setting.several_lanes, measure.call_count) == (several, 2)


# ------------------------------------------------------------------------------------------------------- with what else


def planned_parameters(model: fastddp.DistributedDataParallel) -> list[str]:
    return sorted(parameter.name for bucket in model.bucket_plan().buckets for parameter in bucket.parameters)


@pytest.mark.parametrize(
    ("option", "in_buckets"),
    [("find_unused_parameters", ["a", "b", "c"]), ("static_graph", ["a", "b"])],
)
@on_ranks(2)
def test_unused_parameters_are_planned_as_they_are_expected(rank: int, option: str, in_buckets: list[str]) -> None:
    """Rank 0 uses b, nobody c."""
    model = auto(Parts(), **{option: True})
    train(model, STEPS + 2, torch.ones(3), ("ba", "a")[rank])
    assert gradients(model) == [1.0, 0.5, None]
    assert planned_parameters(model) == in_buckets


@on_ranks(2)
def test_sparse_gradients_stay_outside_of_the_plan_and_dtypes_share_no_bucket(rank: int) -> None:
    with_sparse = auto(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))
    train(with_sparse, STEPS + 2, torch.tensor([rank]))
    assert with_sparse.module[0].weight.grad.is_sparse
    assert planned_parameters(with_sparse) == ["1.bias", "1.weight"]
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    model = auto(Sum([torch.ones(3, dtype=dtypes[i % 3]) for i in range(9)]))
    train(model, STEPS + 2)
    assert all(parameter.grad.float().tolist() == [1.0] * 3 for parameter in model.parameters())
    for bucket in model.bucket_plan().buckets:
        assert len({parameter.dtype for parameter in bucket.parameters}) == 1


@pytest.mark.parametrize(("failing", "plan"), [([0], [1, 5]), ([2], [1, 5]), ([1, 2, 3], [6])])
@on_ranks(2)
def test_steps_that_fail_leave_ranks_with_one_plan(rank: int, failing: list[int], plan: list[int]) -> None:
    with a_network_of(SLOW_NETWORK):
        model = auto(Layers())
        for step in range(STEPS + 1):
            model.module.fails = rank == 1 and step in failing
            error = ZeroDivisionError if rank == 1 else RuntimeError  # where one rank fails, all do
            with pytest.raises(error) if step in failing else nullcontext():
                train(model, 1, 1.0)
        train(model, 1, 1.0)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    # A window that fails on one rank fails on all: where all that were measured do, the default plan stays.
    assert sizes(model) == plan


@on_ranks(2)
def test_a_rank_without_inputs_takes_part(rank: int) -> None:
    with a_network_of(SLOW_NETWORK):
        model = auto(Layers())
        with Join([model]):
            train(model, 2 if rank == 0 else STEPS + 2, 1.0)
    assert sizes(model) == [1, 5]


@pytest.mark.parametrize(("hook", "size"), [("allreduce_hook", 4096), ("fp16_compress_hook", 2048)])
@on_ranks(2)
def test_bytes_that_travel_are_planned(rank: int, hook: str, size: int) -> None:
    model = auto(Layers())
    model.register_comm_hook(None, getattr(comm_hooks, hook))
    with a_network_of(SLOW_NETWORK), what_is_planned() as given:
        train(model, STEPS + 2, 1.0)
    ((measured, _),) = given
    assert [one.bytes for one in measured] == [size] * 6


@pytest.mark.parametrize("steps", [0, 2, STEPS + 1])
@pytest.mark.parametrize("pickled", [False, True])
@on_ranks(2)
def test_copies_make_a_plan_of_their_own(rank: int, pickled: bool, steps: int) -> None:
    with a_network_of(SLOW_NETWORK):
        model = auto(Layers())
        train(model, steps, 1.0)
        twin = pickle.loads(pickle.dumps(model)) if pickled else copy.deepcopy(model)
        before = sizes(twin)
        train(twin, STEPS + 1, 1.0)
    assert (before, sizes(twin)) == ([6], [1, 5])


# ------------------------------------------------------------------------------------------------------------- a device


@on_ranks(2, pool="simulated_ranks")
def test_on_a_device_times_are_the_streams(rank: int) -> None:
    model = auto(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(fake_cuda.DEVICE))
    with a_network_of(SLOW_NETWORK), what_is_planned() as given:
        for step in range(STEPS + 2):
            model.zero_grad()
            model(torch.full((1, 4), 1.0 + rank, device=fake_cuda.DEVICE)).square().sum().backward()
            assert step >= STEPS or sizes(model) == [4]
    ((measured, _),) = given
    ready = [gradient.ready for gradient in measured]
    assert all(second > 0 for second in ready)
    assert len(set(of_ranks((str(sizes(model)), str(ready))))) == 1


# --------------------------------------------------------------------------------------------------------------- errors


def refused(rank: int, options: dict[str, Any]) -> None:
    module = Layers()
    if options.pop("delay", False):
        options["delay_all_reduce_named_params"] = [("weights.0", module.weights[0])]
        options["param_to_hook_all_reduce"] = module.weights[1]
    hook = options.pop("hook", None)
    model = fastddp.DistributedDataParallel(module, **{"bucket_cap_mb": "auto"} | options)
    model.register_comm_hook(comm_hooks.PowerSGDState(None) if hook is comm_hooks.powerSGD_hook else None, hook)


UNKNOWN_TRAFFIC = 'bucket_cap_mb="auto" plans for gradients that are averaged by one allreduce a bucket'


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"bucket_cap_mb": None, "bucket_cap_mb_list": ["auto"]},
            "bucket_cap_mb_list must be a number of MiB >= 0, got 'auto'.",
        ),
        ({"bucket_cap_mb_list": [1]}, "Leave out one or the other"),
        ({"buckets": "plan.json"}, "Leave out one or the other"),
        ({"delay": True}, "Leave out one or the other"),
        *(({"hook": hook}, UNKNOWN_TRAFFIC) for hook in (averages, comm_hooks.noop_hook, comm_hooks.powerSGD_hook)),
    ],
)
def test_what_contradicts_a_plan_is_refused(ranks: RankPool, options: dict[str, Any], complaint: str) -> None:
    for error in ranks.errors(refused, 2, options):
        assert (error.type_name, complaint in error.message) == ("ValueError", True)
