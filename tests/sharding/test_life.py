"""What a sharded optimizer refuses, and what becomes of it when its model, or it, is replaced, copied or changed."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import comm_hooks
from hooks_by_name import averages
from models import Expected
from on_ranks import of_ranks, on_ranks
from parts import Parts


def wrapped(**options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(Parts("ab", sizes=(3, 3000)), **options)


def sharded(model: Any, kind: Any = torch.optim.SGD, **how: Any) -> fastddp.ShardedOptimizer:
    return fastddp.ShardedOptimizer(model, kind, **{"lr": 0.5, **how})


def backward(model: nn.Module, rank: int, used: str = "ab") -> None:
    """Each gradient is the sum of the input, 1 on rank 0 and 2 on rank 1."""
    model(torch.tensor([rank + 1.0]), used).backward()


def train(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    """A step; the parameters after it."""
    backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    return values(model)


def values(model: nn.Module) -> list[float]:
    """Of a parameter each; all its elements are equal."""
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter[:1].expand_as(parameter))
    return [parameter[0].item() for parameter in model.parameters()]


# ------------------------------------------------------------------------------------------------- what it refuses

WRONG: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "no wrapper": (
        TypeError,
        r"takes a fastddp\.DistributedDataParallel, got Parts(.|\n)*FD024",
        lambda: sharded(Parts()),
    ),
    "an unknown way to shard": (ValueError, "shard must be .*rows.*FD024", lambda: sharded(wrapped(), shard="rows")),
    "an unknown way to gather": (ValueError, "gather must be .*now.*FD024", lambda: sharded(wrapped(), gather="now")),
    "a wire of 32 bits": (
        ValueError,
        "got torch.float32(.|\n)*FD024",
        lambda: sharded(wrapped(), parameter_wire=torch.float32),
    ),
    "gradients that are whole in memory of their own": (
        ValueError,
        r'does not go with main_grads="main_grad"(.|\n)*FD042',
        lambda: sharded(wrapped(main_grads="main_grad")),
    ),
    "Muon by elements": (
        ValueError,
        r'Muon raises ValueError with parts(.|\n)*shard="parameters"(.|\n)*FD046',
        lambda: sharded(wrapped(), shard="elements", params=[{"params": [], "optimizer_class": torch.optim.Muon}]),
    ),
    "a setting that the class refuses": (ValueError, "Invalid learning rate", lambda: sharded(wrapped(), lr=-1.0)),
    "a parameter of another model": (
        ValueError,
        "is not trained by the model(.|\n)*FD042",
        lambda: sharded(wrapped(), params=[*Parts().parameters()]),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@on_ranks(2)
def test_wrong_arguments(rank: int, wrong: str) -> None:
    error, match, make = WRONG[wrong]
    with pytest.raises(error, match=match):
        make()


def in_another_group() -> tuple[object, Any]:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True), comm_hooks.allreduce_hook


HOOKS: dict[str, tuple[str, Callable[[], tuple[object, Any]]]] = {
    "PowerSGD": ("not by", lambda: (comm_hooks.PowerSGDState(None), comm_hooks.powerSGD_hook)),
    "Python": ("not by a hook in Python", lambda: (None, averages)),
    "noop": ("not by noop_hook", lambda: (None, comm_hooks.noop_hook)),
    "another group": ("names another process group", in_another_group),
}


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(2)
def test_gradients_that_cannot_be_sharded_are_refused_before_and_after(rank: int, hook: str) -> None:
    """The optimizer or the hook is refused, whichever comes second, and the other goes on."""
    match, state_and_hook = HOOKS[hook]
    model = wrapped()
    model.register_comm_hook(*state_and_hook())
    memory = model.module.a.data_ptr()
    with pytest.raises(ValueError, match=rf"{match}(.|\n)*FD042"):
        sharded(model)
    assert model.module.a.data_ptr() == memory
    model = wrapped()
    optimizer = sharded(model)
    with pytest.raises(ValueError, match=rf"{match}(.|\n)*FD042"):
        model.register_comm_hook(*state_and_hook())
    assert train(model, optimizer, rank) == [0.25, 0.25]


# ---------------------------------------------------------------------------------------------- a step that is refused


@on_ranks(2)
def test_a_step_without_averages_is_refused_and_the_next_window_has_all(rank: int) -> None:
    model = wrapped()
    optimizer = sharded(model)
    with model.no_sync():
        backward(model, rank)
    with pytest.raises(RuntimeError, match=r"is this rank's alone(.|\n)*outside of no_sync\(\)(.|\n)*FD041"):
        optimizer.step()
    assert values(model) == [1, 1]
    assert train(model, optimizer, rank) == [-0.5, -0.5]


@on_ranks(2)
def test_a_step_after_a_backward_that_failed_on_one_rank_is_refused_on_all(rank: int) -> None:
    model = wrapped()
    optimizer = sharded(model, momentum=0.5)
    for _ in range(2):
        with pytest.raises(
            Expected if rank == 0 else RuntimeError, match="middle" if rank == 0 else "failed on rank 0"
        ):
            model(torch.ones(1), "ab", rank == 0).backward()
        with pytest.raises(RuntimeError, match=r"on rank 0.* are void on all ranks"):
            optimizer.step()
        optimizer.zero_grad()
        before = values(model)
        assert before > train(model, optimizer, rank) == of_ranks(values(model))[1 - rank]


@on_ranks(2)
def test_a_step_before_the_first_backward_changes_nothing(rank: int) -> None:
    model = wrapped()
    sharded(model, weight_decay=0.5).step()
    assert values(model) == [1, 1]


@pytest.mark.parametrize("how", ["assigned", "converted"])
@on_ranks(2)
def test_parameters_that_have_left_the_flat_memory_are_not_forgotten(rank: int, how: str) -> None:
    model = wrapped()
    optimizer = sharded(model)
    if how == "assigned":
        model.module.b.data = model.module.b.data.clone()
    else:
        model.module.double()
    with pytest.raises(RuntimeError, match=r"Parameter [ab] has other memory(.|\n)*FD042"):
        optimizer.step()


@pytest.mark.parametrize("gather", ["step", "forward"])
@on_ranks(2)
def test_incomplete_parameters_are_not_saved_until_they_are_loaded(rank: int, gather: str) -> None:
    model = wrapped()
    optimizer = sharded(model, gather=gather)
    saved = copy.deepcopy(model.state_dict())
    backward(model, rank)
    with mock.patch.object(optimizer.parts.shards, "_send", side_effect=OSError), pytest.raises(OSError):
        optimizer.step()
    for save in (model.state_dict, model.module.state_dict):
        with pytest.raises(RuntimeError, match=r"parameter [ab] is incomplete(.|\n)*FD044"):
            save()
    model.load_state_dict(saved)
    assert model.state_dict().keys() == saved.keys()
    optimizer.step()
    assert values(model) == [0.25, 0.25]


# ------------------------------------------------------------------------------------------------ copies and successors


@on_ranks(2)
def test_an_optimizer_cannot_be_copied(rank: int) -> None:
    optimizer = sharded(wrapped())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"ShardedOptimizer cannot be pickled or copied(.|\n)*FD042"):
            copied(optimizer)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("gather", ["step", "forward"])
@on_ranks(2)
def test_a_copy_of_the_model_has_the_parameters_and_no_optimizer(rank: int, gather: str, copied: str) -> None:
    model = wrapped()
    optimizer = sharded(model, gather=gather)
    backward(model, rank)
    optimizer.step()
    twin = COPIES[copied](model)
    assert values(twin) == [0.25, 0.25]
    assert all(parameter.grad is None for parameter in twin.parameters())
    optimizer.step()
    assert (values(twin), values(model)) == ([0.25, 0.25], [-0.5, -0.5])
    backward(twin, rank)
    assert [float(parameter.grad[0]) for parameter in twin.parameters()] == [1.5, 1.5]
    again = sharded(twin)
    again.zero_grad()
    assert train(twin, again, rank) == values(model) == [-0.5, -0.5]


@pytest.mark.parametrize("params", [None, "half"])
@on_ranks(2)
def test_a_second_optimizer_is_refused_while_there_is_the_first(rank: int, params: str | None) -> None:
    model = wrapped()
    halves = [[parameter] for parameter in model.parameters()]
    first = sharded(model, params=params and halves[0])
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(ValueError, match=r"A ShardedOptimizer of SGD trains the model already(.|\n)*FD047"):
            sharded(model, kind, params=params and halves[1])
    if params:
        first.add_param_group({"params": halves[1]})
    assert train(model, first, rank) == [0.25, 0.25]
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    schedule.cycle = schedule
    del first, schedule
    second = sharded(model, momentum=0.5, shard="parameters", params=params and halves[1])
    if params:
        second.add_param_group({"params": halves[0]})
    assert train(model, second, rank) == [-0.5, -0.5]


@pytest.mark.parametrize("which", ["inner", "outer"])
@on_ranks(2)
def test_a_wrapper_around_a_wrapper_and_a_sharded_optimizer_are_refused_whichever_comes_last(
    rank: int, which: str
) -> None:
    inner = wrapped()
    outer = fastddp.DistributedDataParallel(inner)
    match = r"Two wrappers have parameter (module\.)?a(.|\n)*Wrap the module once(.|\n)*FD047"
    with pytest.raises(ValueError, match=match):
        sharded({"inner": inner, "outer": outer}[which])
    del outer
    optimizer = sharded(inner)
    with pytest.raises(ValueError, match=match):
        fastddp.DistributedDataParallel(inner)
    assert train(inner, optimizer, rank) == [0.25, 0.25]


@on_ranks(2)
def test_a_model_goes_with_its_wrapper_and_its_gradients_with_the_optimizer(rank: int) -> None:
    """At once, without the garbage collector: two wrappers of one module would both synchronise it."""
    model = wrapped()
    optimizer = sharded(model)
    backward(model, rank)
    module, gone = model.module, weakref.ref(model)
    del model
    assert gone() is None
    with pytest.raises(RuntimeError, match=r"model of this ShardedOptimizer is gone(.|\n)*FD042"):
        optimizer.step()
    del optimizer
    assert all(parameter.grad is None for parameter in module.parameters())
    again = fastddp.DistributedDataParallel(module)
    replicated = torch.optim.SGD(again.parameters(), lr=0.5)
    assert train(again, replicated, rank) == [0.25, 0.25]


@on_ranks(2)
def test_gradients_from_before_there_was_the_optimizer_count(rank: int) -> None:
    model = wrapped()
    backward(model, rank)
    optimizer = sharded(model)
    assert train(model, optimizer, rank) == [-0.5, -0.5]


@on_ranks(2)
def test_a_parameter_that_is_frozen_later_stays(rank: int) -> None:
    model = wrapped(find_unused_parameters=True)
    optimizer = sharded(model)
    train(model, optimizer, rank)
    model.module.a.requires_grad_(False)
    assert train(model, optimizer, rank) == [0.25, -0.5]


@on_ranks(2)
def test_a_parameter_without_elements_is_no_obstacle(rank: int) -> None:
    """In a bucket of its own."""
    model = fastddp.DistributedDataParallel(Parts("ab", sizes=(0, 3)), bucket_cap_mb=0)
    optimizer = sharded(model)
    backward(model, rank)
    optimizer.step()
    assert model.module.b.tolist() == [0.25] * 3
