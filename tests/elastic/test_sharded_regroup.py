"""A sharded optimizer whose model is given other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fastddp
from on_ranks import on_ranks

SIDE = 24


class Trained:
    """A model with a sharded AdamW."""

    def __init__(self, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        self.model = fastddp.DistributedDataParallel(self.module, process_group=group, bucket_cap_mb=0.003)
        self.optimizer = fastddp.ShardedOptimizer(self.model, torch.optim.AdamW, lr=0.01, **options)
        self.steps = 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * self.steps + self.model.process_group.rank())
            self.model(torch.randn(4, SIDE, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.steps += 1
        self.model.parameters_ready()


def by_full(trained: Trained, state: dict[str, Any], folder: Path) -> None:
    trained.optimizer.load_state_dict(state)


def by_dcp(trained: Trained, state: dict[str, Any], folder: Path) -> None:
    group = trained.model.process_group
    into = {"optimizer": get_optimizer_state_dict(trained.model, trained.optimizer)}
    dcp.load(into, checkpoint_id=folder, process_group=group)
    set_optimizer_state_dict(trained.model, trained.optimizer, into["optimizer"])


LOADED = {"full": by_full, "DCP": by_dcp}


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("how", LOADED)
@on_ranks(3)
def test_it_refuses_to_step_until_it_has_loaded_and_then_goes_on_as_a_job_of_that_many(
    how: str, gather: str, tmp_path: Path, rank: int
) -> None:
    pair = dist.new_group([0, 2])
    trained = Trained(gather=gather)
    trained.train(3)
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder, 0)
    dcp.save({"optimizer": get_optimizer_state_dict(trained.model, trained.optimizer)}, checkpoint_id=folder[0])
    of_model = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    state = trained.optimizer.gather_state()
    trained.train(1)  # the checkpoint is older than the end
    if rank == 1:
        return
    trained.model.regroup(pair)
    with pytest.raises(RuntimeError, match="FD053"):
        trained.optimizer.step()
    with pytest.raises(RuntimeError, match="FD053"):
        trained.optimizer.state_dict()
    trained.model.load_state_dict(of_model)
    LOADED[how](trained, state, Path(folder[0]))
    other = Trained(pair, gather=gather)
    other.model.load_state_dict(of_model)
    other.optimizer.load_state_dict(state)
    for each in (trained, other):
        each.steps = 3
        each.train(3)
    for mine, theirs in zip(trained.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@on_ranks(3)
def test_a_planned_change_hands_everything_to_whoever_saves(rank: int) -> None:
    trained = Trained()
    trained.train(2)
    state = trained.optimizer.gather_state(destination=2)
    assert bool(state) == (rank == 2)
    with pytest.raises(ValueError, match="FD024"):
        trained.optimizer.gather_state(destination=3)
    handed = [state]
    dist.broadcast_object_list(handed, 2)
    reversed_ranks = dist.new_group([0, 1, 2])
    trained.model.regroup(reversed_ranks)
    trained.optimizer.load_state_dict(handed[0])
    twin = Trained()
    twin.train(2)
    for each in (trained, twin):
        each.train(2)
    for mine, theirs in zip(trained.module.parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@on_ranks(2)
def test_without_state_nothing_is_lost(rank: int) -> None:
    trained, twin = Trained(), Trained()
    trained.model.regroup(dist.new_group([0, 1]))
    for each in (trained, twin):
        each.train(2)
    for mine, theirs in zip(trained.module.parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@on_ranks(2)
def test_a_rank_with_another_optimizer_is_named(rank: int) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    trained = Trained(alone, shard="elements" if rank == 0 else "parameters")
    with pytest.raises(RuntimeError, match=r"shard='parameters'"):
        trained.model.regroup(dist.group.WORLD)


@on_ranks(2)
def test_parameters_that_never_came_are_named_after_it(rank: int) -> None:
    trained = Trained()
    trained.train(2)
    shards, parameters = trained.optimizer.parts.shards, [*trained.model.parameters()]
    shards.lack({index: parameters[index]._version for index in shards.plan[0]})  # as after a gather that fails
    trained.model.regroup(dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="FD044"):
        trained.model(torch.ones(1, SIDE))
