"""The plan: which gradients travel together, as a pure function."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastddp.bucket_plan import plan_buckets

FP32 = torch.float32


def test_without_an_order_the_last_that_was_registered_travels_first() -> None:
    parameters = [torch.zeros(size, dtype=FP32) for size in (3, 100, 1)]
    assert plan_buckets(parameters, [16], None) == [[2, 1], [0]]


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
