"""The oracle itself, which everything else is compared with, agrees with torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from fastddp.reference import ReferenceDataParallel
from models import MODELS, inputs
from on_ranks import on_ranks


def train(wrap: Callable[..., nn.Module], name: str, rank: int) -> list[Tensor]:
    """Six steps, two within no_sync, one behind an evaluation: all gradients, and what is there in the end."""
    torch.manual_seed(rank)
    model = wrap(MODELS[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(6):
        syncs = step not in (1, 2)
        if step == 4:
            with torch.no_grad():
                model(inputs(name, rank, 10))
        with nullcontext() if syncs else model.no_sync():
            model(inputs(name, rank, step)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if syncs:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found + [tensor.detach().clone() for tensor in model.state_dict().values()]


@on_ranks(2)
def test_construction_leaves_alone_what_is_ignored(rank: int) -> None:
    module = nn.Linear(1, 1)
    module._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    nn.init.constant_(module.weight, rank)
    nn.init.constant_(module.bias, rank)
    ReferenceDataParallel(module)
    assert (module.weight.item(), module.bias.item()) == (0, rank)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_training_is_bitwise_that_of_torchs_ddp(rank: int, name: str) -> None:
    ours, torchs = (train(wrap, name, rank) for wrap in (ReferenceDataParallel, nn.parallel.DistributedDataParallel))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, torchs, strict=True))
    assert len(ours) > 10
