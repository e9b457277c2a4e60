"""Gradients of any backward over a replicated module are averages, whichever of its methods the loss came by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastddp
from by_hand import Loop, Net, Training, averaged, check_loop, inputs, net
from on_ranks import differences, gradients, of_ranks, on_ranks

FIND: dict[str, Any] = {"find_unused_parameters": True}
STATIC: dict[str, Any] = {"static_graph": True}
ABOUT = {"tolerance": 1e-6}


def penalty(model: Any, x: Tensor) -> Tensor:
    return x.mean() * model.penalty()


def one_head(model: Any, x: Tensor, number: int) -> Tensor:
    return model.of_left(x) if number % 2 else model.of_right(x)


Loss = Callable[[Any, Tensor, int], Tensor]
LOSSES: dict[str, tuple[list[Loss], dict[str, Any]]] = {
    "another method": ([lambda m, x, n: m.score(x)], {}),
    "two methods in one loss": ([lambda m, x, n: m.of_left(x) + m.of_right(x)], {}),
    "forward and a method in one loss": ([lambda m, x, n: m(x) + m.score(x)], {}),
    "forward and a method in turns": ([lambda m, x, n: m(x) if n % 2 else m.score(x)], {}),
    "parameters alone": ([lambda m, x, n: penalty(m, x)], {}),
    "penalty, then a method": ([lambda m, x, n: penalty(m, x), lambda m, x, n: m.score(x)], {}),
    "forward, then penalty": ([lambda m, x, n: m(x), lambda m, x, n: penalty(m, x)], {}),
    "a submodule": ([lambda m, x, n: m.trunk(x).square().mean()], FIND),
    "a method, searched": ([lambda m, x, n: m.score(x)], FIND),
    "a method, static": ([lambda m, x, n: m.score(x)], STATIC),
    "a method, small buckets": ([lambda m, x, n: m.score(x)], {"bucket_cap_mb": 0}),
    "a method, views": ([lambda m, x, n: m.score(x)], {"gradient_as_bucket_view": True}),
    "other parameters on each rank": (
        [lambda m, x, n: m.of_left(x) if (dist.get_rank() + n) % 2 else m.of_right(x)],
        FIND,
    ),
    "two backwards, searched": ([lambda m, x, n: m.of_left(x), lambda m, x, n: m.of_right(x)], {**FIND, **ABOUT}),
    "two backwards, static": ([lambda m, x, n: m.of_left(x), lambda m, x, n: m.of_right(x)], {**STATIC, **ABOUT}),
    "microbatches": ([lambda m, x, n: m.score(x[:2]), lambda m, x, n: m.score(x[2:])], ABOUT),
}


@pytest.mark.parametrize("which", LOSSES)
@on_ranks(2)
def test_gradients_are_averages_by_whatever_way_the_loss_came(rank: int, which: str) -> None:
    losses, options = LOSSES[which]

    def loop(training: Training, number: int) -> None:
        for loss in losses:
            training.backward(loss(training.modules[0], inputs(rank, number), number))
        training.step()

    check_loop(rank, loop, **options)


# ----------------------------------------------------------------------------------------------------- several modules


def gan(training: Training, number: int) -> None:
    """The loss of the generator goes through the discriminator, too."""
    [generator, discriminator], x = training.modules, inputs(training.rank, number)
    made = generator.trunk(x).tanh()
    training.backward(discriminator(made.detach()).mean() - discriminator(x.repeat(1, 2)[:, :4]).mean())
    training.step(1)
    training.backward(discriminator(generator.trunk(x).tanh()).mean() + 0 * generator.penalty())
    training.step(0)


def dpo(training: Training, number: int) -> None:
    [policy], x = training.modules, inputs(training.rank, number)
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        aim = reference.score(x)
    training.backward((policy.score(x) - policy.score(-x) - aim).square())
    training.step()


@pytest.mark.parametrize("loop", [gan, dpo])
@on_ranks(2)
def test_several_models_train_side_by_side(rank: int, loop: Loop) -> None:
    torch.manual_seed(1)
    check_loop(rank, loop, [net(), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))] if loop is gan else ())


# ------------------------------------------------------------------------------------------------------------- refused


@on_ranks(2)
def test_by_default_a_backward_must_reach_all_parameters_before_the_step(rank: int) -> None:
    model = fastddp.replicate(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.trunk(inputs(rank)).sum().backward()
    with pytest.raises(RuntimeError, match=r"(?s)left\.weight.*FD005"):
        optimizer.step()


@on_ranks(2)
def test_by_default_a_second_backward_through_the_same_parameters_is_refused(rank: int) -> None:
    model = fastddp.replicate(net())
    model.of_left(inputs(rank)).backward()
    with pytest.raises(RuntimeError, match="FD006"):
        model.of_right(inputs(rank)).backward()


@on_ranks(2)
def test_two_backwards_may_bring_the_gradients_of_one_window_where_they_share_none(rank: int) -> None:
    model = fastddp.replicate(nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}))
    x = inputs(rank)
    expected = averaged(model, lambda alone: alone["actor"](x).sum() + alone["critic"](x).square().sum())
    model["actor"](x).sum().backward()
    model["critic"](x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert differences(expected, gradients(model)) == []


# -------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("how", ["no_sync", "set_requires_gradient_sync"])
@pytest.mark.parametrize("by", ["__call__", "score"])
@on_ranks(2)
def test_gradients_add_up_and_the_last_backward_averages_the_sum(rank: int, how: str, by: str) -> None:
    def loss(model: Net, number: int) -> Tensor:
        return getattr(model, by)(inputs(rank, number))

    model = fastddp.replicate(net())
    for _ in range(2):
        model.zero_grad()
        if how == "no_sync":
            with model.no_sync():
                loss(model, 1).backward()
        else:
            model.set_requires_gradient_sync(False)
            loss(model, 1).backward()
            model.set_requires_gradient_sync(True)
        local = net()
        loss(local, 1).backward()
        assert differences(gradients(local), gradients(model)) == []
        loss(model, 2).backward()
        torch.testing.assert_close(gradients(model), averaged(net(), lambda alone: loss(alone, 1) + loss(alone, 2)))


@pytest.mark.parametrize("by", ["__call__", "score"])
@pytest.mark.parametrize("backward_is_inside", [False, True])
@on_ranks(2)
def test_the_backward_decides_and_not_the_forward(rank: int, backward_is_inside: bool, by: str) -> None:
    model, x = fastddp.replicate(net()), inputs(rank)
    for _ in range(2):
        model.zero_grad()
        with nullcontext() if backward_is_inside else model.no_sync():
            loss = getattr(model, by)(x)
        with model.no_sync() if backward_is_inside else nullcontext():
            loss.backward()
        here, there = of_ranks([gradient.tolist() for gradient in gradients(model)])
        assert (here == there) != backward_is_inside
        if not backward_is_inside:
            assert differences(averaged(net(), lambda alone: getattr(alone, by)(x)), gradients(model)) == []
    getattr(model, by)(x).backward()
    here, there = of_ranks([gradient.tolist() for gradient in gradients(model)])
    assert here == there


# ------------------------------------------------------------------------------------------------------- checkpointing


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, use_reentrant: bool, whole: bool) -> Tensor:
        def run(x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            return self.last(hidden) if whole else hidden

        found = checkpoint(run, x.requires_grad_(), use_reentrant=use_reentrant)
        return (found if whole else self.last(found)).square().sum()

    def method(self, *args: Any) -> Tensor:
        return self.forward(*args)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("by", ["__call__", "method"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, FIND, STATIC])
@on_ranks(2)
def test_checkpoints_are_averaged_or_refused(
    rank: int, options: dict[str, Any], use_reentrant: bool, by: str, whole: bool
) -> None:
    torch.manual_seed(0)
    module = Checkpointed()
    model = fastddp.replicate(copy.deepcopy(module), **options)
    x = inputs(rank)
    for _ in range(2):
        model.zero_grad()
        loss = getattr(model, by)(x, use_reentrant, whole)
        if by == "method" and use_reentrant and whole and options:
            with pytest.raises(RuntimeError, match="FD011"):
                loss.backward()
            break
        loss.backward()
        expected = averaged(module, lambda alone: getattr(alone, by)(x, use_reentrant, whole))
        assert differences(expected, gradients(model)) == []


# ---------------------------------------------------------------------------------------------- evaluation and buffers


@on_ranks(2)
def test_one_rank_alone_may_evaluate(rank: int) -> None:
    torch.manual_seed(0)
    model = fastddp.replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    x = inputs(rank)
    model(x).square().sum().backward()
    if rank == 0:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not model(x).requires_grad
    model.zero_grad()
    model(x).square().sum().backward()
    here, there = of_ranks([gradient.tolist() for gradient in gradients(model)])
    assert here == there
    dist.barrier()


@pytest.mark.parametrize("by", ["forward of the root", "forward of a submodule"])
@on_ranks(2)
def test_a_forward_of_the_root_begins_with_the_buffers_of_rank_0(rank: int, by: str) -> None:
    norm = nn.BatchNorm1d(3, momentum=1.0)
    model = fastddp.replicate(nn.Sequential(norm))
    run = model if by == "forward of the root" else model[0]
    run(inputs(rank)).square().sum().backward()
    norm.momentum = 0.0  # the next forward leaves them as it found them
    run(inputs(rank)).square().sum().backward()
    here, there = of_ranks(norm.running_mean.tolist())
    assert (here == there) == (by == "forward of the root")
