"""The cost model of collectives, that the plan found is the best there is, and the plan of given caps."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastddp.planning.bucket_plan import Buckets, plan_buckets
from fastddp.planning.model import Gradient, Link, best_plan, end_of

# ------------------------------------------------------------------------------------------------------------ the model


def test_collectives_wait_for_their_gradients_and_for_each_other() -> None:
    gradients = [Gradient(1.0, 10, "a"), Gradient(2.0, 20, "a"), Gradient(9.0, 10, "a")]
    link = Link(latency=0.5, bandwidth=10.0)
    # 1 + 0.5 + 1 = 2.5, until which the second waits; + 0.5 + 2 = 5; the third waits for its gradient: 9 + 0.5 + 1.
    assert end_of([[0], [1], [2]], gradients, link) == 10.5
    assert end_of([[0], [1]], gradients, link) == 5.0
    assert end_of([[0, 1]], gradients, link) == 2 + 0.5 + 3


# ----------------------------------------------------------------------------------------------------------- the search


def partitions(line: Sequence[int]) -> Iterator[Buckets]:
    for cuts in itertools.product((False, True), repeat=max(0, len(line) - 1)):
        buckets = [[line[0]]]
        for cut, index in zip(cuts, line[1:], strict=True):
            if cut:
                buckets.append([])
            buckets[-1].append(index)
        yield buckets


def all_plans(gradients: Sequence[Gradient]) -> Iterator[Buckets]:
    """All ways to cut each kind's gradients; buckets in the order of their last gradients."""
    order = sorted(range(len(gradients)), key=lambda index: gradients[index].ready)
    kinds = dict.fromkeys(gradient.kind for gradient in gradients)
    lines = [[index for index in order if gradients[index].kind == kind] for kind in kinds]
    for choice in itertools.product(*(list(partitions(line)) for line in lines)):
        yield sorted(itertools.chain(*choice), key=lambda bucket: order.index(bucket[-1]))


times = st.integers(0, 12).map(lambda n: n / 4) | st.floats(0, 3)
gradients_of = st.lists(st.builds(Gradient, times, st.integers(0, 9), st.sampled_from("aab")), min_size=1, max_size=8)
links = st.builds(Link, st.sampled_from([0.0, 0.1, 0.5]) | st.floats(0, 1), st.sampled_from([1.0, 3.0, 50.0]))
sizes = st.just(math.inf) | st.integers(0, 20)


def fits(plan: Buckets, gradients: Sequence[Gradient], largest: float) -> bool:
    return all(len(bucket) == 1 or sum(gradients[index].bytes for index in bucket) <= largest for bucket in plan)


@given(gradients_of, links, sizes)
def test_no_plan_in_the_order_of_readiness_ends_before_the_one_found(
    gradients: list[Gradient], link: Link, largest: float
) -> None:
    plan = best_plan(gradients, link, largest)
    others = (other for other in all_plans(gradients) if fits(other, gradients, largest))
    assert end_of(plan, gradients, link) == min(end_of(other, gradients, link) for other in others)
    assert fits(plan, gradients, largest)
    assert sorted(itertools.chain(*plan)) == list(range(len(gradients)))
    for bucket in plan:
        assert len({gradients[index].kind for index in bucket}) == 1
        assert [gradients[index].ready for index in bucket] == sorted(gradients[index].ready for index in bucket)
    last_ready = [gradients[bucket[-1]].ready for bucket in plan]
    assert last_ready == sorted(last_ready)


def test_buckets_of_no_use_are_not_made() -> None:
    gradients = [Gradient(float(second), 1, "a") for second in range(10)]
    # What comes before 8 is through long before 9, in one collective as well as in nine.
    assert [len(bucket) for bucket in best_plan(gradients, Link(latency=0.2, bandwidth=100.0))] == [9, 1]


def test_a_bucket_stops_growing_where_its_latency_no_longer_counts() -> None:
    gradients = [Gradient(float(second), 1, "a") for second in range(100)]
    link = Link(latency=0.01, bandwidth=10.0)  # 0.1 s each: two of them take longer than 16 latencies
    assert {len(bucket) for bucket in best_plan(gradients, link)} == {1, 2}


@pytest.mark.tier("nightly")
def test_thousands_of_gradients_are_planned_in_few_steps_and_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = random.Random(20)
    arrivals = itertools.accumulate(shuffled.random() * 1e-4 for _ in range(5000))
    gradients = [Gradient(at, shuffled.choice([512, 4096, 2**20]), shuffled.choice("abc")) for at in arrivals]
    link, seconds, asked = Link(1e-4, 1e9), Link.seconds, itertools.count()
    with monkeypatch.context() as patched:
        patched.setattr(Link, "seconds", lambda self, size: (next(asked), seconds(self, size))[1])
        plan = best_plan(gradients, link)
    assert 0 < next(asked) < 150_000  # exact, it would be 12 million for one kind
    # No plan ends before all bytes have travelled and one latency has been paid.
    least = gradients[0].ready + link.seconds(sum(gradient.bytes for gradient in gradients))
    assert end_of(plan, gradients, link) < 1.02 * least


def test_more_kinds_than_can_be_searched_are_planned_too() -> None:
    gradients = [Gradient(float(number), 8, f"kind {number % 40}") for number in range(200)]
    plan = best_plan(gradients, Link(1.0, 1.0))
    assert sorted(itertools.chain(*plan)) == list(range(200))
    assert all(len({gradients[index].kind for index in bucket}) == 1 for bucket in plan)


# ----------------------------------------------------------------------------------------------------------- given caps


FP32 = torch.float32


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    dtypes=st.lists(st.sampled_from([FP32, torch.float16, torch.float64]), min_size=40, max_size=40),
    caps=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_bucket_is_closed_by_what_reaches_the_cap_of_its_dtype(
    sizes: list[int], dtypes: list[torch.dtype], caps: list[int], data: st.DataObject
) -> None:
    parameters = [torch.zeros(n, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=False)]
    order = data.draw(st.permutations(range(len(parameters))))
    closed: list[list[int]] = []
    begun: dict[torch.dtype, list[int]] = {}
    numbers = dict.fromkeys(dtypes, 0)
    for index in order:
        dtype = parameters[index].dtype
        bucket = begun.setdefault(dtype, [])
        bucket.append(index)
        if sum(parameters[member].nbytes for member in bucket) >= caps[min(numbers[dtype], len(caps) - 1)]:
            closed.append(begun.pop(dtype))
            numbers[dtype] += 1
    plan = plan_buckets(parameters, caps, order)
    assert plan[: len(closed)] == closed
    assert sorted(plan[len(closed) :]) == sorted(begun.values())
