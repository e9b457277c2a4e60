"""torch.distributed.checkpoint and its state_dict helpers over fastddp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ranks import RankPool
from side_by_side import RESUMED, Trained, data, resumed_elsewhere, without_buffers


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for index, (inputs, targets) in enumerate(data(24)):
        if index % 2 == rank:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def halves(rank: int, folder: Path, which: tuple[int, ...]) -> Trained:
    """Each rank saves and loads its share of what the two helpers for states return."""
    model = nn.parallel.DistributedDataParallel(
        without_buffers()
    )  # DCP saves buffers of one rank, and each has its own
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
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


@RESUMED
def test_a_checkpoint_goes_on_under_either_ddp(ranks: RankPool, save_under: str, load_under: str) -> None:
    assert ranks.run(resumed_elsewhere, 2, halves, save_under, load_under) == [[], []]
