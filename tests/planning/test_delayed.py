"""delay_all_reduce_named_params: gradients that wait for another parameter's, and travel together.

That they are averaged as any: random programs.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp.module.parameters import NamedParameters
from fastddp.planning.delayed import Delayed
from on_ranks import on_ranks
from ranks import RankPool


class Chain(nn.Module):
    """Gradients come in the order e, d, c, b, a."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for name in "abcde":
            setattr(self, name, nn.Linear(3, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for name in "abcde":
            x = getattr(self, name)(x).tanh()
        return x


def options(module: Chain, delayed: str = "ed", awaited: str = "b") -> dict[str, Any]:
    return {
        "delay_all_reduce_named_params": [(f"{name}.weight", getattr(module, name).weight) for name in delayed],
        "param_to_hook_all_reduce": getattr(module, awaited).weight,
    }


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step))


@pytest.mark.parametrize("awaited", ["sparse", "unused"])
@on_ranks(2)
def test_what_waits_for_a_parameter_in_no_bucket_is_averaged_too(rank: int, awaited: str) -> None:
    waits = nn.Linear(1, 1, bias=False)
    module = nn.ModuleDict({"waits": waits, "sparse": nn.Embedding(1, 1, sparse=True)})
    module["unused"] = nn.Linear(1, 1, bias=False)
    module.forward = lambda x: waits(x) + module["sparse"](torch.tensor([0]))
    model = fastddp.DistributedDataParallel(
        module,
        static_graph=True,
        delay_all_reduce_named_params=[*waits.named_parameters(prefix="waits")],
        param_to_hook_all_reduce=module[awaited].weight,
    )
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert waits.weight.grad.item() == 1.5


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("rebuilt", [False, True])
@on_ranks(2)
def test_they_travel_in_one_bucket_when_the_awaited_gradient_has_come(rank: int, rebuilt: bool, copied: bool) -> None:
    module = Chain()
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options(module))
    if copied:
        model = copy.deepcopy(model)
    names = {parameter: name[0] for name, parameter in model.module.named_parameters()}
    events: list[str] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("".join(sorted(names[parameter] for parameter in bucket.parameters())).upper())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for name in "abcde":  # gradients as they come, and the exchanges of buckets between them
        getattr(model.module, name).weight.register_hook(lambda _, name=name: events.append(name))
    for step in range(1 + rebuilt):
        events.clear()
        model(batch(rank, step)).square().sum().backward()
    assert [event for event in events if event.isupper()] == ["C", "BDE", "A"]
    assert events.index("BDE") > events.index("b")


def test_other_dtypes_have_a_bucket_directly_after_the_awaited_ones_and_frozen_parameters_none() -> None:
    tensors = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2]
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    named = NamedParameters(["0", "1", "2", "3"], tensors, [])
    delayed = Delayed.from_arguments([("3", tensors[3]), ("frozen", frozen)], tensors[2], named)
    assert delayed is not None
    assert delayed.plan(tensors, [0], [3, 2, 1, 0]) == [[2], [3], [1], [0]]
    assert delayed.plan(tensors, [0], [0, 2, 1, 3]) == [[0], [2], [3], [1]]


def wrap(rank: int, change: dict[str, Any]) -> None:
    module = Chain()
    fastddp.DistributedDataParallel(module, **options(module) | change)


FOREIGN = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"param_to_hook_all_reduce": None}, "need each other"),
        ({"delay_all_reduce_named_params": None}, "need each other"),
        ({"param_to_hook_all_reduce": FOREIGN}, "param_to_hook_all_reduce is not among the parameters"),
        ({"delay_all_reduce_named_params": [("foreign", FOREIGN)]}, "foreign in delay_all_reduce_named_params is not"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(ranks: RankPool, change: dict[str, Any], text: str) -> None:
    (error,) = ranks.errors(wrap, 1, change)
    assert error.type_name == "ValueError"
    assert text in error.message
