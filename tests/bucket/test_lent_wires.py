"""lazy_bucket_allocation on the CPU. What it saves is counted on the simulated device: tests/device/test_wires.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from ranks import RankPool

WIDTH, LAYERS = 64, 3


def wrapped(hook: str, **options: bool) -> fastddp.DistributedDataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20, **options)
    if hook == "power_sgd":
        state = comm_hooks.PowerSGDState(None, 4, start_powerSGD_iter=2)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    elif hook == "int8":
        model.register_comm_hook(comm_hooks.BlockState(), comm_hooks.int8_compress_hook)
    elif hook:
        model.register_comm_hook(comm_hooks.CompressState(accumulate=hook), comm_hooks.bf16_compress_hook)
    return model


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    model(torch.randn(4, WIDTH, generator=generator)).square().sum().backward()


HOOKS = ["wire", "fp32", "int8", "power_sgd"]


def train(rank: int, hook: str, lazy: bool) -> list[Tensor]:
    model = wrapped(hook, lazy_bucket_allocation=lazy)
    found = []
    for step in range(5):
        model.zero_grad()
        backward(model, rank, step)
        found += [model.last_grad_norm(), *(parameter.grad.clone() for parameter in model.parameters())]
    return found


@pytest.mark.parametrize("hook", ["", *HOOKS])
def test_gradients_and_their_norm_are_the_same(ranks: RankPool, hook: str) -> None:
    kept, lent = (ranks.run(train, 2, hook, lazy) for lazy in (False, True))
    for a, b in zip(kept, lent, strict=True):
        assert all(map(torch.equal, a, b))
