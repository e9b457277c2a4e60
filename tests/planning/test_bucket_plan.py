"""The plan: which gradients travel together, as a pure function."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastddp.bucket_plan import plan_buckets


def scalars(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(1, dtype=dtype) for _ in range(count)]


def test_parameters_are_taken_against_the_order_of_registration() -> None:
    assert plan_buckets(scalars(4), caps=[4, 8]) == [[3], [2, 1], [0]]


def test_a_bucket_closes_with_the_parameter_that_reaches_its_cap() -> None:
    parameters = [torch.zeros(3), torch.zeros(100), torch.zeros(1)]
    assert plan_buckets(parameters, caps=[16]) == [[2, 1], [0]]


def test_a_cap_of_zero_gives_every_parameter_a_bucket_of_its_own() -> None:
    assert plan_buckets(scalars(3), caps=[0]) == [[2], [1], [0]]


def test_a_given_order_is_followed() -> None:
    assert plan_buckets(scalars(4), caps=[8], order=[1, 3, 0, 2]) == [[1, 3], [0, 2]]


def test_each_dtype_has_buckets_and_caps_of_its_own() -> None:
    parameters = scalars(2, torch.float32) + scalars(2, torch.float64)
    assert plan_buckets(parameters, caps=[4, 100], order=[0, 2, 1, 3]) == [[0], [2], [1], [3]]


def test_buckets_are_ordered_by_the_parameter_that_completes_them() -> None:
    parameters = [torch.zeros(1, dtype=torch.float64), torch.zeros(1), torch.zeros(1, dtype=torch.float64)]
    assert plan_buckets(parameters, caps=[16], order=[0, 1, 2]) == [[0, 2], [1]]


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float16, torch.float64]), min_size=40, max_size=40),
    caps=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_plan_is_a_partition_in_order_within_its_caps(
    sizes: list[int], dtypes: list[torch.dtype], caps: list[int], data: st.DataObject
) -> None:
    parameters = [torch.zeros(n, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=False)]
    order = data.draw(st.permutations(range(len(parameters))))
    plan = plan_buckets(parameters, caps, order)

    assert sorted(index for bucket in plan for index in bucket) == list(range(len(parameters)))
    place = {index: position for position, index in enumerate(order)}
    closed: dict[torch.dtype, int] = {}
    for bucket in plan:
        assert [place[index] for index in bucket] == sorted(place[index] for index in bucket)
        (dtype,) = {parameters[index].dtype for index in bucket}
        cap = caps[min(closed.get(dtype, 0), len(caps) - 1)]
        closed[dtype] = closed.get(dtype, 0) + 1
        assert sum(parameters[index].nbytes for index in bucket[:-1]) < cap or len(bucket) == 1
