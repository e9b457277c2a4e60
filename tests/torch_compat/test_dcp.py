"""torch.distributed.checkpoint and its state_dict helpers over fastddp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ranks import RankPool
from side_by_side import RESUMED, Trained, data, resumed_elsewhere, without_buffers


def wrapped() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Of a module without buffers: DCP saves those of one rank, and each rank has its own."""
    model = nn.parallel.DistributedDataParallel(without_buffers())
    return model, torch.optim.Adam(model.parameters(), 0.01)


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for index, (inputs, targets) in enumerate(data(24)):
        if index % 2 == rank:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def in_files(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    """Each rank saves and loads its share of what the two helpers for states return."""
    model, optimizer = wrapped()
    if which == (2,):
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for _ in which:
        train(rank, model, optimizer)
    if which == (1,):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return Trained.of(model)


def from_rank_0(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    """Rank 0 has a file, and the helpers tell the other rank."""
    model, optimizer = wrapped()
    if which == (2,):
        model_state, optimizer_state = torch.load(folder / "state.pt") if rank == 0 else ({}, {})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, model_state, options=options)
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    for _ in which:
        train(rank, model, optimizer)
    if which == (1,):
        states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            folder.mkdir()
            torch.save(states, folder / "state.pt")
    return Trained.of(model)


@RESUMED
@pytest.mark.parametrize("training", [in_files, from_rank_0])
def test_a_checkpoint_goes_on_under_either_ddp(
    ranks: RankPool, training: Any, save_under: str, load_under: str
) -> None:
    assert ranks.run(resumed_elsewhere, 2, training, save_under, load_under) == [[], []]
