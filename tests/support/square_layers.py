"""A model of a few square layers, each a bucket, with one of several exchanges: for tests of what becomes of wires."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fastddp
from fastddp import comm_hooks

WIDTH, LAYERS = 64, 3
HOOKS = ["wire", "fp32", "int8", "power_sgd"]
"""bf16 that is added up as it is and in fp32, 8 bits, and factors."""


def wrapped(hook: str, device: torch.device | str = "cpu", **options: Any) -> fastddp.DistributedDataParallel:
    """The model under one of HOOKS, or with plain gradients where that is empty."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device)
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
    """Of inputs that each rank has for itself in each step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).device)
    model(inputs).square().sum().backward()
