"""Gradients that are handed over before their node of autograd's graph has ended, as the node of a compiled graph does.

``Graph`` is such a node. tests/torch_compat/test_compile.py has real ones.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fake_cuda
import fastddp
from fake_cuda import DEVICE
from hooks_by_name import HOOKS, averages
from on_ranks import gradients, on_ranks

COUNT = 4


def hand_over(gradient: Tensor, parameter: Tensor) -> None:
    torch.ops.fastddp.hand_over(gradient, torch.ops.fastddp.identities([parameter]), 0)


class Graph(torch.autograd.Function):
    """The sum of parameters, times x. In backward, ``then`` gets the gradients after each handover."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[list[Tensor]], None], share: bool, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.then, ctx.share = then, share
        return sum(parameters) * x  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        found = [gradient * x] * len(parameters)
        if not ctx.share:
            found = [one * (place + 1) for place, one in enumerate(found)]
        for parameter, one in zip(reversed(parameters), reversed(found), strict=True):
            hand_over(one, parameter)
            ctx.then(found)
        return (gradient, None, None, *found)


class Model(nn.Module):
    def __init__(self, then: Callable[[list[Tensor]], None] = lambda found: None, share: bool = False) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((3, 20), 0.5 + place)) for place in range(COUNT))
        self.then, self.share = then, share

    def forward(self, x: Tensor) -> Tensor:
        return Graph.apply(x, self.then, self.share, *self.weights)  # type: ignore[no-any-return,no-untyped-call]


def wrap(module: nn.Module, **options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(module, **({"bucket_cap_mb": 0} | options))


def batch(rank: int, step: int) -> Tensor:
    """Of small integers, whose averages no rounding changes."""
    return torch.arange(60.0).view(3, 20).remainder(7) + 2 * rank + 4 * step


def average(step: int) -> Tensor:
    return (batch(0, step) + batch(1, step)) / 2


@on_ranks(2)
def test_a_bucket_travels_as_soon_as_its_gradient_is_handed_over(rank: int) -> None:
    calls: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        return averages(state, bucket)

    after: list[int] = []
    model = wrap(Model(lambda found: after.append(len(calls))))
    model.register_comm_hook(None, hook)
    for step in range(3):
        after.clear()
        calls.clear()
        model.zero_grad()
        model(batch(rank, step)).sum().backward()
        assert after == [1, 2, 3, 4]
        assert all(map(torch.equal, gradients(model), [average(step) * (place + 1) for place in range(COUNT)]))


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("hook", [None, "fp16", "int8", "PowerSGD"])
@on_ranks(2)
def test_the_memory_of_what_is_handed_over_stays_as_it_is(
    rank: int, hook: str | None, options: dict[str, Any], share: bool
) -> None:
    check_memory_stays(rank, "cpu", hook, share, options)


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("hook", [None, "fp16"])
@on_ranks(2, "simulated_ranks")
def test_so_it_does_on_a_device_with_streams(rank: int, hook: str | None, share: bool) -> None:
    check_memory_stays(rank, DEVICE, hook, share, {})


def check_memory_stays(rank: int, device: str, hook: str | None, share: bool, options: dict[str, Any]) -> None:
    """Other nodes of autograd's may read it later. Here some of it is the gradient of several parameters at once."""
    seen: list[list[Tensor]] = []

    def then(found: list[Tensor]) -> None:
        seen.append([*found, *(one.clone() for one in found)])

    model = wrap(Model(then, share).to(device), **options)
    if hook is not None:
        state, function = HOOKS[hook]
        model.register_comm_hook(state(), function)
    for step in range(3):
        seen.clear()
        model.zero_grad()
        launched = len(fake_cuda.launches()) if device == DEVICE else 0
        model(batch(rank, step).to(device)).sum().backward()
        if device == DEVICE and hook is None and not share:  # gradients have moved into the wire
            assert [name.split("_")[1] for name in fake_cuda.launches()[launched:]] == ["pack"] * COUNT
        first = seen[0][COUNT:]
        for one in seen:
            assert all(map(torch.equal, one[COUNT:], first))
            assert all(map(torch.equal, one[:COUNT], first))  # still, after backward
        memory = [parameter.grad.data_ptr() for parameter in model.parameters()]  # type: ignore[union-attr]
        assert len({*memory}) == COUNT
        if hook is None:
            expected = [average(step) * (1 if share else place + 1) for place in range(COUNT)]
            assert all(map(torch.equal, on_cpu(model), expected))


@on_ranks(2)
def test_so_it_does_where_a_gradient_comes_in_two_parts(rank: int) -> None:
    """Each checkpoint has a backward of its own, which hands over a part of each gradient."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-untyped-call]
            return x

    model = wrap(Twice(lambda found: seen.append((found[0], found[0].clone()))), static_graph=True)
    for step in range(4):
        seen.clear()
        model.zero_grad()
        model(batch(rank, step).requires_grad_()).sum().backward()
        assert len(seen) == 2 * COUNT
        assert all(torch.equal(memory, before) for memory, before in seen)


@on_ranks(2)
def test_so_it_does_where_another_wrapper_has_one_of_the_parameters(rank: int) -> None:
    """Then averages are written where gradients are, when backward has ended."""
    seen: list[tuple[Tensor, Tensor]] = []
    model = wrap(Model(lambda found: seen.append((found[0], found[0].clone())), share=True), bucket_cap_mb=1)
    layer = nn.Linear(20, 3, bias=False)
    layer.weight = model.module.weights[0]
    other = wrap(layer)
    for step in range(3):
        seen.clear()
        model.zero_grad()
        x = batch(rank, step)
        (model(x).sum() + other(x).sum()).backward()
        assert all(torch.equal(memory, before) for memory, before in seen)
        assert all(map(torch.equal, gradients(model)[1:], [average(step)] * (COUNT - 1)))


@on_ranks(2)
def test_no_optimizer_steps_while_the_node_may_read_parameters(rank: int) -> None:
    seen: list[list[Tensor]] = []

    def then(found: list[Tensor]) -> None:
        time.sleep(0.05)  # for a bucket to arrive
        seen.append([one.detach().clone() for one in model.parameters()])

    model = wrap(Model(then))
    weights = [*model.parameters()]
    # As for optimizers inside backward.
    model.reducer.on_averaged(lambda averaged: [weights[index].data.sub_(1) for index in averaged])
    for step in range(3):
        seen.clear()
        before = [one.detach().clone() for one in model.parameters()]
        model(batch(rank, step)).sum().backward()
        assert all(map(torch.equal, seen[-1], before))
        assert not any(map(torch.equal, model.parameters(), before))


def on_cpu(model: nn.Module) -> list[Tensor]:
    return [gradient.cpu() for gradient in gradients(model)]


@on_ranks(2)
def test_gradients_that_are_there_are_added_to(rank: int) -> None:
    model = wrap(Model())
    for step in range(4):
        with model.no_sync():
            model(batch(rank, 2 * step)).sum().backward()
        model(batch(rank, 2 * step + 1)).sum().backward()
    total = sum(average(step) for step in range(8))
    assert all(map(torch.equal, gradients(model), [total * (place + 1) for place in range(COUNT)]))


@on_ranks(2)
def test_a_gradient_to_which_something_is_added_later_comes_when_all_of_it_is_there(rank: int) -> None:
    model = wrap(Model())
    for step in range(3):
        model.zero_grad()
        late = model.module.weights[1]
        # The engine reaches what was used first last.
        more = (late * 3).sum()
        (model(batch(rank, step)).sum() + more).backward()
        expected = [average(step) * (place + 1) for place in range(COUNT)]
        expected[1] += 3
        assert all(map(torch.equal, gradients(model), expected))


@on_ranks(2, "simulated_ranks")
def test_after_a_backward_that_fails_gradients_have_memory_of_their_own(rank: int) -> None:
    """On a device, where a bucket is packed when it is complete."""

    def fail(found: list[Tensor]) -> None:
        first, second = (model.module.weights[place].grad for place in (3, 2))
        if failing and second is not None:
            assert first.data_ptr() == second.data_ptr() == found[0].data_ptr()  # nothing is copied
            raise ValueError("after the first two")

    failing = False
    model = wrap(Model(fail, share=True).to(DEVICE), bucket_cap_mb=1)
    for step in range(3):
        failing = step == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(batch(rank, step).to(DEVICE)).sum()
        model.zero_grad(set_to_none=failing)
        if failing:
            with pytest.raises(ValueError, match="after the first two"):
                loss.backward()
        else:
            loss.backward()
            assert all(map(torch.equal, on_cpu(model), [average(step)] * COUNT))


@on_ranks(2)
def test_a_parameter_of_which_others_have_hooks_is_not_accumulated_early(rank: int) -> None:
    seen: list[Any] = []
    model = wrap(Model(lambda found: seen.append([parameter.grad is None for parameter in model.parameters()])))
    of_tensor, after = model.module.weights[3], model.module.weights[2]
    of_tensor.register_hook(lambda gradient: gradient * 2)
    after.register_post_accumulate_grad_hook(lambda parameter: None)
    model(batch(rank, 0)).sum().backward()
    assert [one[2:] for one in seen] == [[True, True]] * 4
    assert [one[0] for one in seen] == [True, True, True, False]
    expected = [average(0) * factor for factor in (1, 2, 3, 8)]
    assert all(map(torch.equal, gradients(model), expected))


@on_ranks(1)
def test_what_no_model_waits_for_is_left_alone(rank: int) -> None:
    parameter = nn.Parameter(torch.ones(3))
    hand_over(torch.ones(3), parameter)  # of no model
    model = wrap(Model())
    own = model.module.weights[0]
    hand_over(torch.ones(3, 20), own)  # outside of a backward
    with model.no_sync():
        loss = model(batch(rank, 0)).sum()
    seen: list[Any] = []
    model.module.then = lambda found: seen.append(own.grad)
    with model.no_sync():
        loss.backward()
        model(batch(rank, 0)).sum().backward(inputs=[own])
    assert parameter.grad is None
    assert seen[-1] is not None  # of the backward before
    assert torch.equal(own.grad, 2 * batch(0, 0))  # type: ignore[arg-type]
