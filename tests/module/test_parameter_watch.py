"""Parameters that came to the module after it was wrapped: an error names them before they train on one rank alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import fastddp
from on_ranks import of_ranks, on_ranks


def module() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    layers[0].requires_grad_(False)
    return layers


def parameter(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.ones(3), requires_grad=requires_grad)


def add_adapter(layers: Any) -> None:
    layers[1].adapter = nn.Linear(3, 3)


def assign_state(layers: nn.Module) -> None:
    layers.load_state_dict({name: value.clone() for name, value in layers.state_dict().items()}, assign=True)


# What is done to the module, and what of it is named.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "state assigned": (assign_state, "1.weight, 1.bias, 2.weight, 2.bias is not"),
    "layer replaced": (lambda layers: setattr(layers, "2", nn.Linear(3, 3)), "2.weight, 2.bias is not"),
    "parameter added": (lambda layers: setattr(layers[1], "extra", parameter()), "1.extra is not"),
    "parameter where there was none": (lambda layers: setattr(layers, "prompt", parameter()), "prompt is not"),
    "module where there was none": (add_adapter, "1.adapter.weight, 1.adapter.bias is not"),
    "parameter replaced": (lambda layers: setattr(layers[1], "bias", parameter()), "1.bias is not"),
    "unfrozen": (lambda layers: layers[0].requires_grad_(True), "0.weight, 0.bias is not"),
    "cast": (lambda layers: layers.double(), "1.weight, 1.bias, 2.weight, 2.bias has lost"),
    "parametrized": (lambda layers: orthogonal(layers[2]), "2.weight has lost"),
    "unfrozen what was added": (lambda layers: layers.late.requires_grad_(True), "late is not"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("find_unused", [False, True])
@on_ranks(2)
def test_what_would_train_on_one_rank_alone_is_named(rank: int, change: str, find_unused: bool) -> None:
    model = fastddp.DistributedDataParallel(module(), find_unused_parameters=find_unused)
    model.module.late = parameter(requires_grad=False)
    model(torch.ones(1, 3)).sum().backward()
    apply, words = CHANGES[change]
    apply(model.module)
    inputs = torch.ones(1, 3, dtype=model.module[0].weight.dtype)
    with torch.no_grad():
        model(inputs)  # trains nothing
    with pytest.raises(RuntimeError) as caught:
        model(inputs)
    assert f"it changed: {words}" in str(caught.value)
    assert "Wrap the module again" in str(caught.value)


@on_ranks(2)
def test_changes_that_leave_the_trained_parameters_are_no_error(rank: int) -> None:
    model = fastddp.DistributedDataParallel(module(), find_unused_parameters=True)
    layers = model.module
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: layers.load_state_dict(copy.deepcopy(layers.state_dict())),
        lambda: [layers[1].weight.requires_grad_(requires_grad) for requires_grad in (False, True)],
        lambda: setattr(layers, "1", layers[2]),
        lambda: setattr(layers, "0", nn.Identity()),
    ]
    sums = []
    for change in changes:
        change()
        model.zero_grad()
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        sums.append(float(sum(p.grad.sum() for p in layers.parameters() if p.grad is not None)))
    assert sums[0] == sums[1] == sums[2]
    assert of_ranks(sums) == [sums, sums]
