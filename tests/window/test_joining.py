"""Uneven inputs: ranks that have no more of them (torch's Join)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import comm_hooks
from on_ranks import on_ranks
from releases import FORWARD_SYNC_BUFFERS


def train(wrap: Any, rank: int, batches: list[int], **join: Any) -> list[Tensor]:
    """Parameters and buffers after two epochs in which rank r has ``batches[r]`` batches, and a step after them."""
    torch.manual_seed(2)
    model = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        with model.join(**join):
            for batch in range(batches[rank]):
                inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * epoch + 10 * batch + rank))
                syncs = batch % 2 == 1
                with nullcontext() if syncs else model.no_sync():
                    model(inputs).square().sum().backward()
                if syncs:
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.zero_grad()
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(200 + rank))
    model(inputs).square().sum().backward()  # the mean is over all ranks again
    optimizer.step()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


BY_INPUTS = {"divide_by_initial_world_size": False}


@pytest.mark.parametrize(
    ("batches", "options", "join"),
    [
        ([2, 5, 3], {}, {}),
        ([0, 4, 0], {}, BY_INPUTS),
        ([1, 4, 2], {FORWARD_SYNC_BUFFERS: False}, {}),
        ([3, 3, 3], {}, {"enable": False}),
    ],
    ids=str,
)
@on_ranks(3)
def test_training_ends_as_under_torchs_ddp(rank: int, batches: list[int], options: Any, join: Any) -> None:
    ours = train(lambda m: fastddp.DistributedDataParallel(m, **options), rank, batches, **join)
    theirs = train(lambda m: TorchDDP(m, **options), rank, batches, **join)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def gradient(model: nn.Module, rank: int) -> float:
    """Of a backward that gives rank + 1 by itself."""
    model.zero_grad()
    model(torch.full((1, 8), rank + 1.0)).sum().backward()
    found = model.module.weight.grad
    torch.testing.assert_close(found, found[:1, :1].expand(8, 8), rtol=1e-5, atol=1e-5)
    return found[0, 0].item()


def square(**options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(nn.Linear(8, 8, bias=False), **options)


@on_ranks(4)
def test_the_ranks_with_inputs_are_those_of_the_exchange(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = square()
    model.register_comm_hook(pairs[rank // 2], comm_hooks.allreduce_hook)
    with model.join(**BY_INPUTS):
        expected = [[1.5], [1.5, 2.0], [3.5, 3.5], [3.5, 3.5]][rank]
        assert [gradient(model, rank) for _ in expected] == expected


@on_ranks(2)
def test_an_early_end_is_an_error_on_all_ranks_if_asked_for(rank: int) -> None:
    model = square()
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        [gradient(model, rank) for _ in range(2 + rank)]
