"""Inputs on their way to the module's device, and what is inherited from the days of one process for all devices."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves

import fake_cuda
import fastddp
from hooks_by_name import register
from on_ranks import on_ranks
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
WIDTH = 4


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Nested(nn.Module):
    """Adds up every tensor that it is given, wherever it lies in the arguments, and notes what came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.devices = nn.Linear(WIDTH, WIDTH), list[str]()

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        leaves = tree_leaves((inputs, kwargs), is_leaf=lambda value: isinstance(value, PackedSequence))
        given = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves]
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        self.devices += [str(tensor.device) for tensor in tensors]
        self.other = [leaf for leaf in given if not isinstance(leaf, Tensor)]
        total = sum((tensor.sum() for tensor in tensors), torch.zeros(1, device=self.linear.weight.device))
        return self.linear(total.expand(2, WIDTH))


def gradients(rank: int, device: str, inputs_on: list[str], options: dict[str, Any]) -> tuple[Any, ...]:
    """Six tensors, on these devices in turn, and what is no tensor among them, are the inputs."""
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(Nested().to(device), **options)
    a, b, c, d, e, f = (torch.full((3,), rank + i + 1.0, device=inputs_on[i % len(inputs_on)]) for i in range(6))
    for _ in range(2):
        model.zero_grad()
        output = model(a, [b, (None, "text")], Pair(c, d), one={"two": [e]}, packed=pack_sequence([f.cpu()]), flag=True)
        output.square().sum().backward()
    module = model.module
    return [p.grad.cpu() for p in model.parameters()], module.devices, module.other, str(a.device)


@pytest.mark.parametrize(
    ("inputs_on", "ids"),
    [(["cpu"], [0]), (["cpu", f"{DEVICE}:1"], [0]), ([f"{DEVICE}:1"], [0]), (["cpu"], None)],
    ids=str,
)
def test_inputs_go_to_device_ids(ranks: RankPool, simulated_ranks: RankPool, inputs_on: list[str], ids: Any) -> None:
    expected, *_ = ranks.run(gradients, 2, "cpu", ["cpu"], {})[0]
    of_ranks = simulated_ranks.run(gradients, 2, f"{DEVICE}:0", inputs_on, {"device_ids": ids})
    for found, devices, other, original in of_ranks:
        assert devices == [f"{DEVICE}:0" if ids else "cpu"] * 2 * 6
        assert other == [None, "text", True]
        assert original == inputs_on[0]  # the caller's stay where they are
        assert all(map(torch.equal, found, expected))


def train(rank: int, default_device: str | None, options: dict[str, Any], hook: str) -> list[Tensor]:
    """Gradients and buffers after each of six steps."""
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) + rank for _ in range(6)]
    module = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    found: list[Tensor] = []
    with torch.device(default_device) if default_device else nullcontext():
        model = fastddp.DistributedDataParallel(module, **options)
        register(model, hook)
        for batch in batches:
            model.zero_grad()
            model(batch).square().sum().backward()
            found += [model.last_grad_norm(), *(parameter.grad.clone() for parameter in model.parameters())]
            found += [buffer.clone() for buffer in model.buffers()]
    return found


@pytest.mark.parametrize(
    ("options", "hook"),
    [
        ({"bucket_cap_mb": 0}, "fp16"),
        ({"bucket_cap_mb": 0}, "PowerSGD of rank 1"),
        ({"find_unused_parameters": True, "gradient_average": partial(float, 3)}, "none"),
        ({"bucket_cap_mb": "auto"}, "none"),
    ],
)
@on_ranks(2)
def test_the_default_device_is_for_the_users_tensors_alone(rank: int, options: dict[str, Any], hook: str) -> None:
    assert all(map(torch.equal, train(rank, "meta", options, hook), train(rank, None, options, hook)))
