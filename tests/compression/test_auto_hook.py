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


# ---------------------------------------------------------------------------------------------------------- decisions


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


def moments_of_choice(rank: int) -> list[list[float]]:
    with with_costs(SLOW, 1.0, 0.5), mock.patch.object(auto, "choose", wraps=auto.choose) as choose:
        plans_of(hooked(AutoState()), WINDOWS_UNTIL_PLAN + 1, rank)
    return [[load.ready for load in call.args[0]] for call in choose.call_args_list]


def test_on_the_cpu_no_bucket_is_ready_before_the_last_one(ranks: RankPool) -> None:
    """Also an exchange that backward hides takes processors from it."""
    for ((first, *others),) in ranks.run(moments_of_choice, 2):
        assert others
        assert set(others) == {first}


def greatest(rank: int) -> list[float]:
    return greatest_over(dist.group.WORLD, torch.device("cpu"))([1.0 + rank, 5.0 - rank])


def test_what_counts_is_the_slowest_ranks_time(ranks: RankPool) -> None:
    assert ranks.run(greatest, 2) == [[2.0, 5.0]] * 2


def fast_network(rank: int) -> tuple[list[Any], bool]:
    with with_costs(FAST):
        model = hooked(AutoState())
        return plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank), model.engine.now.exchange == AllReduce()


def test_a_fast_network_stays_plain(ranks: RankPool) -> None:
    for plans, is_plain in ranks.run(fast_network, 2):
        assert not plans[-1].compresses
        assert plans[-1] == plans[WINDOWS_UNTIL_PLAN], "nothing is looked at again"
        assert plans[-1].reason.startswith("Plain: compression would gain less than 3 % of a step.")
        assert is_plain


def slower_after_all(rank: int, after: float) -> tuple[Any, ...]:
    with lines_of_the_logger(logging.INFO) as records, with_costs(SLOW, 1.0, after + 0.001 * rank):
        state = AutoState()
        model = hooked(state)
        plans = plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank)
        (gradients,) = train(model, 1, rank)
    return plans, gradients, state.state_dict()["blocks"]["errors"], records


def test_what_is_slower_after_all_goes_back_for_good_unless_it_is_noise(ranks: RankPool) -> None:
    for rank, (plans, gradients, errors, records) in enumerate(ranks.run(slower_after_all, 2, 1.04)):
        assert plans[WINDOWS_UNTIL_VERDICT - 1].compresses
        assert not plans[-1].compresses
        assert "with compression steps took 1.04e+03 ms, and 1e+03 ms without" in plans[-1].reason
        assert {bucket.reason for bucket in plans[-1].buckets} == {"steps were slower with compression"}
        torch.testing.assert_close(gradients[0], 1.5 * WAVE)
        assert errors == {f"rank {rank}": {}}, "nothing is remembered any more"
        assert len(records) == (2 if rank == 0 else 0), "rank 0 says what was decided, and what became of it"
    for plans, *_ in ranks.run(slower_after_all, 2, 1.02):
        assert plans[-1].compresses


def plan_of_what_cannot_gain(rank: int, dtype: torch.dtype) -> CompressionPlan | None:
    model = fastddp.DistributedDataParallel(Pair().to(dtype))
    assert model.compression_plan() is None
    model.register_comm_hook(None, comm_hooks.auto_hook)
    return plans_of(model, WINDOWS_UNTIL_PLAN + 1, rank)[-1]


def test_where_there_is_nothing_to_decide_nothing_is_tried(ranks: RankPool) -> None:
    (alone,) = ranks.run(plan_of_what_cannot_gain, 1, torch.float32)
    assert "a single rank" in alone.reason
    for plan in ranks.run(plan_of_what_cannot_gain, 2, torch.float64):
        assert "an error budget of 0.01 allows nothing that compresses float64" in plan.reason


# ---------------------------------------------------------------------------------------------------------- gradients


def really_measured(rank: int, two_levels: bool) -> tuple[str, bool, list[Tensor]]:
    """With nothing put in: the ranks' own times, whatever they are."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = hooked(AutoState(error_budget=1), two_levels)
    (*_, last) = train(model, WINDOWS_UNTIL_VERDICT + 2, rank)
    return str(model.compression_plan()), torch.equal(before, torch.get_rng_state()), last


@pytest.mark.parametrize("two_levels", [False, True])
def test_measuring_leaves_ranks_alike(ranks: RankPool, two_levels: bool) -> None:
    answers = ranks.run(really_measured, 4 if two_levels else 2, two_levels)
    assert len({plan for plan, _, _ in answers}) == 1
    assert all(untouched for _, untouched, _ in answers), "random numbers are the program's"
    for _, _, gradients in answers:
        assert all(torch.equal(one, two) for one, two in zip(gradients, answers[0][2], strict=True))


# --------------------------------------------------------------------------------------------------------- checkpoints


def resumed(rank: int, candidate: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Errors as they were saved, and as they are when they are used again."""

    def errors_in(state: dict[str, Any]) -> dict[str, Tensor]:
        part = state["power_sgd"][candidate] if candidate == "powersgd4" else state["blocks"]
        return {name: error.clone() for name, error in part["errors"][f"rank {rank}"].items()}

    first, again = (AutoState(error_budget=1, candidates=[candidate]) for _ in range(2))
    with with_costs({"plain": Cost(0.0, 1.0), candidate: Cost(0.0, 0.1)}, 1.0, 0.5, 1.0, 0.5):
        train(hooked(first), WINDOWS_UNTIL_VERDICT + 2, rank)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = hooked(again)
        again.load_state_dict(saved)
        train(model, WINDOWS_UNTIL_PLAN, rank)
        model(torch.tensor(1.0))  # which makes the plan
    return errors_in(saved), errors_in(again.state_dict())


@pytest.mark.parametrize("candidate", ["int8", "powersgd4"])
def test_a_checkpoint_keeps_what_was_left_out(ranks: RankPool, candidate: str) -> None:
    for saved, used in ranks.run(resumed, 2, candidate):
        assert {"first", "second"} <= saved.keys()
        assert saved.keys() == used.keys()
        assert any(bool(error.any()) for error in saved.values())
        assert all(torch.equal(saved[name], used[name]) for name in saved)


# ----------------------------------------------------------------------------------------------- what makes no sense


def refusals(rank: int) -> dict[str, str]:
    """By words that have to be in them."""
    state = AutoState(error_budget=1)
    hooked(state)
    good, said = state.state_dict(), {}
    saved = {
        "its format is 7": {**good, "format": 7},
        "no 'blocks'. Nothing has been changed": {key: part for key, part in good.items() if key != "blocks"},
        "not powersgd8": {**good, "power_sgd": {"powersgd8": {}}},
        "iter must be an integer >= 0": {**good, "blocks": {**good["blocks"], "iter": -1}},
    }
    for words, bad in saved.items():
        with pytest.raises(ValueError) as raised:
            state.load_state_dict(bad)
        said[words] = str(raised.value)
    arguments: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "not a builtins.int": (3, comm_hooks.auto_hook, {}),
        "without a wrapper": (None, comm_hooks.fp16_compress_wrapper(comm_hooks.auto_hook), {}),
        'bucket_cap_mb="auto"': (None, comm_hooks.auto_hook, {"bucket_cap_mb": "auto"}),
        "PowerSGD keeps": (state, comm_hooks.auto_hook, {"gradient_average": "sum"}),
    }
    for words, (given, hook, options) in arguments.items():
        model = fastddp.DistributedDataParallel(Pair(), **options)
        with pytest.raises((TypeError, ValueError)) as refused:
            model.register_comm_hook(given, hook)
        said[words] = str(refused.value)
    with pytest.raises(RuntimeError, match="auto_hook is run by"):
        comm_hooks.auto_hook(None, None)
    differs = hooked(AutoState(error_budget=0.01 * (rank + 1)))
    with pytest.raises(RuntimeError, match="Give AutoState the same arguments on all ranks") as told:
        differs(torch.tensor(1.0))
    return said | {"error_budget is 0.01 on rank 0; 0.02": str(told.value)}


def test_what_makes_no_sense_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(refusals, 2):
        assert all(words in text for words, text in said.items())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(({"error_budget": budget}, f"finite number >= 0, got {budget}") for budget in (-0.1, float("nan"), True)),
        ({"candidates": "int8"}, "candidates must be a sequence of names, got 'int8'"),
        ({"candidates": ["int4"]}, "There is no candidate 'int4'"),
    ],
)
def test_a_setting_out_of_range_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AutoState(**options)
