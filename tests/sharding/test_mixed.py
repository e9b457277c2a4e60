"""Parameter groups with an optimizer class of their own, as Muon's beside AdamW's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Muon

import fastddp
from on_ranks import differences, on_ranks
from test_sharded import Layers

Made = tuple[fastddp.DistributedDataParallel, Any]
ADAMW = {"optimizer_class": AdamW, "lr": 0.01, "weight_decay": 0.2}


def wrapped(seed: int = 0, dtype: torch.dtype = torch.float32) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(Layers(seed).to(dtype), bucket_cap_mb=0.01)


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Biases and norms, and matrices."""
    parameters = list(model.parameters())
    return [one for one in parameters if one.ndim != 2], [one for one in parameters if one.ndim == 2]


def muon_and_adamw(seed: int = 0) -> Made:
    """The group with a class of its own is the first."""
    model = wrapped(seed)
    others, matrices = split(model)
    groups = [{"params": others, **ADAMW}, {"params": matrices, "momentum": 0.8}]
    return model, fastddp.ShardedOptimizer(model, Muon, groups, shard="parameters", lr=0.1)


def train(model: nn.Module, optimizers: list[Any], first: int, last: int, rank: int) -> None:
    """These steps; each has its own inputs, and rates that a scheduler has set."""
    for number in range(first, last):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(2 * number + rank))
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        model.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2)
def test_muon_beside_adamw_trains_as_both_do(rank: int) -> None:
    model, optimizer = muon_and_adamw()
    plan = model.bucket_plan()
    train(model, [optimizer], 0, 5, rank)
    assert model.bucket_plan() != plan
    replicated = wrapped()
    others, matrices = split(replicated)
    adamw = AdamW(others, lr=0.01, weight_decay=0.2)
    muon = Muon([{"params": matrices, "momentum": 0.8}], lr=0.1)
    train(replicated, [adamw, muon], 0, 5, rank)
    assert differences(values(replicated), values(model)) == []
    whole = optimizer.full_state_dict()
    state = [one.state[parameter] for one in (adamw, muon) for parameter in one.param_groups[0]["params"]]
    assert differences(*([sorted(of.items()) for of in both] for both in (state, whole["state"].values()))) == []
    settings = [{**one.param_groups[0], "params": []} for one in (adamw, muon)]
    assert settings == [{**group, "params": []} for group in whole["param_groups"]]


def by_part(of: Made, other: Made, folder: Path) -> None:
    path = folder / f"part{torch.distributed.get_rank()}"
    torch.save(of[1].state_dict(), path)
    other[0].load_state_dict(of[0].state_dict())
    other[1].load_state_dict(torch.load(path, weights_only=True))


def by_whole(of: Made, other: Made, folder: Path) -> None:
    other[0].load_state_dict(of[0].state_dict())
    other[1].load_state_dict(of[1].full_state_dict())


def by_dcp(of: Made, other: Made, folder: Path, **options: Any) -> None:
    how = StateDictOptions(**options)
    saved, found = (dict(zip("mo", get_state_dict(*one, options=how), strict=True)) for one in (of, other))
    dcp.save(saved, checkpoint_id=folder / "dcp")
    dcp.load(found, checkpoint_id=folder / "dcp")
    set_state_dict(*other, model_state_dict=found["m"], optim_state_dict=found["o"], options=how)


WAYS = {
    "part": by_part,
    "whole": by_whole,
    "DCP": by_dcp,
    "DCP, flat": partial(by_dcp, flatten_optimizer_state_dict=True),
}


@pytest.mark.parametrize("steps", [0, 1, 3])  # of the model that loads: buckets are planned at the second forward
@pytest.mark.parametrize("load", WAYS)
@on_ranks(2)
def test_training_goes_on_bit_for_bit(rank: int, tmp_path: Path, load: str, steps: int) -> None:
    of, other = muon_and_adamw(), muon_and_adamw(seed=1)
    train(of[0], [of[1]], 0, 3, rank)
    train(other[0], [other[1]], 10, 10 + steps, rank)
    WAYS[load](of, other, tmp_path)
    for model, optimizer in (of, other):
        train(model, [optimizer], 3, 6, rank)
    assert differences(values(of[0]), values(other[0])) == []


@on_ranks(2)
def test_copies_in_fp32_of_a_group_without_state_are_saved_beside_those_with_it(rank: int) -> None:
    def made(seed: int) -> Made:
        model = wrapped(seed, torch.bfloat16)
        others, matrices = split(model)
        groups = [{"params": others, "optimizer_class": partial(SGD, lr=0.01)}, {"params": matrices}]
        return model, fastddp.ShardedOptimizer(model, AdamW, groups, lr=0.01)

    of, other = made(0), made(1)
    train(of[0], [of[1]], 0, 3, rank)
    by_whole(of, other, Path())
    assert differences(of[1].full_state_dict(), other[1].full_state_dict()) == []
    for model, optimizer in (of, other):
        train(model, [optimizer], 3, 6, rank)
    assert differences(values(of[0]), values(other[0])) == []


@on_ranks(2)
def test_a_group_that_comes_later_may_name_its_class(rank: int) -> None:
    model, optimizer = muon_and_adamw()
    others, matrices = split(later := wrapped())
    in_two = fastddp.ShardedOptimizer(later, AdamW, [{"params": others}], shard="parameters", lr=0.01, weight_decay=0.2)
    with pytest.raises(ValueError, match=r"leaves out last.weight(.|\n)*FD042"):
        in_two.load_state_dict(in_two.state_dict())
    in_two.add_param_group({"params": matrices, "optimizer_class": partial(Muon, lr=0.1), "momentum": 0.8})
    for one, its in ((model, optimizer), (later, in_two)):
        train(one, [its], 0, 3, rank)
    in_two.add_param_group({"params": []})
    for one, its in ((model, optimizer), (later, in_two)):
        train(one, [its], 3, 5, rank)
    assert differences(values(model), values(later)) == []
