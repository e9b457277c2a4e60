"""Inputs on their way to the module's device, and what is inherited from the days of one process for all devices."""

from __future__ import annotations

import collections
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import distributed as torchs_module
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fake_cuda
import fastddp
from fastddp import comm_hooks
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
WIDTH = 4


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Nested(nn.Module):
    """Adds up every tensor that it is given, wherever it lies in the arguments, and notes the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.devices: collections.Counter[str] = collections.Counter()
        self.other: list[Any] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        total = sum(self.tensors([inputs, kwargs]), torch.zeros(1, device=self.linear.weight.device))
        return self.linear(total.expand(2, WIDTH))

    def tensors(self, value: Any) -> list[Tensor]:
        """All of them, by the sum of their elements."""
        if isinstance(value, PackedSequence):
            return self.tensors(value.data)
        if isinstance(value, Tensor):
            self.devices[str(value.device)] += 1
            return [value.sum()]
        if isinstance(value, dict):
            return self.tensors(list(value.values()))
        if isinstance(value, (list, tuple)):
            return [tensor for item in value for tensor in self.tensors(item)]
        self.other.append(value)
        return []


def arguments(rank: int, devices: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Six tensors, on these devices in turn, and what is no tensor among them."""
    a, b, c, d, e, f = (torch.full((3,), rank + i + 1.0, device=devices[i % len(devices)]) for i in range(6))
    return [a, [b, (None, "text")], Pair(c, d)], {"one": {"two": [e]}, "packed": pack_sequence([f.cpu()]), "flag": True}


def gradients(rank: int, device: str, inputs_on: list[str], options: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = fastddp.DistributedDataParallel(Nested().to(device), **options)
    inputs, kwargs = arguments(rank, inputs_on)
    for _ in range(2):
        model.zero_grad()
        model(*inputs, **kwargs).square().sum().backward()
    module = model.module
    return [p.grad.cpu() for p in model.parameters()], dict(module.devices), module.other[:3], str(inputs[0].device)


@pytest.mark.parametrize("inputs_on", [["cpu"], ["cpu", f"{DEVICE}:1"], [f"{DEVICE}:1"]], ids=str)
def test_device_ids_moves_all_inputs_to_the_device_wherever_they_are(
    ranks: RankPool, simulated_ranks: RankPool, inputs_on: list[str]
) -> None:
    expected, _, others, _ = ranks.run(gradients, 2, "cpu", ["cpu"], {})[0]
    for found, devices, other, original in simulated_ranks.run(
        gradients, 2, f"{DEVICE}:0", inputs_on, {"device_ids": [0]}
    ):
        assert devices == {f"{DEVICE}:0": 2 * 6}
        assert other == others == [None, "text", True]
        assert original == inputs_on[0]  # the caller's stay where they are
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_without_device_ids_inputs_stay_where_they_are(simulated_ranks: RankPool) -> None:
    for _, devices, _, _ in simulated_ranks.run(gradients, 2, f"{DEVICE}:0", ["cpu"], {}):
        assert devices == {"cpu": 2 * 6}


def inherited(rank: int) -> list[Any]:
    """What torch's functions behind the two methods are called with."""
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2), dim=1)
    called: list[Any] = []
    originals = torchs_module.scatter_kwargs, torchs_module.gather
    torchs_module.scatter_kwargs = lambda *args, dim: called.append(("scatter", args, dim))
    torchs_module.gather = lambda *args, dim: called.append(("gather", args, dim))
    try:
        model.scatter((1,), {"a": 2}, [3])
        model.gather([1], 2)
    finally:
        torchs_module.scatter_kwargs, torchs_module.gather = originals
    return called


def test_scatter_and_gather_are_torchs_along_the_models_dim(ranks: RankPool) -> None:
    assert ranks.run(inherited, 1) == [[("scatter", ((1,), {"a": 2}, [3]), 1), ("gather", ([1], 2), 1)]]


def outputs(rank: int) -> list[bool]:
    """Whatever a module returns comes out as the object that it is."""
    found = []
    for value in (None, "text", {"a": [torch.ones(1)]}, Pair(torch.ones(1), torch.ones(1)), torch.ones(1)):
        module = nn.Linear(1, 1)
        module.forward = partial(lambda value: value, value)  # type: ignore[method-assign]
        found.append(fastddp.DistributedDataParallel(module)() is value)
    return found


def test_outputs_are_handed_out_as_they_are(ranks: RankPool) -> None:
    assert ranks.run(outputs, 1) == [[True] * 5]


class WithBuffers(nn.Module):
    """A linear layer behind a batch norm, built on the CPU whatever the default device is."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def train(rank: int, default_device: str | None, options: dict[str, Any], hook: str | None) -> list[Tensor]:
    """Gradients and buffers after each of six steps."""
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) + rank for _ in range(6)]
    torch.set_default_device(default_device)
    try:
        model = fastddp.DistributedDataParallel(WithBuffers(), **options)
        if hook == "PowerSGD":
            state = comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, comm_hooks.powerSGD_hook)
        elif hook is not None:
            model.register_comm_hook(None, getattr(comm_hooks, hook))
        found = []
        for batch in batches:
            model.zero_grad()
            model(batch).square().sum().backward()
            found += [model.last_grad_norm(), *(parameter.grad.clone() for parameter in model.parameters())]
            found += [buffer.clone() for buffer in model.buffers()]
        return found
    finally:
        torch.set_default_device(None)


def weight() -> float:
    return 3.0


@pytest.mark.parametrize(
    ("options", "hook"),
    [
        ({"bucket_cap_mb": 0}, "fp16_compress_hook"),
        ({"bucket_cap_mb": 0}, "PowerSGD"),
        ({"find_unused_parameters": True}, None),
        ({"gradient_average": weight}, None),
        ({"bucket_cap_mb": "auto"}, None),
    ],
    ids=["fp16", "PowerSGD", "unused", "weight", "auto"],
)
def test_the_default_device_is_for_the_users_tensors_alone(
    ranks: RankPool, options: dict[str, Any], hook: str | None
) -> None:
    for ours, theirs in zip(
        ranks.run(train, 2, "meta", options, hook), ranks.run(train, 2, None, options, hook), strict=True
    ):
        assert all(map(torch.equal, ours, theirs))


def wrap_another_model_on_rank_1(rank: int) -> None:
    module = nn.Linear(2, 2 + rank)
    torch.set_default_device("meta")
    try:
        fastddp.DistributedDataParallel(module)
    finally:
        torch.set_default_device(None)


def test_models_that_differ_are_described_whatever_the_default_device_is(ranks: RankPool) -> None:
    for error in ranks.errors(wrap_another_model_on_rank_1, 2):
        assert "rank 1: 'weight' of shape (3, 2)" in error.message
