"""A step with gradients of one rank alone is told of once, with why; and nothing is said where a loop is right."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.optim import SGD, Optimizer

from fastddp import DistributedDataParallel, Watch
from on_ranks import on_ranks


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


Loop = Callable[[DistributedDataParallel, Optimizer, Tensor], object]


def through_the_module(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    model.module(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def a_second_backward(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def the_flag_too_late(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    model.require_backward_grad_sync = False
    loss = model(x).sum()
    model.require_backward_grad_sync = True
    loss.backward()
    optimizer.step()


def no_sync_to_the_end(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    for part in x.split(1):
        with model.no_sync():
            model(part).sum().backward()
    optimizer.step()


def a_window_left_open(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
    model(x)
    optimizer.step()


LOCAL = {
    through_the_module: "through model.module",
    a_second_backward: "call backward once",
    the_flag_too_late: "require_backward_grad_sync was False during its forward",
    no_sync_to_the_end: r"ran under no_sync\(\)",
    a_window_left_open: "no backward through that forward's outputs",
}


@pytest.mark.parametrize("loop", LOCAL)
@on_ranks(2)
def test_a_step_with_gradients_of_one_rank_is_told_of_once(rank: int, loop: Loop) -> None:
    model = DistributedDataParallel(two_layers())
    optimizer = SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 3), 1.0 + rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            loop(model, optimizer, x)
            optimizer.zero_grad()
    [text] = [str(warning.message) for warning in said]
    assert f"SGD is about to step with a gradient that is rank {rank}'s alone, of parameter 0.weight" in text
    with pytest.raises(AssertionError, match=f"(?s){LOCAL[loop]}.*FD048"):
        raise AssertionError(text)


@on_ranks(2)
def test_raise_stops_the_step(rank: int) -> None:
    model = DistributedDataParallel(two_layers(), watch=Watch(local_steps="raise"))
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(RuntimeError, match="FD048"):
        through_the_module(model, SGD(model.parameters(), lr=0.1), torch.ones(2, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())


def accumulation(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()


def accumulation_over_an_evaluation(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    accumulation(model, optimizer, x)


def local_sgd(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
        optimizer.step()


def a_frozen_half(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    model.module[0].requires_grad_(False)
    head = SGD(model.module[1].parameters(), lr=0.1)
    with torch.no_grad():
        features = model.module[0](x)
    model.module[0].requires_grad_(True)
    model(x).sum().backward()
    head.step()
    assert features.shape == (2, 2)


def generator_and_critic(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    critic = DistributedDataParallel(nn.Linear(1, 1))
    of_critic = SGD(critic.parameters(), lr=0.1)
    for _ in range(2):
        critic(model(x).detach()).sum().backward()
        of_critic.step()
        of_critic.zero_grad()
        critic.module(model(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        of_critic.zero_grad()


def two_wrappers_of_one_module(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    other = DistributedDataParallel(model.module)
    other(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def a_scaler_that_skips(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        scaler.scale(factor * model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def steps_that_a_hook_keeps_local(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    if "local" not in vars(model):
        everyone = torch.distributed.group.WORLD
        state = PostLocalSGDState(None, everyone, start_localSGD_iter=1, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)
        model.local = True
    model(x).sum().backward()
    optimizer.step()


def the_next_forward_before_the_step(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    model(x).sum().backward()
    model(x)
    optimizer.step()


def accumulation_that_ends_in_a_closure(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    """As Lightning does it."""

    def closure() -> float:
        loss = model(x).sum()
        loss.backward()
        return loss.item()

    with model.no_sync():
        model(x).sum().backward()
    optimizer.step(closure)


def averaged_by_hand(how: str, model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    """As loops do that synchronise gradients themselves, with an optimizer for each layer."""
    in_wrapper = how.startswith("under no_sync")
    with model.no_sync() if in_wrapper else contextlib.nullcontext():
        (model if in_wrapper else model.module)(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    if how.endswith("in one tensor"):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for parameter, part in zip(model.parameters(), flat.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = part.view_as(parameter) / 2
    else:
        for gradient in gradients:
            dist.all_reduce(gradient.data)
            gradient.data /= 2
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for layer in model.module:
        SGD(layer.parameters(), lr=0.1).step()
    optimizer.step()


def diloco(model: DistributedDataParallel, optimizer: Optimizer, x: Tensor) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        local_sgd(model, optimizer, x)
        optimizer.zero_grad()
    for parameter, old in zip(model.parameters(), before, strict=True):
        mean = parameter.detach() / 2
        dist.all_reduce(mean)
        parameter.grad = old - mean
        parameter.data.copy_(old)
    SGD(model.parameters(), lr=0.5, momentum=0.9).step()


RIGHT = [
    *(partial(averaged_by_hand, how) for how in ("under no_sync", "under no_sync, in one tensor", "past the wrapper")),
    diloco,
    *(accumulation_over_an_evaluation, accumulation_that_ends_in_a_closure, the_next_forward_before_the_step),
    *(local_sgd, a_frozen_half, generator_and_critic),
    *(two_wrappers_of_one_module, a_scaler_that_skips, steps_that_a_hook_keeps_local),
]


@pytest.mark.parametrize("loop", RIGHT)
@on_ranks(2)
def test_nothing_is_said_of_a_loop_that_is_right(rank: int, loop: Loop) -> None:
    model = DistributedDataParallel(two_layers(), watch=Watch(local_steps="raise"))
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loop(model, optimizer, torch.full((2, 3), 1.0 + rank))
        optimizer.zero_grad()
