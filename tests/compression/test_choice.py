"""What is chosen for each bucket, on made-up times: in closed form, and never worse than any other choice by much."""

from __future__ import annotations

import itertools
import math

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


def test_what_computing_hides_stays_plain() -> None:
    # Each exchange ends before the next bucket is ready, and the last one is short.
    choice = choose([load(1.0, plain=0.5, int8=0.1), load(2.0, plain=0.5, int8=0.1), load(3.0, plain=0.1, int8=0.02)])
    assert choice == Choice(("plain", "plain", "plain"), 3.1, 3.1)


def test_a_slow_network_compresses_everything() -> None:
    choice = choose([load(0.1, plain=4.0, bf16=2.0, int8=1.0), load(0.2, plain=4.0, bf16=2.0, int8=1.0)])
    assert choice.of_buckets == ("int8", "int8")
    assert choice.end == pytest.approx(2.1)
    assert choice.plain_end == pytest.approx(8.1)
    assert choice.gain == pytest.approx(6.0 / 8.1)


def test_only_what_is_behind_backward_is_compressed() -> None:
    choice = choose([load(1.0, plain=1.0, int8=0.2), load(3.0, plain=2.0, int8=0.5)])
    assert choice.of_buckets == ("plain", "int8")
    assert choice.end == 3.5


def test_a_more_exact_choice_is_taken_where_the_step_ends_no_later() -> None:
    # Up to the second bucket there is time for bf16, and none for plain.
    choice = choose([load(1.0, plain=3.0, bf16=1.5, int8=0.5), load(3.0, plain=9.0, bf16=5.0, int8=1.0)])
    assert choice.of_buckets == ("bf16", "int8")


def test_where_nothing_can_be_hidden_the_cheapest_is_taken() -> None:
    loads = [load(1.0, plain=0.5, int8=0.1), load(2.0, plain=0.5, int8=0.1), load(3.0, plain=0.1, int8=0.02)]
    choice = choose(behind_backward(loads))
    assert choice.of_buckets == ("int8", "int8", "int8")
    assert choice.end == pytest.approx(3.22)
    assert choice.plain_end == pytest.approx(4.1)


def test_what_is_slower_when_compressed_stays_plain() -> None:
    choice = choose([load(0.0, plain=1.0, int8=2.0), load(0.0, plain=5.0, int8=1.0)])
    assert choice.of_buckets == ("plain", "int8")


@pytest.mark.parametrize(("seconds", "compresses"), [(0.96, True), (0.98, False)])
def test_too_small_a_part_of_a_step_is_not_worth_it(seconds: float, compresses: bool) -> None:
    assert choose([load(0.0, plain=1.0, int8=seconds)]).compresses is compresses


def test_no_choice_ends_much_sooner() -> None:
    times = [(0.5, (1.0, 0.6, 0.3)), (0.7, (0.2, 0.3, 0.25)), (2.0, (1.1, 0.5, 0.6)), (2.1, (0.9, 0.5, 0.2))]
    names = ("plain", "bf16", "int8")
    loads = [Load(ready, dict(zip(names, seconds, strict=True))) for ready, seconds in times]
    choice = choose(loads)
    best = min(end_of(loads, tried) for tried in itertools.product(names, repeat=len(loads)))
    assert best <= choice.end <= best * (1 + SLACK)
    assert choice.gain >= LEAST_GAIN


def test_what_a_step_would_lose_counts_as_a_part_of_that_step() -> None:
    """Not of the one without compression, which may be many times longer."""
    choice = choose([load(0.0, plain=10.0, bf16=1.09, int8=1.0)])
    assert choice.of_buckets == ("int8",)


def test_without_buckets_there_is_nothing_to_choose() -> None:
    assert choose([]) == Choice((), 0.0, 0.0)


# --------------------------------------------------------------------------------------------------- the error budget


def test_the_budget_says_what_is_allowed() -> None:
    candidates = ("powersgd4", "fp8", "int8", "bf16", "plain")
    assert allowed(candidates, 0.0) == ["plain"]
    assert allowed(candidates, 0.00391) == ["plain", "bf16"]
    assert allowed(candidates, 0.01) == ["plain", "bf16", "int8"]
    assert allowed(candidates, 0.04) == ["plain", "bf16", "int8", "fp8"]
    assert allowed(candidates, 1.0) == [*reversed(candidates)]


def test_plain_is_always_allowed_and_more_vectors_are_more_exact() -> None:
    assert allowed(["powersgd1", "powersgd8"], 2.0) == ["plain", "powersgd8", "powersgd1"]


def test_names_are_known_or_refused() -> None:
    assert [vectors_of(name) for name in ("powersgd1", "powersgd32", "int8")] == [1, 32, None]
    for name in ("powersgd0", "powersgd33", "powersgd", "fp16", "int4"):
        with pytest.raises(ValueError, match=rf"no candidate '{name}': candidates are 'plain', 'bf16', 'int8', 'fp8'"):
            error_of(name)


# -------------------------------------------------------------------------------------------------------------- costs


def test_a_line_goes_through_two_sizes() -> None:
    cost = cost_of([1000, 3000], [[2.0, 2.0, 7.0], [3.0, 1.0, 3.0]])
    assert cost.seconds(1000) == pytest.approx(2.0)
    assert cost.seconds(3000) == pytest.approx(3.0)
    assert cost.latency == pytest.approx(1.5)


def test_neither_latency_nor_slope_is_negative() -> None:
    assert cost_of([1000, 3000], [[2.0], [1.0]]) == Cost(1.0, 0.0)
    steep = cost_of([1000, 3000], [[0.1], [3.0]])
    assert steep.latency == pytest.approx(0.0)
    assert steep.seconds(3000) == pytest.approx(3.0)


class MadeUp:
    """A trial whose times are those of a line; it notes in which order trials ran."""

    def __init__(self, name: str, cost: Cost, elements: int, log: list[tuple[str, int]]) -> None:
        self.name, self.cost, self.elements, self.log = name, cost, elements, log

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
        assert found[name].latency == pytest.approx(cost.latency)
        assert found[name].per_element == pytest.approx(cost.per_element)
    rounds = [log[-6:], log[-12:-6]]
    assert rounds[0] == rounds[1], "in turn, so that what changes on the machine changes all of them"
    assert [name for name, _ in rounds[0]] == ["plain", "plain", "int8", "int8", "powersgd4", "powersgd4"]


def test_no_more_is_measured_than_the_largest_bucket_or_a_slow_network_asks_for() -> None:
    for per_element, largest in [(1e-12, 2**18), (1e-6, 2**22)]:
        _, log = measured({"plain": Cost(0.0, per_element)}, largest)
        assert max(elements for _, elements in log) <= 2**18
        assert sum(elements * per_element for _, elements in log) < 4.0


def test_on_a_device_trials_are_larger_for_buckets_that_are() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [largest_trial(2**30, device) for device in (cpu, gpu)] == [2**22, 2**24]
    assert [largest_trial(1000, device) for device in (cpu, gpu)] == [1000, 1000]


# ------------------------------------------------------------------------------------------------------- what is said


def test_a_plan_says_why() -> None:
    loads = [
        load(0.001, plain=0.001, int8=0.0005),
        load(0.010, plain=0.040, int8=0.010),
        load(0.011, plain=0.002, int8=0.004),
        load(0.012, plain=0.001),
    ]
    choice = choose(loads)
    plan = plan_of(loads, [2**20, 25 * 2**20, 2**10, 8], choice, error_budget=0.01, measured_plain_seconds=0.06)
    assert plan.compresses
    assert [bucket.choice for bucket in plan.buckets] == ["plain", "int8", "plain", "plain"]
    shown = str(plan).splitlines()
    assert [line.split("  ")[0].strip() for line in shown[:5]] == ["bucket", "0", "1", "2", "3"]
    assert shown[1].endswith("hidden behind backward: int8 would not let the step end earlier")
    assert shown[2].split() == ["1", "25", "int8", "10", "40", "takes", "30", "ms", "less"]
    assert shown[3].endswith("nothing that the error budget allows is faster")
    assert shown[4].endswith("only those of the dtype with most bytes are compressed")
    assert shown[5] == (
        "Compressed: gradients are predicted to be averaged 23 ms after a step begins, 57 % sooner than the 53 ms "
        "without compression."
    )


def test_a_plan_that_compresses_nothing_says_why() -> None:
    loads = [load(0.1, plain=0.004, int8=0.003)]
    plan = plan_of(loads, [2**20], choose(loads), error_budget=0.01, measured_plain_seconds=0.1)
    assert not plan.compresses
    assert plan.buckets[0].reason == "compression gains the step too little"
    assert plan.reason == (
        "Plain: compression would gain less than 3 % of a step. Gradients are ready after 100 ms and averaged after "
        "104 ms."
    )
    nothing = kept_plain([8], "Plain: a single rank.", error_budget=0.01, measured_plain_seconds=0.1)
    assert str(nothing).splitlines()[1:] == [
        "0       7.63e-06  plain       -   -         nothing was tried",
        nothing.reason,
    ]


def test_noise_is_not_slower() -> None:
    assert [is_slower(after, 1.0) for after in (0.5, 1.0, 1.029, 1.031)] == [False, False, False, True]


def test_a_median_leaves_out_what_is_no_number() -> None:
    assert median([math.nan, 3.0, 1.0, 2.0]) == 2.0
    assert median([math.nan]) == -1.0
