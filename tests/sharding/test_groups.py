"""Parameter groups that come after the optimizer was made, or have a class of their own, as Muon's beside AdamW's."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import fastddp
from on_ranks import differences, on_ranks
from parts import local_input, wrapped
from test_sharded import Layers


@on_ranks(2)
def test_groups_may_come_until_the_first_step(rank: int) -> None:
    found = []
    for sharded in (True, False):
        model = wrapped()
        a, b, c = model.parameters()
        optimizer = (
            fastddp.ShardedOptimizer(model, torch.optim.SGD, [a], lr=0.5, momentum=0.5)
            if sharded
            else torch.optim.SGD([a], lr=0.5, momentum=0.5)
        )
        optimizer.add_param_group({"params": [b], "lr": 0.25})
        model(local_input(rank)).backward()
        if sharded:
            with pytest.raises(
                ValueError, match=r"leaves out c, and (.|\n)*by add_param_group(.|\n)*optimizer_class(.|\n)*FD042"
            ):
                optimizer.step()
            assert all(torch.equal(parameter, torch.ones(3)) for parameter in (a, b, c))
        optimizer.add_param_group({"params": c})
        optimizer.step()
        model.zero_grad()
        optimizer.param_groups[1]["lr"] = 0.125  # of a group that was added, after its part has been made
        model(local_input(rank)).backward()
        optimizer.step()
        found.append([parameter.tolist() for parameter in (a, b, c)])
    assert found[0] == found[1]


@on_ranks(2)
def test_a_group_that_cannot_be_trained_is_refused_and_leaves_nothing(rank: int) -> None:
    model = wrapped()
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    for parameter, text in [
        (nn.Parameter(torch.ones(3)), "is not trained by the model"),
        (model.module.a, "more than one parameter group"),
    ]:
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": [parameter]})
    assert optimizer.state_dict()["param_groups"] == before


# -------------------------------------------------------------------------------------------- a class of a group's own


def layers() -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0.01)


def split(model: nn.Module) -> list[list[Tensor]]:
    """Biases and norms, and matrices."""
    return [[one for one in model.parameters() if (one.ndim == 2) is way] for way in (False, True)]


def muon_and_adamw() -> tuple[fastddp.DistributedDataParallel, Any]:
    """The group with a class of its own is the first."""
    model = layers()
    others, matrices = split(model)
    of_others = {"params": others, "optimizer_class": AdamW, "lr": 0.01, "weight_decay": 0.2}
    groups = [of_others, {"params": matrices, "momentum": 0.8}]
    return model, fastddp.ShardedOptimizer(model, Muon, groups, shard="parameters", lr=0.1)


def train(model: nn.Module, optimizers: list[Any], first: int, last: int, rank: int) -> None:
    """These steps; each has its own inputs, and rates that a scheduler has set."""
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
    for number in range(first, last):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(2 * number + rank))
        model(x).square().mean().backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()


@on_ranks(2)
def test_muon_beside_adamw_trains_as_both_do(rank: int) -> None:
    model, optimizer = muon_and_adamw()
    plan = model.bucket_plan()
    train(model, [optimizer], 0, 5, rank)
    assert model.bucket_plan() != plan
    replicated = layers()
    others, matrices = split(replicated)
    adamw = AdamW(others, lr=0.01, weight_decay=0.2)
    muon = Muon([{"params": matrices, "momentum": 0.8}], lr=0.1)
    train(replicated, [adamw, muon], 0, 5, rank)
    assert differences([*replicated.parameters()], [*model.parameters()]) == []
    whole = optimizer.full_state_dict()
    state = [one.state[parameter] for one in (adamw, muon) for parameter in one.param_groups[0]["params"]]
    assert differences(*([sorted(of.items()) for of in both] for both in (state, whole["state"].values()))) == []
    settings = [{**one.param_groups[0], "params": []} for one in (adamw, muon)]
    assert settings == [{**group, "params": []} for group in whole["param_groups"]]


@on_ranks(2)
def test_a_group_that_comes_later_may_name_its_class(rank: int) -> None:
    model, optimizer = muon_and_adamw()
    others, matrices = split(later := layers())
    in_two = fastddp.ShardedOptimizer(later, AdamW, [{"params": others}], shard="parameters", lr=0.01, weight_decay=0.2)
    with pytest.raises(ValueError, match=r"leaves out last.weight(.|\n)*FD042"):
        in_two.load_state_dict(in_two.state_dict())
    in_two.add_param_group({"params": matrices, "optimizer_class": partial(Muon, lr=0.1), "momentum": 0.8})
    for one, its in ((model, optimizer), (later, in_two)):
        train(one, [its], 0, 3, rank)
    in_two.add_param_group({"params": []})
    for one, its in ((model, optimizer), (later, in_two)):
        train(one, [its], 3, 5, rank)
    assert differences([*model.parameters()], [*later.parameters()]) == []
