"""Hooks of 8 bits on the simulated device: what training becomes, and what a step costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import comm_hooks
from ranks import RankPool

ORDERS = ["lazy", "others_first", "random"]
DEVICE = fake_cuda.DEVICE
BUCKETS = 2

SETTINGS: list[dict[str, Any]] = [
    {"hook": "int8_compress_hook"},
    {"hook": "fp8_compress_hook", "block_size": 128, "stochastic_rounding": True},
    {"hook": "fp8_compress_hook", "fp8": "e5m2", "error_feedback": False},
    {"hook": "int8_compress_hook", "dtype": torch.bfloat16},
]
settings = pytest.mark.parametrize("setting", SETTINGS, ids=["int8", "e4m3-drawn", "e5m2-without-errors", "int8-bf16"])


def wrapped(device: str, hook: str, view: bool, dtype: torch.dtype = torch.float32, **state: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 41), nn.GELU(), nn.Linear(41, 3))
    model = fastddp.DistributedDataParallel(
        module.to(device, dtype),
        bucket_cap_mb=0.003 * dtype.itemsize / 4,
        watch=fastddp.Watch(stall=None),
        gradient_as_bucket_view=view,
    )
    model.register_comm_hook(comm_hooks.BlockState(**state), getattr(comm_hooks, hook))
    return model


def train(rank: int, device: str, view: bool, setting: dict[str, Any], order: str = "lazy") -> list[Tensor]:
    """Gradients of each of five steps: those of this rank are given, so that no operator of the device counts."""
    if device == DEVICE:
        fake_cuda.schedule(order, 1)
    model = wrapped(device, view=view, **setting)
    found = []
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        loss = 0.0
        for parameter in model.parameters():
            given = torch.randn(parameter.shape, generator=generator).to(device, parameter.dtype)
            loss = loss + (parameter * given).sum()
        model.zero_grad()
        _through(model, loss)
        found += [parameter.grad.cpu() for parameter in model.parameters()]
    return found


def _through(model: Any, loss: Any) -> None:
    """Backward from a loss that is made beside the module: the forward opens the window."""
    inputs = torch.zeros(1, 8, device=next(model.parameters()).device, dtype=next(model.parameters()).dtype)
    (model(inputs).sum() * 0 + loss).backward()


@pytest.mark.tier("slow", but_one_in=5)
@settings
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_bitwise_those_on_the_cpu(
    ranks: RankPool, simulated_ranks: RankPool, setting: dict[str, Any], view: bool, order: str
) -> None:
    expected = ranks.run(train, 2, "cpu", view, setting)
    actual = simulated_ranks.run(train, 2, DEVICE, view, setting, order)
    for ours, theirs in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert torch.equal(ours, theirs)


def costs_of_a_step(rank: int, view: bool, setting: dict[str, Any]) -> dict[str, Any]:
    """In a steady state, with the device steps behind the host: launches, tables that went up, waits of the host."""
    extension = fake_cuda.build()
    fake_cuda.schedule("random", 1)
    model = wrapped(DEVICE, view=view, **setting)
    inputs = torch.randn(4, 8).to(DEVICE, setting.get("dtype", torch.float32))
    for step in range(11):
        if step == 6:
            extension.synchronize()  # which frees memory: addresses change once more
        if step == 8:
            launches, waits, copies = len(extension.launches()), extension.waits(), extension.copies()
        model(inputs).square().sum().backward()
        model.zero_grad()
    names = [name.removeprefix("fastddp_") for name in extension.launches()[launches:]]
    return {"launches": Counter(names), "uploads": extension.copies() - copies, "waits": extension.waits() - waits}


def kernels_of(setting: dict[str, Any]) -> list[str]:
    number = "int8" if setting["hook"].startswith("int8") else setting.get("fp8", "e4m3")
    form = f"{number}_{setting.get('block_size', 256)}"
    dtype = "bf16" if setting.get("dtype") == torch.bfloat16 else "fp32"
    drawn = "_drawn" if setting.get("stochastic_rounding") else ""
    return [f"block8_encode_{dtype}_{form}{drawn}", f"block8_add_{form}{drawn}", f"block8_decode_{dtype}_{form}"]


@settings
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
def test_a_steady_step_launches_three_kernels_a_bucket_and_sends_no_table(
    simulated_ranks: RankPool, setting: dict[str, Any], view: bool
) -> None:
    for costs in simulated_ranks.run(costs_of_a_step, 2, view, setting):
        assert costs == {"launches": dict.fromkeys(kernels_of(setting), 3 * BUCKETS), "uploads": 0, "waits": 0}
