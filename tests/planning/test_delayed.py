"""delay_all_reduce_named_params: gradients that wait for that of another parameter, and travel together."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

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


def gradients(rank: int, delayed: str) -> list[list[Tensor]]:
    everything = []
    for cls in (fastddp.DistributedDataParallel, TorchDDP):
        module = Chain()
        model = cls(module, **options(module, delayed))
        seen = []
        for step in range(3):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()  # torch's gradients live in a buffer that it clears only in place
            model(batch(rank, step)).square().sum().backward()
            time.sleep(0.2 if cls is TorchDDP else 0)  # torch's does not wait for the delayed ones
            seen += [parameter.grad.clone() for parameter in module.parameters()]
        everything.append(seen)
        dist.barrier()
    return everything


@pytest.mark.parametrize("delayed", ["ed", "cde"])
def test_gradients_are_averaged_as_torchs_are(ranks: RankPool, delayed: str) -> None:
    for ours, theirs in ranks.run(gradients, 2, delayed):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def gradient_that_waits_for(rank: int, awaited: str) -> float:
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
    return waits.weight.grad.item()


@pytest.mark.parametrize("awaited", ["sparse", "unused"])
def test_what_waits_for_a_parameter_in_no_bucket_is_averaged_too(ranks: RankPool, awaited: str) -> None:
    assert ranks.run(gradient_that_waits_for, 2, awaited) == [1.5, 1.5]


def order_of_exchange(rank: int, rebuilt: bool) -> list[str]:
    """Gradients as they come, and the exchanges of buckets between them."""
    module = Chain()
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options(module))
    names = {parameter: name[0] for name, parameter in module.named_parameters()}
    events: list[str] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("".join(sorted(names[parameter] for parameter in bucket.parameters())).upper())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for name in "abcde":
        getattr(module, name).weight.register_hook(lambda _, name=name: events.append(name))
    for step in range(1 + rebuilt):
        events.clear()
        model(batch(rank, step)).square().sum().backward()
    return events


@pytest.mark.parametrize("rebuilt", [False, True])
def test_they_travel_in_one_bucket_when_the_awaited_gradient_has_come(ranks: RankPool, rebuilt: bool) -> None:
    for events in ranks.run(order_of_exchange, 2, rebuilt):
        assert [event for event in events if event.isupper()] == ["C", "BDE", "A"]
        assert events.index("BDE") > events.index("b")


@pytest.mark.parametrize("delayed", ["ed", "abcde"])
@on_ranks(2)
def test_under_no_sync_they_stay_local_and_travel_with_the_rest(rank: int, delayed: str) -> None:
    module, plain = Chain(), Chain()
    model = fastddp.DistributedDataParallel(module, **options(module, delayed))
    reference = fastddp.DistributedDataParallel(plain)
    local = Chain()
    seen = []
    with model.no_sync(), reference.no_sync():
        for trained in (model, reference, local):
            trained(batch(rank, 0)).square().sum().backward()
    pairs = zip(module.parameters(), local.parameters(), strict=True)
    seen.append(all(torch.equal(one.grad, other.grad) for one, other in pairs))
    for trained in (model, reference):
        trained(batch(rank, 1)).square().sum().backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    seen.append(all(torch.equal(one.grad, other.grad) for one, other in pairs))
    assert seen == [True, True]


def parameters(dtypes: list[torch.dtype]) -> NamedParameters:
    tensors = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in dtypes]
    return NamedParameters([str(index) for index in range(len(tensors))], tensors, [])


def test_other_dtypes_have_a_bucket_directly_behind_the_awaited_ones() -> None:
    named = parameters([torch.float32, torch.float64, torch.float32, torch.float64])
    delayed = Delayed.from_arguments([("3", named.tensors[3])], named.tensors[2], named)
    assert delayed is not None
    assert delayed.plan(named.tensors, [0], [3, 2, 1, 0]) == [[2], [3], [1], [0]]
    assert delayed.plan(named.tensors, [0], [0, 2, 1, 3]) == [[0], [2], [3], [1]]


def test_frozen_parameters_among_them_are_left_out() -> None:
    named = parameters([torch.float32] * 2)
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    delayed = Delayed.from_arguments([("frozen", frozen)], named.tensors[0], named)
    assert delayed == Delayed(0, frozenset())


def copied(rank: int) -> bool:
    module = Chain()
    model = copy.deepcopy(fastddp.DistributedDataParallel(module, bucket_cap_mb=0, **options(module)))
    return model.engine.first_plan() == [[2], [1, 4, 3], [0]]


def test_a_copy_delays_the_same_parameters(ranks: RankPool) -> None:
    assert ranks.run(copied, 1) == [True]


def wrap(rank: int, cls: type, change: dict[str, Any]) -> None:
    module = Chain()
    foreign = nn.Parameter(torch.ones(1))
    replaced = {
        name: [("foreign", foreign)] if value == "foreign list" else foreign if value == "foreign" else value
        for name, value in change.items()
    }
    cls(module, **{**options(module), **replaced})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"param_to_hook_all_reduce": None}, "need each other"),
        ({"delay_all_reduce_named_params": None}, "need each other"),
        ({"param_to_hook_all_reduce": "foreign"}, "param_to_hook_all_reduce is not among the parameters"),
        ({"delay_all_reduce_named_params": "foreign list"}, "foreign in delay_all_reduce_named_params is not among"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(ranks: RankPool, change: dict[str, Any], text: str) -> None:
    (error,) = ranks.errors(wrap, 1, fastddp.DistributedDataParallel, change)
    assert error.type_name == "ValueError"
    assert text in error.message
    if None in change.values():
        (theirs,) = ranks.errors(wrap, 1, TorchDDP, change)
        assert theirs.type_name == "ValueError"
