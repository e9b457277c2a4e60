"""The plan: which gradients travel together, as a pure function."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastddp.bucket_plan import plan_buckets

FP32, FP64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("parameters", "caps", "order", "plan"),
    [
        ([(1, FP32)] * 4, [4, 8], None, [[3], [2, 1], [0]]),  # against the order of registration
        ([(3, FP32), (100, FP32), (1, FP32)], [16], None, [[2, 1], [0]]),  # what reaches the cap closes a bucket
        ([(1, FP32)] * 3, [0], None, [[2], [1], [0]]),
        ([(1, FP32)] * 4, [8], [1, 3, 0, 2], [[1, 3], [0, 2]]),
        ([(1, FP32)] * 2 + [(1, FP64)] * 2, [4, 100], [0, 2, 1, 3], [[0], [2], [1], [3]]),  # caps of each dtype's own
        ([(1, FP64), (1, FP32), (1, FP64)], [16], [0, 1, 2], [[0, 2], [1]]),  # in the order of completion
    ],
)
def test_which_gradients_travel_together(
    parameters: list[tuple[int, torch.dtype]], caps: list[int], order: list[int] | None, plan: list[list[int]]
) -> None:
    assert plan_buckets([torch.zeros(size, dtype=dtype) for size, dtype in parameters], caps, order) == plan


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
