"""Where nothing can average gradients, the optimizer's step says so."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import fastddp
from by_hand import averaged, inputs, net
from on_ranks import differences, gradients, of_ranks, on_ranks

CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "replaced": lambda model: model.load_state_dict(net().state_dict(), assign=True),
    "cast and back": lambda model: model.double().float(),
    "cast": lambda model: model.double(),
}


def loss_of(model: Any, rank: int) -> Tensor:
    return model.score(inputs(rank).to(model.trunk.weight.dtype))


@pytest.mark.parametrize("is_used_before", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_all_parameters_are_others_until_the_module_is_replicated_again(
    rank: int, change: str, is_used_before: bool
) -> None:
    model = fastddp.replicate(net())
    kind = type(model)
    if is_used_before:
        loss_of(model, rank).backward()
        SGD(model.parameters(), lr=0.0).step()
    CHANGES[change](model)
    for parameter in model.parameters():
        parameter.requires_grad_().grad = None
    loss_of(model, rank).backward()
    with pytest.raises(RuntimeError, match=r"(?s)trunk\.weight.*FD012"):
        SGD(model.parameters(), lr=0.1).step()
    assert fastddp.replicate(model) is model
    assert type(model) is kind
    model.zero_grad()
    loss_of(model, rank).backward()
    SGD(model.parameters(), lr=0.0).step()
    expected = averaged(net().to(model.trunk.weight.dtype), lambda alone: loss_of(alone, rank))
    assert differences(expected, gradients(model)) == []


@on_ranks(2)
def test_the_root_is_gone_and_a_child_trains_on(rank: int) -> None:
    model = fastddp.replicate(net())
    loss_of(model, rank).backward()
    child = model.trunk
    optimizer = SGD(child.parameters(), lr=0.1)
    optimizer.step()
    gc.disable()  # it must be gone at once
    del model
    gc.enable()
    for is_replicated in (False, True):
        child.zero_grad()
        child(inputs(rank)).sum().backward()
        if not is_replicated:
            with pytest.raises(RuntimeError, match=r"(?s)is gone.*FD012"):
                optimizer.step()
            fastddp.replicate(child)
    optimizer.step()
    here, there = of_ranks([gradient.tolist() for gradient in gradients(child)])
    assert here == there


@pytest.mark.parametrize("kind", ["meta", "copy"])
@on_ranks(2)
def test_a_module_that_waits_for_its_first_call_and_is_never_called(rank: int, kind: str) -> None:
    with torch.device("meta" if kind == "meta" else "cpu"):
        model = fastddp.replicate(nn.Linear(3, 2))
    model = model.to_empty(device="cpu") if kind == "meta" else copy.deepcopy(model)
    nn.init.ones_(model.weight)
    optimizer = SGD(model.parameters(), lr=0.1)

    def functional() -> Tensor:
        return nn.functional.linear(inputs(rank), model.weight, 0 * model.bias.nan_to_num()).square().sum()

    functional().backward()
    with pytest.raises(RuntimeError, match=r"(?s)has not been called.*FD012"):
        optimizer.step()
    model.zero_grad()
    model(inputs(rank))
    functional().backward()  # its parameters are averaged from now on
    here, there = of_ranks(model.weight.grad.tolist())
    assert here == there


@pytest.mark.parametrize("by", ["__call__", "score"])
@pytest.mark.parametrize("told", ["warn", "raise", None])
@on_ranks(2)
def test_a_rank_whose_backward_reaches_no_parameter_is_told(rank: int, told: Any, by: str) -> None:
    model = fastddp.replicate(net(), watch=fastddp.Watch(local_steps=told))
    optimizer = SGD(model.parameters(), lr=0.1)

    def train() -> None:
        getattr(model, by)(inputs(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    if rank == 1:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            text = ""
            try:
                optimizer.step()
            except RuntimeError as error:
                assert told == "raise"
                text = str(error)
            text += "".join(str(warning.message) for warning in said if told == "warn")
        assert ("SGD is about to step on rank 1, and no backward has reached" in text) == (told is not None)
    for _ in range(2):
        train()  # first in the window that rank 0 waits in


def fresh_head(model: Any) -> None:
    model.right = nn.Linear(4, 2)


AGAIN = pytest.mark.xfail(strict=True, reason="replicate() sees no change")


@pytest.mark.parametrize("change", ["head", pytest.param("frozen", marks=AGAIN), pytest.param("meta", marks=AGAIN)])
@on_ranks(2)
def test_replicate_again_where_an_error_says_so(rank: int, change: str) -> None:
    with torch.device("meta" if change == "meta" else "cpu"):
        model = fastddp.replicate(copy.deepcopy(net()).to("meta" if change == "meta" else "cpu"))
    if change == "head":
        fresh_head(model)
    elif change == "frozen":
        model.trunk.requires_grad_(False)
    else:
        model.to_empty(device="cpu").load_state_dict(net().state_dict())
    fastddp.replicate(model)
    model.score(inputs(rank)).backward()
    SGD(model.parameters(), lr=0.0).step()
    here, there = of_ranks(model.left.weight.grad.tolist())
    assert here == there
