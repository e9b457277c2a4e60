"""Modules that nothing averages gradients of, yet or any more: they do in the end, or the optimizer's step says so."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adam

import fastddp
from by_hand import are_same, check_averages, inputs, net
from fastddp.in_place import local_training
from on_ranks import gradients, on_ranks


def load(model: nn.Module) -> None:
    model.load_state_dict(net().state_dict(), assign=True)
    model.requires_grad_()


CHANGES: dict[str, Callable[[Any], object]] = {
    "frozen": lambda model: model.trunk.requires_grad_(False),
    "replaced": load,
    "cast": lambda model: model.double(),
    "cast and back": lambda model: model.double().float(),
    "a new head": lambda model: setattr(model, "right", nn.Linear(4, 2)),
}


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_parameters_are_others_until_the_module_is_replicated_again(rank: int, change: str, is_used: bool) -> None:
    model = fastddp.replicate(net())
    if is_used:
        check_averages(model, lambda one: one.score(inputs(rank)))
    CHANGES[change](model)
    x = inputs(rank).to(model.trunk.weight.dtype)
    model.zero_grad()
    if change != "frozen":
        with pytest.raises(RuntimeError, match=r"(?s)(trunk|right)\.weight.*FD012"):  # noqa: PT012
            model.score(x).backward()
            SGD(model.parameters(), lr=0.1).step()
    assert fastddp.replicate(model) is model
    check_averages(model, lambda one: one.score(x))
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


# ----------------------------------------------------------------------------------------------- before a first forward


def no_forward(model: Any) -> None:
    model.penalty().backward()
    with pytest.raises(RuntimeError, match=r"(?s)gets its wrapper in its first forward.*FD012"):
        SGD(model.parameters(), lr=0.1).step()


def optimizer_state(model: Any) -> None:
    optimizer = Adam(model.parameters())
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


def scaler(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(SGD(model.parameters(), lr=0.1))


def export(model: Any) -> None:
    for strict in (False, True):
        torch.export.export(model, (inputs(0),), strict=strict)


def compiled(model: Any) -> None:
    torch.compile(model.score, backend="aot_eager")(inputs(dist.get_rank())).backward()
    assert are_same(gradients(model))


def replicate_anew(model: Any) -> None:
    fastddp.replicate(model)
    assert model.step_report() is None
    assert not local_training.waiting


FIRST: dict[str, Callable[[Any], object]] = {"frozen": CHANGES["frozen"], "replaced": load}
FIRST |= {one.__name__: one for one in (no_forward, optimizer_state, scaler, export, replicate_anew, compiled)}


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("kind", ["meta", "copy"])
@pytest.mark.parametrize("first", [*list(FIRST)[:-1], pytest.param("compiled", marks=pytest.mark.tier("slow"))])
@on_ranks(2)
def test_a_module_waits_for_its_first_forward(rank: int, first: str, kind: str) -> None:
    if kind == "meta":
        model = fastddp.replicate(net().to("meta")).to_empty(device="cpu")
        model.load_state_dict(net().state_dict())
    else:
        model = copy.deepcopy(fastddp.replicate(net(), gradient_average="sum" if first == "replicate_anew" else "mean"))
    FIRST[first](model)
    model.zero_grad()
    check_averages(model, lambda one: one.score(inputs(rank)))
    check_averages(model, lambda one: inputs(rank).mean() * one.penalty())
    SGD(model.parameters(), lr=0.1).step()


# --------------------------------------------------------------------------------------------- a rank without gradients


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("by", ["__call__", "score"])
@pytest.mark.parametrize("told", ["warn", "raise", None])
@on_ranks(2)
def test_a_rank_whose_backward_reaches_no_parameter_is_told(rank: int, told: Any, by: str) -> None:
    model = fastddp.replicate(net(), watch=fastddp.Watch(local_steps=told))
    optimizer = SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model.zero_grad()
        getattr(model, by)(inputs(rank)).backward()  # first in the window that rank 0 waits in
        optimizer.step()
        if rank == 1 and number == 0:
            raises: Any = pytest.raises(RuntimeError, match="rank 1, and no backward has reached")
            with raises if told == "raise" else contextlib.nullcontext(), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                optimizer.step()
            assert ["no backward has reached" in str(one.message) for one in said] == [True] * (told == "warn")
    assert are_same(gradients(model))
