"""Gradients of a replicated module are averages, by whichever way a loss came, or the optimizer's step says why not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

import fastddp
from by_hand import Net, are_same, averaged, check_averages, inputs, net
from fastddp.in_place import local_training
from hooks_by_name import averages
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
    "each rank its head": ([lambda m, x, n: HEADS[(dist.get_rank() + n) % 2](m, x, n)], FIND),
    "two backwards, static": (HEADS, STATIC),
    "two backwards, searched": (HEADS, FIND),
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


@on_ranks(2)
def test_by_default_one_backward_brings_all_gradients(rank: int) -> None:
    model, other = fastddp.replicate(net()), fastddp.replicate(net())
    model.of_left(inputs(rank)).backward()
    with pytest.raises(RuntimeError, match="FD006"):
        model.of_right(inputs(rank)).backward()
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


@pytest.mark.parametrize("waits", [False, True])
@on_ranks(2)
def test_an_attribute_of_torchs_name_says_whether_backwards_average(rank: int, waits: bool) -> None:
    model = fastddp.replicate(net().to("meta") if waits else net()).to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    model.require_backward_grad_sync = False
    copy.deepcopy(model)
    for number in range(3):
        model.require_backward_grad_sync = number == 2
        model.score(inputs(rank, number)).backward()
        assert are_same(gradients(model)) == (number == 2)
        assert model.require_backward_grad_sync == (number == 2)
    with model.no_sync():
        assert not model.require_backward_grad_sync
    assert model.require_backward_grad_sync
    model.set_requires_gradient_sync(False)
    assert not model.require_backward_grad_sync


@pytest.mark.parametrize("by", ["__call__", "score"])
@on_ranks(2)
def test_the_backward_and_not_the_forward_decides_whether_gradients_add_up(rank: int, by: str) -> None:
    model, x = fastddp.replicate(net()), inputs(rank)
    for _ in range(2):
        model.zero_grad()
        inside = getattr(model, by)(x)
        with model.no_sync():
            inside.backward()
            outside = getattr(model, by)(2 * x)
        assert not are_same(gradients(model))
        outside.backward()
        expected = averaged(model, lambda alone: getattr(alone, by)(x) + getattr(alone, by)(2 * x))
        torch.testing.assert_close(gradients(model), expected)


class Checkpointed(Net):
    def forward(self, x: Tensor, use_reentrant: bool = False, whole: bool = False) -> Tensor:
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


@on_ranks(2, time_limit=30)
def test_a_rank_that_evaluates_after_its_backward_failed_lets_others_go_on(rank: int) -> None:
    model = fastddp.replicate(net())
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


@on_ranks(2, time_limit=30)
def test_buffers_are_rank_0s_where_a_forward_of_the_root_begins_that_trains(rank: int) -> None:
    model = fastddp.replicate(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    for is_root in (False, True):
        for momentum in (1.0, 0.0):  # the last forward leaves them as it found them
            model[0].momentum = momentum
            (model(inputs(rank)) if is_root else model[1](model[0](inputs(rank)))).sum().backward()
        assert are_same([model[0].running_mean]) == is_root
    model[0].momentum = 1.0
    model[0](inputs(rank))
    check_averages(model.eval(), lambda one: one[1](one[0](inputs(rank))).square().sum())
    with torch.no_grad():
        for _ in range(rank):  # one rank evaluates alone
            model(inputs(rank))
    check_averages(model.train(), lambda one: one(inputs(rank)).square().sum())


CHANGES: dict[str, Callable[[Any], object]] = {
    "frozen": lambda model: model.trunk.requires_grad_(False),
    "replaced": lambda model: model.load_state_dict(net().state_dict(), assign=True),
    "cast": lambda model: model.double(),
    "cast and back": lambda model: model.double().float(),
    "a new head": lambda model: setattr(model, "right", nn.Linear(4, 2)),
}


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_parameters_are_others_until_the_module_is_replicated_again(rank: int, change: str) -> None:
    model = fastddp.replicate(net())
    check_averages(model, lambda one: one.score(inputs(rank)))
    CHANGES[change](model)
    x = inputs(rank).to(model.trunk.weight.dtype)
    model.zero_grad()
    if change != "frozen":
        with pytest.raises(RuntimeError, match=r"(?s)(trunk|right)\.weight.*FD012"):  # noqa: PT012
            model.score(x).backward()
            SGD(model.parameters(), lr=0.1).step()
    check_averages(fastddp.replicate(model), lambda one: one.score(x))
    SGD(model.parameters(), lr=0.0).step()


@on_ranks(2)
def test_the_root_is_gone_and_a_child_trains_on(rank: int) -> None:
    model = fastddp.replicate(net())
    check_averages(model, lambda one: one.score(inputs(rank)))
    child = model.trunk
    optimizer = SGD(child.parameters(), lr=0.1)
    gc.disable()  # it must be gone at once
    del model
    gc.enable()
    child(inputs(rank)).sum().backward()
    with pytest.raises(RuntimeError, match=r"(?s)is gone.*FD012"):
        optimizer.step()
    check_averages(fastddp.replicate(child), lambda one: one(inputs(rank)).sum())
    optimizer.step()


def no_forward(model: Any) -> None:
    model.penalty().backward()
    with pytest.raises(RuntimeError, match=r"(?s)gets its wrapper in its first forward.*FD012"):
        SGD(model.parameters(), lr=0.1).step()


def optimizer_state(model: Any) -> None:
    optimizer = Adam(model.parameters())
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


def compiled(model: Any) -> None:
    torch.compile(model.score, backend="aot_eager")(inputs(dist.get_rank())).backward()
    assert are_same(gradients(model))


def replicate_anew(model: Any) -> None:
    fastddp.replicate(model)
    assert model.step_report() is None
    assert not local_training.waiting


FIRST: dict[str, Callable[[Any], object]] = {
    **{name: CHANGES[name] for name in ("frozen", "replaced")},
    "exported": lambda model: torch.export.export(model, (inputs(0),), strict=True),
    "a hook": lambda model: model.register_comm_hook(None, averages),
}
FIRST |= {one.__name__: one for one in (no_forward, optimizer_state, replicate_anew, compiled)}


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("first", [*list(FIRST)[:-1], pytest.param("compiled", marks=pytest.mark.tier("slow"))])
@on_ranks(2)
def test_a_module_waits_for_its_first_forward(rank: int, first: str) -> None:
    model = fastddp.replicate(net().to("meta")).to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    FIRST[first](model)
    check_averages(model, lambda one: one.score(inputs(rank)))
    check_averages(model, lambda one: inputs(rank).mean() * one.penalty())
    assert not any(part._forward_pre_hooks for part in model.modules())
    SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("by", ["__call__", "score"])
@on_ranks(2)
def test_a_rank_whose_backward_reaches_no_parameter_is_named(rank: int, by: str) -> None:
    model, other = fastddp.replicate(net()), torch.ones(1, requires_grad=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model.zero_grad()
        with pytest.raises(RuntimeError, match="FD010") if number == 1 else nullcontext():  # rank 0 waits in it
            getattr(model, by)(inputs(rank)).backward()
        if number != 1:
            optimizer.step()
        if rank == 1 and number == 0:
            optimizer.zero_grad()
            (getattr(model, by)(inputs(rank)).detach() * other).mean().backward()
            optimizer.step()
    assert are_same(gradients(model))


def raises(*_: object) -> None:
    raise ArithmeticError("in the middle of backward")
