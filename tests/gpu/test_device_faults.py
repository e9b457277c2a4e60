"""Faults of a device under two ranks: each is named where it happened, and ends what waits for it.

A stopped rank is in test_four_ranks.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from ranks import RankPool, RanksFailed
from waiting import until

FAILING = 1
TIME_LIMIT = 60.0
SECONDS_OF_SPINNING = 10


class Wrong(torch.autograd.Function):
    """The identity, in whose backward something goes wrong on one rank."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, fault: str) -> Tensor:
        ctx.fault = fault
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fault == "not finite":
            return torch.full_like(gradient, torch.nan), None
        if ctx.fault == "memory":
            torch.empty(2**50, dtype=torch.uint8, device=gradient.device)
        if ctx.fault == "address":
            beyond = torch.full((1,), 2**40, dtype=torch.int64, device=gradient.device)
            torch.ops.aten._unsafe_index_put(gradient.clone().flatten(), [beyond], gradient.flatten()[:1])
        if ctx.fault == "spins":
            torch.cuda._sleep(SECONDS_OF_SPINNING * 2_000_000_000)
        return gradient.clone(), None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, fault: str = "") -> Tensor:
        return self.second(Wrong.apply(self.first(inputs), fault)).square().sum()


def around(rank: int, device: str, fault: str, watch: fastddp.Watch, folder: Path | None = None) -> list[str]:
    """What this rank is told by a step with the fault and the one after it; also in a file, if it is to end."""
    torch.accelerator.set_device_index(0)
    if device == fake_cuda.DEVICE:
        fake_cuda.schedule("lazy")
    model = fastddp.DistributedDataParallel(Layers().to(device), bucket_cap_mb=0, watch=watch)
    said: list[str] = []
    for step in range(6):
        try:
            model.zero_grad()
            model(torch.ones(2, 4, device=device), fault if rank == FAILING and step == 4 else "").backward()
            torch.accelerator.synchronize()
            if fault == "not finite" and step == 4:
                said.append(str(model.blame_non_finite()))
        except RuntimeError as error:
            said.append(str(error))
            if folder is not None:
                break
    if folder is not None:
        Path(folder, str(rank)).write_text(" ".join(said))
        until(lambda: Path(folder, str(1 - rank)).exists())  # whose process ends would take the other's with it
        os._exit(0)
    return said


def test_what_is_not_finite_is_named(sharing_ranks: RankPool, device: str) -> None:
    watch = fastddp.Watch(stall=None, corruption="report")
    for said in sharing_ranks.run(around, 2, device, "not finite", watch, time_limit=TIME_LIMIT):
        assert any(f"rank {FAILING}" in text and "first" in text for text in said), said


def test_a_rank_without_memory_is_named(sharing_ranks: RankPool, device: str) -> None:
    of_ranks = sharing_ranks.run(around, 2, device, "memory", fastddp.Watch(stall=None), time_limit=TIME_LIMIT)
    assert any(f"failed on rank {FAILING}" in text for text in of_ranks[0]), of_ranks
    assert any("memory" in text for text in of_ranks[FAILING]), of_ranks


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("fault", "says"), [("address", "illegal"), ("spins", "FD016")])
def test_a_lost_device_is_named_and_ends_all(
    fresh_sharing_ranks: RankPool, device: str, tmp_path: Path, fault: str, says: str
) -> None:
    """By an error of the other rank's, which names it."""
    watch = fastddp.Watch("raise", patience=1.0, idle_patience=2.0)
    with pytest.raises(RanksFailed):  # they end without a word
        fresh_sharing_ranks.run(around, 2, device, fault, watch, tmp_path, time_limit=TIME_LIMIT)
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert f"rank {FAILING}" in said[0], said
    assert any(says in text for text in said), said
