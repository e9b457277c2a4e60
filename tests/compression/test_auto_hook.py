"""``comm_hooks.auto_hook`` in training: what is decided when, that ranks agree, and what a checkpoint keeps."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import AutoState
from fastddp.compression import auto
from fastddp.compression.choice import Choice, Cost, Load
from fastddp.compression.costs import greatest_over
from fastddp.compression.plan import CompressionPlan
from fastddp.exchange.descriptions import AllReduce
from logs import lines_of_the_logger
from models import RaisesInBackward
from ranks import RankPool

WINDOWS_UNTIL_PLAN = auto.SETTLED + auto.MEASURED  # plain ones
WINDOWS_UNTIL_VERDICT = WINDOWS_UNTIL_PLAN + 1 + auto.MEASURED
SLOW = {"plain": Cost(0.0, 1.0), "bf16": Cost(0.0, 0.5), "int8": Cost(0.0, 0.25), "fp8": Cost(0.0, 0.24)}
FAST = {name: Cost(0.0, 0.0) for name in SLOW}


class Pair(nn.Module):
    """Two matrices and a vector in a bucket each; the gradient of each is its input times a fixed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(32, 24))
        self.second = nn.Parameter(torch.zeros(32, 24))
        self.bias = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor, raises: bool = False) -> Tensor:
        wave = torch.sin(torch.arange(768.0)).view(32, 24)
        first = RaisesInBackward.apply(self.first) if raises else self.first
        return x * ((first * wave).sum() + (self.second * wave.square()).sum() + self.bias.sum())


def with_costs(costs: dict[str, Cost], window_seconds: Sequence[float] = ()) -> list[list[str]]:
    """Put these in the place of what would be measured; returns what was to be tried."""
    tried: list[list[str]] = []

    def measured(trials: dict[str, Any], agree: Callable[..., Any], largest: int) -> dict[str, Cost]:
        tried.append([*trials])
        return {name: costs[name] for name in trials}

    auto.measure_costs = measured
    lengths = iter(window_seconds)
    if window_seconds:
        auto.window_times = lambda reducer: [next(lengths)]
    return tried


def hooked(state: AutoState | None, **options: Any) -> fastddp.DistributedDataParallel:
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0.0001, **options)
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


ORIGINAL = {"measure_costs": auto.measure_costs, "window_times": auto.window_times}


@pytest.fixture(autouse=True)
def _original(ranks: RankPool) -> Any:
    yield
    ranks.run(restored, 4)


def restored(rank: int) -> None:
    for name, value in ORIGINAL.items():
        setattr(auto, name, value)


# ---------------------------------------------------------------------------------------------------------- decisions


def slow_network(rank: int) -> tuple[Any, ...]:
    tried = with_costs(SLOW, [1.0, 0.5])
    model = hooked(AutoState())
    plans = plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank)
    return tried, plans


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_slow_network_compresses_within_the_budget(ranks: RankPool, world_size: int) -> None:
    answers = ranks.run(slow_network, world_size)
    for tried, plans in answers:
        assert tried == [["plain", "bf16", "int8"]], "once, and fp8 is beyond the default budget"
        assert plans[:WINDOWS_UNTIL_PLAN] == [None] * WINDOWS_UNTIL_PLAN
        plan = plans[WINDOWS_UNTIL_PLAN]
        assert of_matrices(plan) == {"int8"}
        assert plan.measured_plain_seconds == 1.0
        assert plan.measured_seconds is None
        assert plan.reason.startswith("Compressed: ")
        assert plans[WINDOWS_UNTIL_VERDICT].measured_seconds == 0.5
        assert plans[WINDOWS_UNTIL_VERDICT].buckets == plan.buckets
    assert len({str(plans[-1]) for _, plans in answers}) == 1, "ranks agree"


def with_numbers_of_its_own(rank: int) -> set[str]:
    with_costs(SLOW if rank == 0 else FAST, [1.0, 0.5])
    return of_matrices(plans_of(hooked(AutoState()), WINDOWS_UNTIL_PLAN + 1, rank)[-1])


def test_rank_0_chooses_for_all(ranks: RankPool) -> None:
    """Arithmetic may differ between machines, and ranks that chose differently would wait for ever."""
    assert ranks.run(with_numbers_of_its_own, 2) == [{"int8"}] * 2


def moments_of_choice(rank: int) -> list[list[float]]:
    with_costs(SLOW, [1.0, 0.5])
    seen: list[list[float]] = []
    choose = auto.choose

    def noted(loads: Sequence[Load]) -> Choice:
        seen.append([load.ready for load in loads])
        return choose(loads)

    auto.choose = noted
    try:
        plans_of(hooked(AutoState()), WINDOWS_UNTIL_PLAN + 1, rank)
    finally:
        auto.choose = choose
    return seen


def test_on_the_cpu_no_bucket_is_ready_before_the_last_one(ranks: RankPool) -> None:
    """Also an exchange that backward hides takes processors from it."""
    for ((first, *others),) in ranks.run(moments_of_choice, 2):
        assert others
        assert set(others) == {first}


def greatest(rank: int) -> list[float]:
    return greatest_over(dist.group.WORLD, torch.device("cpu"))([1.0 + rank, 5.0 - rank])


def test_what_counts_is_the_slowest_ranks_time(ranks: RankPool) -> None:
    assert ranks.run(greatest, 2) == [[2.0, 5.0]] * 2


def fast_network(rank: int) -> list[Any]:
    with_costs(FAST)
    model = hooked(AutoState())
    return [plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank), model._exchange == AllReduce()]


def test_a_fast_network_stays_plain(ranks: RankPool) -> None:
    for plans, is_plain in ranks.run(fast_network, 2):
        assert not plans[-1].compresses
        assert plans[-1] == plans[WINDOWS_UNTIL_PLAN], "nothing is looked at again"
        assert plans[-1].reason.startswith("Plain: compression would gain less than 3 % of a step.")
        assert is_plain


def slower_after_all(rank: int, after: float) -> tuple[Any, ...]:
    with lines_of_the_logger(logging.INFO) as records:
        with_costs(SLOW, [1.0, after + 0.001 * rank])
        state = AutoState()
        model = hooked(state)
        plans = plans_of(model, WINDOWS_UNTIL_VERDICT + 1, rank)
        (gradients,) = train(model, 1, rank)
    return plans, gradients, state.state_dict()["blocks"]["errors"], records


def test_what_is_slower_after_all_goes_back_for_good(ranks: RankPool) -> None:
    of_ranks = ranks.run(slower_after_all, 2, 1.04)
    for rank, (plans, gradients, errors, records) in enumerate(of_ranks):
        assert plans[WINDOWS_UNTIL_VERDICT - 1].compresses
        assert not plans[-1].compresses
        assert "with compression steps took 1.04e+03 ms, and 1e+03 ms without" in plans[-1].reason
        assert {bucket.reason for bucket in plans[-1].buckets} == {"steps were slower with compression"}
        mean = 1.5 * torch.sin(torch.arange(768.0)).view(32, 24)
        torch.testing.assert_close(gradients[0], mean)
        assert errors == {f"rank {rank}": {}}, "nothing is remembered any more"
        assert len(records) == (2 if rank == 0 else 0), "rank 0 says what was decided, and what became of it"


def test_slower_by_noise_is_not_slower(ranks: RankPool) -> None:
    for plans, *_ in ranks.run(slower_after_all, 2, 1.02):
        assert plans[-1].compresses


def alone(rank: int) -> CompressionPlan | None:
    model = hooked(None)
    return plans_of(model, WINDOWS_UNTIL_PLAN + 1, rank)[-1]


def test_a_single_rank_has_nothing_to_decide(ranks: RankPool) -> None:
    (plan,) = ranks.run(alone, 1)
    assert plan.reason == "Plain: a single rank has nothing to exchange."


def in_double(rank: int) -> CompressionPlan | None:
    model = fastddp.DistributedDataParallel(Pair().double())
    model.register_comm_hook(None, comm_hooks.auto_hook)
    return plans_of(model, WINDOWS_UNTIL_PLAN + 1, rank)[-1]


def test_what_nothing_compresses_is_not_tried(ranks: RankPool) -> None:
    for plan in ranks.run(in_double, 2):
        assert plan.reason == "Plain: an error budget of 0.01 allows nothing that compresses float64."


# ---------------------------------------------------------------------------------------------------------- gradients


def every_candidate(rank: int, candidate: str, lends: bool) -> tuple[list[Any], list[list[Tensor]]]:
    with_costs({"plain": Cost(0.0, 1.0), candidate: Cost(0.0, 0.1)}, [1.0, 0.5])
    state = AutoState(error_budget=1, candidates=[candidate])
    model = hooked(state, lazy_bucket_allocation=lends)
    gradients = train(model, WINDOWS_UNTIL_VERDICT + 3, rank)
    return [bucket.choice for bucket in model.compression_plan().buckets], gradients


@pytest.mark.parametrize("lends", [False, True], ids=["wires stay", "wires are lent"])
@pytest.mark.parametrize("candidate", ["bf16", "int8", "fp8", "powersgd4"])
def test_replicas_get_the_mean_before_and_after(ranks: RankPool, candidate: str, lends: bool) -> None:
    wave = torch.sin(torch.arange(768.0)).view(32, 24)
    answers = ranks.run(every_candidate, 2, candidate, lends)
    for choices, gradients in answers:
        # The vector has no factors.
        assert sorted(set(choices)) == (["plain", "powersgd4"] if candidate == "powersgd4" else [candidate])
        for window, (first, second, bias) in enumerate(gradients):
            scale = 1.5 + 0.1 * window
            is_plain = window < WINDOWS_UNTIL_PLAN
            loose = 0.0 if is_plain else {"bf16": 0.01, "int8": 0.02, "fp8": 0.2, "powersgd4": 0.75}[candidate] * scale
            torch.testing.assert_close(first, scale * wave, rtol=1e-5, atol=loose)
            torch.testing.assert_close(second, scale * wave.square(), rtol=1e-5, atol=loose)
            torch.testing.assert_close(bias, torch.full((40,), scale), rtol=1e-5, atol=loose)
    for mine, other in zip(*(gradients for _, gradients in answers), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


def really_measured(rank: int, hierarchy: bool) -> tuple[str, bool, list[Tensor]]:
    """With nothing put in: the ranks' own times, whatever they are."""
    options: dict[str, Any] = {}
    if hierarchy:
        options["hierarchy"] = dist.init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = hooked(AutoState(error_budget=1), **options)
    (*_, last) = train(model, WINDOWS_UNTIL_VERDICT + 2, rank)
    return str(model.compression_plan()), torch.equal(before, torch.get_rng_state()), last


@pytest.mark.parametrize("hierarchy", [False, True])
def test_measuring_leaves_ranks_alike(ranks: RankPool, hierarchy: bool) -> None:
    answers = ranks.run(really_measured, 4 if hierarchy else 2, hierarchy)
    assert len({plan for plan, _, _ in answers}) == 1
    assert all(untouched for _, untouched, _ in answers), "random numbers are the program's"
    for _, _, gradients in answers:
        assert all(torch.equal(one, two) for one, two in zip(gradients, answers[0][2], strict=True))


def in_levels(rank: int) -> tuple[set[str], list[Tensor]]:
    with_costs(SLOW, [1.0, 0.5])
    model = hooked(AutoState(), hierarchy=dist.init_device_mesh("cpu", (2, 2)))
    (*_, last) = train(model, WINDOWS_UNTIL_VERDICT + 2, rank)
    return of_matrices(model.compression_plan()), last


def test_between_nodes_it_is_the_same(ranks: RankPool) -> None:
    scale = 2.5 + 0.1 * (WINDOWS_UNTIL_VERDICT + 1)
    for choices, (_, _, bias) in ranks.run(in_levels, 4):
        assert choices == {"int8"}
        torch.testing.assert_close(bias, torch.full((40,), scale), rtol=0.02, atol=0)


# --------------------------------------------------------------------------------------------------------- checkpoints


def resumed(rank: int, candidate: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Errors as they were saved, as they are when they are used again, and the saved state."""
    with_costs({"plain": Cost(0.0, 1.0), candidate: Cost(0.0, 0.1)}, [1.0, 0.5, 1.0, 0.5])
    state = AutoState(error_budget=1, candidates=[candidate])
    first = hooked(state)
    train(first, WINDOWS_UNTIL_VERDICT + 2, rank)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = AutoState(error_budget=1, candidates=[candidate])
    model = hooked(again)
    again.load_state_dict(saved)
    train(model, WINDOWS_UNTIL_PLAN, rank)
    model(torch.tensor(1.0))  # which makes the plan
    return errors_in(saved, rank, candidate), errors_in(again.state_dict(), rank, candidate), saved


def errors_in(state: dict[str, Any], rank: int, candidate: str) -> dict[str, Tensor]:
    part = state["power_sgd"][candidate] if candidate == "powersgd4" else state["blocks"]
    return {name: error.clone() for name, error in part["errors"][f"rank {rank}"].items()}


@pytest.mark.parametrize("candidate", ["int8", "powersgd4"])
def test_a_checkpoint_keeps_what_was_left_out(ranks: RankPool, candidate: str) -> None:
    for saved, used, _ in ranks.run(resumed, 2, candidate):
        assert {"first", "second"} <= saved.keys()
        assert saved.keys() == used.keys()
        assert any(bool(error.any()) for error in saved.values())
        assert all(torch.equal(saved[name], used[name]) for name in saved)


def loaded_badly(rank: int) -> list[str]:
    state = AutoState(error_budget=1)
    model = hooked(state)
    good = state.state_dict()
    texts = []
    for bad in (
        {**good, "format": 7},
        {key: part for key, part in good.items() if key != "blocks"},
        {**good, "power_sgd": {"powersgd8": {}}},
        {**good, "blocks": {**good["blocks"], "iter": -1}},
    ):
        with pytest.raises(ValueError) as raised:
            state.load_state_dict(bad)
        texts.append(str(raised.value))
    assert model.compression_plan() is None
    return texts


def test_a_bad_checkpoint_is_refused(ranks: RankPool) -> None:
    for texts in ranks.run(loaded_badly, 1):
        assert texts[0] == "This is no AutoState state of format 1: its format is 7."
        assert "it has no 'blocks'. Nothing has been changed." in texts[1]
        assert "power_sgd must be of the candidates plain, bf16, int8, fp8, powersgd4, not powersgd8." in texts[2]
        assert "iter must be an integer >= 0" in texts[3]


def copied(rank: int) -> tuple[bool, list[CompressionPlan | None], list[Tensor]]:
    with_costs(SLOW, [1.0, 0.5, 1.0, 0.5])
    model = hooked(AutoState())
    train(model, WINDOWS_UNTIL_VERDICT + 1, rank)
    twin = copy.deepcopy(model)
    plans = plans_of(twin, WINDOWS_UNTIL_PLAN + 1, rank)
    return model.compression_plan().compresses, plans, train(twin, 1, rank)[0]


def test_a_copy_measures_anew(ranks: RankPool) -> None:
    for compresses, plans, gradients in ranks.run(copied, 2):
        assert compresses
        assert plans[:-1] == [None] * WINDOWS_UNTIL_PLAN
        assert plans[-1].compresses
        torch.testing.assert_close(gradients[2], torch.full((40,), 1.5), rtol=0.02, atol=0)


# --------------------------------------------------------------------------------------------------------------- errors


def told_differently(rank: int) -> str:
    model = hooked(AutoState(error_budget=0.01 * (rank + 1)))
    with pytest.raises(RuntimeError) as raised:
        model(torch.tensor(1.0))
    return str(raised.value)


def test_ranks_that_were_told_different_things_are_stopped(ranks: RankPool) -> None:
    for text in ranks.run(told_differently, 2):
        assert "different settings or states: error_budget is 0.01 on rank 0; 0.02" in text
        assert "Give AutoState the same arguments on all ranks" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"error_budget": -0.1}, "error_budget must be a finite number >= 0, got -0.1."),
        ({"error_budget": float("nan")}, "error_budget must be a finite number >= 0, got nan."),
        ({"error_budget": True}, "error_budget must be a finite number >= 0, got True."),
        ({"candidates": "int8"}, "candidates must be a sequence of names, got 'int8'."),
        ({"candidates": ["int4"]}, "There is no candidate 'int4': candidates are 'plain', 'bf16', 'int8', 'fp8' or "),
    ],
)
def test_a_setting_out_of_range_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        AutoState(**options)
    assert text in str(raised.value)


def refused(rank: int) -> list[str]:
    texts = []
    for state, hook, options, error in [
        (3, comm_hooks.auto_hook, {}, TypeError),
        (None, comm_hooks.fp16_compress_wrapper(comm_hooks.auto_hook), {}, ValueError),
        (None, comm_hooks.auto_hook, {"bucket_cap_mb": "auto"}, ValueError),
        (AutoState(error_budget=1), comm_hooks.auto_hook, {"gradient_average": "sum"}, ValueError),
    ]:
        model = fastddp.DistributedDataParallel(Pair(), **options)
        with pytest.raises(error) as raised:
            model.register_comm_hook(state, hook)
        texts.append(str(raised.value))
    with pytest.raises(RuntimeError) as called:
        comm_hooks.auto_hook(None, None)
    return [*texts, str(called.value)]


def test_what_it_cannot_do_is_refused(ranks: RankPool) -> None:
    for state, wrapper, planned, summed, called in ranks.run(refused, 2):
        assert (
            state
            == "The state of auto_hook is a process group, None or a fastddp.comm_hooks.AutoState, not a builtins.int."
        )
        assert wrapper == "auto_hook decides itself what is cast: register it without a wrapper that casts."
        assert 'bucket_cap_mb="auto" plans for gradients that are averaged by one allreduce a bucket' in planned
        assert "PowerSGD keeps what its average has lost" in summed
        assert "auto_hook is run by fastddp.DistributedDataParallel" in called


def without_the_hook(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Pair())
    train(model, 2, rank)
    assert model.compression_plan() is None


def test_without_the_hook_there_is_no_plan(ranks: RankPool) -> None:
    ranks.run(without_the_hook, 1)


def windows_that_fail(rank: int) -> tuple[bool, list[Tensor]]:
    """A rank whose backward raises in a window that is measured, and in one that is compressed."""
    with_costs(SLOW, [1.0, 0.5])
    model = hooked(AutoState())
    for window in range(WINDOWS_UNTIL_VERDICT + 2):
        model.zero_grad()
        fails = window in (4, WINDOWS_UNTIL_PLAN + 2)
        loss = model(torch.tensor(1.0 + rank), fails and rank == 1)
        with pytest.raises((ArithmeticError, RuntimeError)) if fails else contextlib.nullcontext():
            loss.backward()
    return model.compression_plan().compresses, [parameter.grad.clone() for parameter in model.parameters()]


def test_windows_that_fail_keep_ranks_together(ranks: RankPool) -> None:
    answers = ranks.run(windows_that_fail, 2)
    for compresses, gradients in answers:
        assert compresses
        torch.testing.assert_close(gradients[2], torch.full((40,), 1.5), rtol=0.02, atol=0)
        assert all(torch.equal(one, two) for one, two in zip(gradients, answers[0][1], strict=True))
