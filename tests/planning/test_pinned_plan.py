"""The bucket plan as users see it: printed, saved, pinned; and what becomes of plans that cannot be used."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fastddp.planning.bucket_plan import BucketPlan, PlannedBucket, PlannedParameter
from fastddp.planning.pinned_plan import fit
from hooks_by_name import averages
from on_ranks import on_ranks
from ranks import RankPool


def planned(*buckets: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> BucketPlan:
    """A plan from name -> shape of each bucket."""
    return BucketPlan(
        tuple(
            PlannedBucket(number, tuple(PlannedParameter(name, shape, dtype) for name, shape in bucket.items()), "cpu")
            for number, bucket in enumerate(buckets)
        )
    )


PLAN = planned({"b": (3,), "a": (2, 3)}, {"scale": ()})


def test_a_plan_prints_as_a_table_and_knows_its_bytes() -> None:
    assert [line.split() for line in str(PLAN).splitlines()][1:4] == [
        ["0", "2", "parameters", "float32", "cpu", "36"],
        ["b", "(3,)", "12"],
        ["a", "(2,", "3)", "24"],
    ]
    assert str(PLAN).split()[-6:] == ["3", "parameters", "in", "2", "buckets", "40"]
    assert (PLAN.bytes, [bucket.bytes for bucket in PLAN.buckets]) == (40, [36, 4])


# ------------------------------------------------------------------------------------------------------- its file


def test_a_file_is_replaced_as_a_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_text()
    with path.open() as reader:
        FITTING.save(path)
        assert reader.read() == before
    PLAN.save(path)
    assert BucketPlan.load(path) == BucketPlan.load(str(path)) == PLAN
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"buckets": [', '"buckets": null, "more": [', "holds no valid bucket plan"),
        ('"shape": [\n      3\n     ],', "", r"buckets\[0\].parameters\[0\].shape is missing. Write it anew"),
        ("float32", "float31", 'torch has no dtype "float31"'),
        ("float32", "nn", 'torch has no dtype "nn"'),
    ],
)
def test_a_file_with_something_else_in_it_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=complaint):
        BucketPlan.load(path)


# --------------------------------------------------------------------------------------------------- does it fit?


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"b": None}, "'b' of bucket 0 is none of the module's"),
        ({"c": torch.zeros(1)}, "the module's parameter 'c' is in no bucket"),
        ({"a": torch.zeros(3, 2)}, r"'a' of bucket 0 has shape \(2, 3\) and torch.float32 in the plan"),
        ({"a": torch.zeros(2, 3).half()}, r"'a' of bucket 0 .* in the plan, and .*float16 in the module"),
        ({"a": torch.zeros(2, 3, device="meta")}, "'a' of bucket 0 is on meta, and the bucket's first one on cpu"),
    ],
)
def test_a_plan_for_another_module_is_refused(changes: dict[str, Tensor | None], complaint: str) -> None:
    tensors = {"scale": torch.zeros(()), "a": torch.zeros(2, 3), "b": torch.zeros(3)} | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=complaint):
        fit(PLAN, list(tensors), list(tensors.values()))


# ---------------------------------------------------------------------------------------------------------- a model


class Reversed(nn.Module):
    """Its gradients come in the order of registration, so that rebuilt buckets differ from the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.third * self.second * self.first).sum()


def wrapped(**options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(Reversed(), **options)


def names(model: fastddp.DistributedDataParallel) -> list[list[str]]:
    return [[parameter.name for parameter in bucket.parameters] for bucket in model.bucket_plan().buckets]


def steps(model: nn.Module, rank: int, number: int = 2) -> list[float]:
    for _ in range(number):
        model.zero_grad()
        model(torch.full((4,), rank + 1.0)).backward()
    return [parameter.grad[0].item() for parameter in model.parameters()]


@on_ranks(2)
def test_a_models_plan_is_the_one_in_force(rank: int) -> None:
    model = wrapped(bucket_cap_mb=0)
    for expected in (["third", "second", "first"], ["third", "second", "first"], ["first", "second", "third"]):
        assert names(model) == [[name] for name in expected]
        steps(model, rank, 1)


PINNED = [["second", "first"], ["third"]]
FITTING = planned({"second": (4,), "first": (4,)}, {"third": (4,)})


@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
@pytest.mark.parametrize("how", ["as built", "from a file", "pickled", "copied"])
@on_ranks(2)
def test_a_pinned_plan_is_never_rebuilt(rank: int, how: str, view: bool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    FITTING.save(path)
    model = wrapped(buckets={"from a file": path, "pickled": str(path)}.get(how, FITTING), gradient_as_bucket_view=view)
    if how == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif how == "copied":
        model = copy.deepcopy(model)
    assert names(model) == PINNED
    assert steps(model, rank, 3) == [1.5, 1.5, 1.5]
    assert names(model) == PINNED


@on_ranks(2)
def test_gradients_travel_in_the_pinned_buckets(rank: int) -> None:
    seen: list[int] = []

    def hook(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().numel())
        return averages(state, bucket)

    model = wrapped(buckets=FITTING)
    model.register_comm_hook(None, hook)
    steps(model, rank, 2)
    assert seen == [8, 4, 8, 4]


# ------------------------------------------------------------------------------------------ errors on every rank


def wrapped_with(rank: int, plans: list[object], options: dict[str, Any]) -> None:
    wrapped(buckets=plans[rank], **options)


def with_another_module(rank: int) -> None:
    fastddp.DistributedDataParallel(nn.Linear(2, 2 + rank), buckets=FITTING)


@pytest.mark.parametrize(
    ("does", "arguments", "text"),
    [
        (wrapped_with, ([FITTING] * 2, {"bucket_cap_mb": 1}), "Leave out one"),
        (wrapped_with, ([FITTING] * 2, {"bucket_cap_mb_list": [1]}), "Leave out one"),
        (wrapped_with, ([PLAN] * 2, {}), "parameter 'b' of bucket 0"),
        (with_another_module, (), "do not hold the same model"),  # and not that the plan does not fit
    ],
)
def test_what_is_wrong_on_all_ranks_is_said_on_each(ranks: RankPool, does: Any, arguments: Any, text: str) -> None:
    for error in ranks.errors(does, 2, *arguments):
        assert text in error.message


OTHER = planned({"second": (4,)}, {"first": (4,), "third": (4,)})
SHORTER = planned({"second": (4,), "first": (4,)})
DIFFERING: dict[str, tuple[list[object], tuple[str, str]]] = {
    "another bucket": ([FITTING, OTHER], ("'first' of shape (4,), torch.float32, in bucket 0", "in bucket 1")),
    "fits on rank 0 alone": ([FITTING, SHORTER], ("'second' of shape (4,)", "'third' is in no bucket")),
    "no file on rank 1": ([FITTING, "/nowhere/plan.json"], ("'second' of", "No such file or directory: '/nowhere")),
    "none on rank 0": ([None, FITTING], ("none of this number", "'second' of shape (4,), torch.float32, in bucket 0")),
    "no plan but a number": ([FITTING, 3], ("'second' of", "a plan that cannot be used: buckets is")),
}


# Without init_sync, ranks without a plan compare nothing.
WITHOUT_INIT_SYNC = [(case, False) for case, (plans, _) in DIFFERING.items() if None not in plans]


@pytest.mark.parametrize(("case", "init_sync"), [*((case, True) for case in DIFFERING), *WITHOUT_INIT_SYNC])
def test_plans_that_differ_raise_on_every_rank(ranks: RankPool, case: str, init_sync: bool) -> None:
    plans, (on_rank_0, on_rank_1) = DIFFERING[case]
    first, second = ranks.errors(wrapped_with, 2, plans, {"init_sync": init_sync})
    assert first.type_name == "RanksDiffer"
    assert first.message == second.message
    zero, one = first.message.partition("  rank 1: ")[::2]
    assert "not given the same bucket plan" in zero
    assert on_rank_0 in zero
    assert on_rank_1 in one
