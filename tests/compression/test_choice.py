"""What is chosen for each bucket, on made-up times: in closed form, and never worse than any other choice by much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from fastddp.compression.choice import (
    LEAST_GAIN,
    SLACK,
    Choice,
    Cost,
    Load,
    allowed,
    behind_backward,
    choose,
    cost_of,
    end_of,
    error_of,
    is_slower,
    median,
    vectors_of,
)
from fastddp.compression.costs import largest_trial, measure_costs
from fastddp.compression.plan import kept_plain, plan_of


def load(ready: float, **seconds: float) -> Load:
    return Load(ready, seconds)


HIDDEN = [load(1.0, plain=0.5, int8=0.1), load(2.0, plain=0.5, int8=0.1), load(3.0, plain=0.1, int8=0.02)]
SLOW = [load(0.1, plain=4.0, bf16=2.0, int8=1.0), load(0.2, plain=4.0, bf16=2.0, int8=1.0)]


@pytest.mark.parametrize(
    ("loads", "of_buckets", "end", "plain_end"),
    [
        ([], "", 0.0, 0.0),
        # What computing hides stays plain: each exchange ends before the next bucket is ready, and the last is short.
        (HIDDEN, "plain plain plain", 3.1, 3.1),
        # Where nothing can be hidden the cheapest is taken, and on a slow network everything is compressed.
        (behind_backward(HIDDEN), "int8 int8 int8", 3.22, 4.1),
        (SLOW, "int8 int8", 2.1, 8.1),
        # Else only what is behind backward.
        ([load(1.0, plain=1.0, int8=0.2), load(3.0, plain=2.0, int8=0.5)], "plain int8", 3.5, 5.0),
        # A more exact choice where the step ends no later: up to the second bucket there is time for bf16.
        ([load(1.0, plain=3.0, bf16=1.5, int8=0.5), load(3.0, plain=9.0, bf16=5.0, int8=1.0)], "bf16 int8", 4.0, 13.0),
        # What is slower when compressed stays plain.
        ([load(0.0, plain=1.0, int8=2.0), load(0.0, plain=5.0, int8=1.0)], "plain int8", 2.0, 6.0),
        # Less than 3 % of a step is not worth it.
        ([load(0.0, plain=1.0, int8=0.96)], "int8", 0.96, 1.0),
        ([load(0.0, plain=1.0, int8=0.98)], "plain", 1.0, 1.0),
        # What a step would lose counts as a part of that step, not of the one without compression.
        ([load(0.0, plain=10.0, bf16=1.09, int8=1.0)], "int8", 1.0, 10.0),
    ],
)
def test_what_is_chosen(loads: Sequence[Load], of_buckets: str, end: float, plain_end: float) -> None:
    choice = choose(loads)
    assert choice == Choice(tuple(of_buckets.split()), pytest.approx(end), pytest.approx(plain_end))
    assert choice.compresses == ("int8" in of_buckets)
    assert choice.gain == pytest.approx((plain_end - end) / (plain_end or 1.0))


def test_no_choice_ends_much_sooner() -> None:
    times = [(0.5, (1.0, 0.6, 0.3)), (0.7, (0.2, 0.3, 0.25)), (2.0, (1.1, 0.5, 0.6)), (2.1, (0.9, 0.5, 0.2))]
    names = ("plain", "bf16", "int8")
    loads = [Load(ready, dict(zip(names, seconds, strict=True))) for ready, seconds in times]
    choice = choose(loads)
    best = min(end_of(loads, tried) for tried in itertools.product(names, repeat=len(loads)))
    assert best <= choice.end <= best * (1 + SLACK)
    assert choice.gain >= LEAST_GAIN


def test_the_error_budget_says_what_is_allowed_and_plain_always_is() -> None:
    candidates = ("powersgd4", "fp8", "int8", "bf16", "plain")
    for budget, count in {0.0: 1, 0.00391: 2, 0.01: 3, 0.04: 4, 1.0: 5}.items():
        assert allowed(candidates, budget) == [*reversed(candidates)][:count]
    assert allowed(["powersgd1", "powersgd8"], 2.0) == ["plain", "powersgd8", "powersgd1"]  # more are more exact


def test_names_are_known_or_refused() -> None:
    assert [vectors_of(name) for name in ("powersgd1", "powersgd32", "int8")] == [1, 32, None]
    for name in ("powersgd0", "powersgd33", "powersgd", "fp16"):
        with pytest.raises(ValueError, match=rf"no candidate '{name}'"):
            error_of(name)


@pytest.mark.parametrize(
    ("seconds", "latency", "per_element"),
    [
        ([[2.0, 2.0, 7.0], [3.0, 1.0, 3.0]], 1.5, 0.0005),  # a line goes through the medians of two sizes
        ([[2.0], [1.0]], 1.0, 0.0),  # whose slope is not negative
        ([[0.1], [3.0]], 0.0, 0.001),  # and which is not below zero
    ],
)
def test_a_cost_is_a_line(seconds: list[list[float]], latency: float, per_element: float) -> None:
    assert cost_of([1000, 3000], seconds) == Cost(pytest.approx(latency), pytest.approx(per_element))


@dataclass
class MadeUp:
    """A trial whose times are those of a line; it notes in which order trials ran."""

    name: str
    cost: Cost
    elements: int
    log: list[tuple[str, int]]

    def seconds(self) -> float:
        self.log.append((self.name, self.elements))
        return self.cost.seconds(self.elements)


def measured(costs: dict[str, Cost], largest: int) -> tuple[dict[str, Cost], list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []
    trials = {
        name: lambda elements, name=name, cost=cost: (MadeUp(name, cost, elements, log), elements)
        for name, cost in costs.items()
    }
    return measure_costs(trials, list, largest), log


def test_what_is_measured_is_what_there_is() -> None:
    costs = {"plain": Cost(1e-3, 2e-8), "int8": Cost(2e-3, 5e-9), "powersgd4": Cost(3e-3, 1e-9)}
    found, log = measured(costs, 2**22)
    for name, cost in costs.items():
        assert found[name] == Cost(pytest.approx(cost.latency), pytest.approx(cost.per_element))
    assert log[-6:] == log[-12:-6], "in turn, so that what changes on the machine changes all of them"
    assert [name for name, _ in log[-6:]] == ["plain", "plain", "int8", "int8", "powersgd4", "powersgd4"]


@pytest.mark.parametrize(("per_element", "largest"), [(1e-12, 2**18), (1e-6, 2**22)])
def test_no_more_is_measured_than_the_largest_bucket_or_a_slow_network_asks_for(
    per_element: float, largest: int
) -> None:
    _, log = measured({"plain": Cost(0.0, per_element)}, largest)
    assert max(elements for _, elements in log) <= 2**18
    assert sum(elements * per_element for _, elements in log) < 4.0
    assert largest_trial(1000, torch.device("cpu")) == 1000


def test_noise_is_not_slower_and_a_median_leaves_out_what_is_no_number() -> None:
    assert [is_slower(after, 1.0) for after in (0.5, 1.0, 1.029, 1.031)] == [False, False, False, True]
    assert median([math.nan, 3.0, 1.0, 2.0]) == 2.0
    assert median([math.nan]) == -1.0


def test_a_plan_says_why() -> None:
    loads = [
        load(0.001, plain=0.001, int8=0.0005),
        load(0.010, plain=0.040, int8=0.010),
        load(0.011, plain=0.002, int8=0.004),
        load(0.012, plain=0.001),
    ]
    sizes = [2**20, 25 * 2**20, 2**10, 8]
    plan = plan_of(loads, sizes, choose(loads), error_budget=0.01, measured_plain_seconds=0.06)
    assert plan.compresses
    _, first, second, third, fourth, summary = str(plan).splitlines()
    assert "hidden behind backward" in first
    assert second.split() == ["1", "25", "int8", "10", "40", "takes", "30", "ms", "less"]
    assert "nothing that the error budget allows is faster" in third
    assert "only those of the dtype with most bytes" in fourth
    assert "averaged 23 ms after a step begins, 57 % sooner than the 53 ms without" in summary
    loads = [load(0.1, plain=0.004, int8=0.003)]
    plan = plan_of(loads, [2**20], choose(loads), error_budget=0.01, measured_plain_seconds=0.1)
    assert not plan.compresses
    assert plan.buckets[0].reason == "compression gains the step too little"
    assert "gain less than 3 % of a step. Gradients are ready after 100 ms and averaged after 104 ms" in plan.reason
    assert "nothing was tried" in str(kept_plain([8], "", error_budget=0.01, measured_plain_seconds=0.1))
