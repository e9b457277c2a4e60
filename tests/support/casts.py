"""Hooks that cast gradients to 16 bits: training with them, and how far gradients are from exact ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastddp import comm_hooks
from models import MODELS, inputs

CASTS = {torch.float16: comm_hooks.fp16_compress_hook, torch.bfloat16: comm_hooks.bf16_compress_hook}
WIRES = pytest.mark.parametrize("wire", list(CASTS), ids=["fp16", "bf16"])
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
SMALL_BUCKETS = {"bucket_cap_mb": 100 / 2**20}
STEPS = 4


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def train(
    rank: int,
    make: Callable[..., nn.Module],
    state: object,
    hook: Callable[..., Any] | None,
    name: str = "batch norm MLP",
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[Tensor]:
    """All gradients of some steps, over buckets that hold a parameter or two."""
    torch.manual_seed(0)
    model = make(MODELS[name]().to(dtype), **SMALL_BUCKETS | options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    gradients = []
    for step in range(steps):
        model.zero_grad()
        model(inputs(name, rank, step).to(dtype)).square().sum().backward()
        gradients += gradients_of(model)
    return gradients


def under_torch(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same hook, which torch does not recognise: it refuses bf16 over gloo, which has long been able to."""
    return lambda state, bucket: hook(state, bucket)


def error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max()) for a, b in zip(gradients, exact, strict=True))
