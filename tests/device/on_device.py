"""A small model under any exchange, trained on the CPU or on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from hooks_by_name import register
from nodes import nodes_of_two

DEVICE = fake_cuda.DEVICE
ORDERS = pytest.mark.parametrize("order", ["lazy", "others_first", "random"])
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
WARMUP = 4
"""Steps, before one is captured."""


@dataclass(frozen=True)
class Case:
    """A way of training, and how far the device's results may be from the CPU's, relative to them: 0, not a bit."""

    hook: str = "none"
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    set_to_none: bool = True
    microbatches: int = 1
    ranks: int = 2
    backend: str | None = None
    tolerance: float = 0.0
    by_method: bool = False  # of a module that is replicated in place, so windows open in backward

    def __str__(self) -> str:
        return ", ".join([self.hook, *map(str, self.options.values()), *(["by a method"] if self.by_method else [])])

    def wrapped(self, rank: int, device: str, **options: Any) -> Any:
        """Two buckets, some of whose gradients are not aligned; four ranks are on two nodes."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 41), nn.GELU(), nn.Linear(41, 4))
        # On a busy machine a watch would ask the simulated device, which goes on when asked.
        options = {"bucket_cap_mb": 0.003, "watch": fastddp.Watch(stall=None)} | self.options | options
        with nodes_of_two(rank):
            wrap: Any = fastddp.replicate if self.by_method else fastddp.DistributedDataParallel
            model = wrap(module.to(device, self.dtype), **options)
        register(model, self.hook)
        return model

    def backward(self, model: nn.Module, inputs: Tensor) -> None:
        for left in reversed(range(self.microbatches)):
            with model.no_sync() if left else nullcontext():
                call = model.forward if self.by_method else model
                call((1 + left) * inputs.to(self.dtype)).float().square().sum().backward()

    def gradients(self, model: nn.Module) -> list[Tensor]:
        attribute = self.options.get("main_grads", "grad")
        return [getattr(parameter, attribute) for parameter in model.parameters()]

    def compare(self, actual: Any, expected: Any) -> None:
        torch.testing.assert_close(actual, expected, rtol=self.tolerance, atol=min(self.tolerance, 1e-4))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


@contextmanager
def captured() -> Iterator[list[Callable[[], None]]]:
    """Capture what the current stream is given; then the list holds the function that replays it."""
    torch.accelerator.synchronize()
    fake_cuda.begin_capture()
    replays: list[Callable[[], None]] = []
    yield replays
    replays.append(fake_cuda.end_capture().replay)
