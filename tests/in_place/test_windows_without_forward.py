"""Gradients of any backward over a replicated module are averages, whichever of its methods the loss came by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import fastddp
from by_hand import Net, are_same, averaged, check_averages, inputs, net
from on_ranks import differences, gradients, on_ranks

FIND: dict[str, Any] = {"find_unused_parameters": True}
STATIC: dict[str, Any] = {"static_graph": True}

Loss = Callable[[Any, Tensor, int], Tensor]
HEADS: list[Loss] = [lambda m, x, n: m.of_left(x), lambda m, x, n: m.of_right(x)]
LOSSES: dict[str, tuple[list[Loss], dict[str, Any]]] = {
    "two methods in one loss": ([lambda m, x, n: m.of_left(x) + m.of_right(x)], {}),
    "forward and a method in one loss": ([lambda m, x, n: m(x) + m.score(x)], {}),
    "forward and a method in turns": ([lambda m, x, n: m(x) if n % 2 else m.score(x)], {}),
    "parameters, then a method": ([lambda m, x, n: x.mean() * m.penalty(), lambda m, x, n: m.score(x)], {}),
    "forward, then parameters": ([lambda m, x, n: m(x), lambda m, x, n: x.mean() * m.penalty()], {}),
    "a submodule": ([lambda m, x, n: m.trunk(x).square().mean()], FIND),
    "a method, static": ([lambda m, x, n: m.score(x)], STATIC),
    "each rank its head": ([lambda m, x, n: HEADS[(dist.get_rank() + n) % 2](m, x, n)], FIND),
    "two backwards, searched": (HEADS, FIND),
    "two backwards, static": (HEADS, STATIC),
    "microbatches": ([lambda m, x, n: m.score(x[:2]), lambda m, x, n: m.score(x[2:])], {}),
}


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("which", LOSSES)
@on_ranks(2)
def test_gradients_are_averages_by_whatever_way_the_loss_came(rank: int, which: str) -> None:
    losses, options = LOSSES[which]
    model = fastddp.replicate(net(), **options)
    optimizer = SGD(model.parameters(), lr=0.0)
    for n in range(3):
        bound = [lambda one, loss=loss, n=n: loss(one, inputs(rank, n), n) for loss in losses]  # type: ignore[misc]
        check_averages(model, *bound, tolerance=0.0 if len(bound) == 1 else 1e-6)
        optimizer.step()


@on_ranks(2)
def test_several_models_train_side_by_side(rank: int) -> None:
    """A loss of a generator goes through a discriminator, too, and one through a copy as it was at first."""
    x = inputs(rank)
    plain = nn.ModuleList([net(), nn.Linear(4, 1)])
    pair = nn.ModuleList([fastddp.replicate(copy.deepcopy(one)) for one in plain])
    plain.load_state_dict(pair.state_dict())
    reference = copy.deepcopy(pair[0]).requires_grad_(False)
    with torch.no_grad():
        aim = reference.score(x)
    for _ in range(2):
        check_averages(pair, lambda both: both[1](both[0].trunk(x)).sum() + both[0].score(x) * aim, plain=plain)


# --------------------------------------------------------------------------------------------------- several backwards


@on_ranks(2)
def test_by_default_one_backward_brings_all_gradients(rank: int) -> None:
    model = fastddp.replicate(net())
    model.of_left(inputs(rank)).backward()
    with pytest.raises(RuntimeError, match="FD006"):
        model.of_right(inputs(rank)).backward()
    other = fastddp.replicate(net())
    other.trunk(inputs(rank)).sum().backward()
    with pytest.raises(RuntimeError, match=r"(?s)left\.weight.*FD005"):
        SGD(other.parameters(), lr=0.1).step()


class Heads(nn.ModuleList):
    def forward(self, x: Tensor, head: int) -> Tensor:
        return self[head](x).square().sum()


@pytest.mark.parametrize("by", ["__call__", "forward"])
@on_ranks(2)
def test_or_several_backwards_bring_gradients_of_different_parameters(rank: int, by: str) -> None:
    model, x = fastddp.replicate(Heads([nn.Linear(3, 2), nn.Linear(3, 1)])), inputs(rank)
    expected = averaged(model, lambda alone: alone(x, 0) + alone(x, 1))
    for head in (0, 1):
        with torch.no_grad():
            model(x, head)
        getattr(model, by)(x, head).backward()
    SGD(model.parameters(), lr=0.0).step()
    assert differences(expected, gradients(model)) == []


@pytest.mark.parametrize("how", ["no_sync", "set_requires_gradient_sync"])
@pytest.mark.parametrize("by", ["__call__", "score"])
@on_ranks(2)
def test_the_backward_and_not_the_forward_decides_whether_gradients_add_up(rank: int, how: str, by: str) -> None:
    model = fastddp.replicate(net())
    losses = [lambda one, n=n: getattr(one, by)(inputs(rank, n)) for n in (1, 2)]  # type: ignore[misc]
    for _ in range(2):
        model.zero_grad()
        if how == "no_sync":
            inside, outside = losses[0](model), losses[1]
            with model.no_sync():
                inside.backward()
                last = outside(model)
        else:
            model.set_requires_gradient_sync(False)
            losses[0](model).backward()
            model.set_requires_gradient_sync(True)
            last = losses[1](model)
        assert not are_same(gradients(model))
        last.backward()
        expected = averaged(net(), lambda alone: losses[0](alone) + losses[1](alone))
        torch.testing.assert_close(gradients(model), expected)


class Checkpointed(Net):
    def forward(self, x: Tensor, use_reentrant: bool, whole: bool) -> Tensor:
        part = super().forward if whole else self.trunk
        found = checkpoint(part, x.requires_grad_(), use_reentrant=use_reentrant)
        return found if whole else self.left(found).mean() + self.right(found).mean()


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("by", ["__call__", "forward"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, FIND, STATIC])
@on_ranks(2)
def test_checkpoints_are_averaged_or_refused(
    rank: int, options: dict[str, Any], use_reentrant: bool, by: str, whole: bool
) -> None:
    model = fastddp.replicate(Checkpointed(), **options)
    is_refused = by == "forward" and use_reentrant and whole and options
    for _ in range(2):
        with pytest.raises(RuntimeError, match="FD011") if is_refused else nullcontext():
            check_averages(model, lambda one: getattr(one, by)(inputs(rank), use_reentrant, whole))


# ---------------------------------------------------------------------------------------------- evaluation and buffers


def with_norm() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 1))


@on_ranks(2)
def test_one_rank_alone_may_evaluate(rank: int) -> None:
    model = fastddp.replicate(with_norm())
    for _ in range(2):
        model(inputs(rank)).square().sum().backward()
        if rank == 0:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    assert not model(inputs(rank)).requires_grad
    assert are_same(gradients(model))


@on_ranks(2, time_limit=30)
def test_a_rank_that_evaluates_after_its_backward_failed_lets_others_go_on(rank: int) -> None:
    model = fastddp.replicate(net())
    check_averages(model, lambda one: one(inputs(rank)))
    loss = model(inputs(rank))
    if rank == 0:
        with suppress(RuntimeError):
            loss.backward()
    else:
        model.trunk.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        with torch.no_grad():
            model(inputs(rank))
    dist.barrier()


@pytest.mark.parametrize("is_root", [True, False])
@on_ranks(2)
def test_a_forward_of_the_root_begins_with_the_buffers_of_rank_0(rank: int, is_root: bool) -> None:
    model = fastddp.replicate(with_norm())
    for momentum in (1.0, 0.0):  # the last forward leaves them as it found them
        model[0].momentum = momentum
        (model(inputs(rank)) if is_root else model[1](model[0](inputs(rank)))).sum().backward()
    assert are_same([model[0].running_mean]) == is_root


@on_ranks(2)
def test_a_backward_leaves_buffers_that_its_graph_needs(rank: int) -> None:
    model = fastddp.replicate(with_norm())
    model[0](inputs(rank))  # each rank has its own statistics from now on
    check_averages(model.eval(), lambda one: one[1](one[0](inputs(rank))).square().sum())
