"""Small models that have what real ones have: buffers, other memory formats, several dtypes, shared parameters.

``MODELS`` names them, for use in a test's parameters. ``inputs(name, rank, step)`` is a batch for the model of that
name; it differs between ranks and steps, so that a gradient that stayed local shows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Expected(ArithmeticError):
    """What is raised on purpose."""


class RaisesInBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise Expected("in the middle of backward")


def batch_norm_mlp() -> nn.Module:
    """Linear layers and the three buffers of batch normalisation."""
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 7, bias=False))


class ConvNet(nn.Module):
    """Convolutions whose weights are channels_last, a batch norm, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.second = nn.Conv2d(8, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.to(memory_format=torch.channels_last))).relu()
        return self.second(self.frozen(x)).mean((2, 3))


class MixedDtypes(nn.Module):
    """Four dtypes in an order that leaves no two neighbours in one bucket, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Linear(6, 8)
        self.bf16 = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.fp64 = nn.Linear(8, 8, dtype=torch.float64)
        self.fp16 = nn.Linear(8, 8, dtype=torch.float16)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bf16(self.fp32(x).bfloat16())
        x = self.fp16(self.fp64(x.double()).half())
        return x.float() * self.scale


class SharedParameters(nn.Module):
    """An embedding tied to the output layer, a layer used twice, and a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.twice = nn.Linear(6, 6)
        self.transposed = nn.Parameter(torch.randn(6, 6).t())
        self.output = nn.Linear(6, 11)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.twice(self.twice(x).tanh()) @ self.transposed
        return self.output(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm MLP": batch_norm_mlp,
    "channels_last conv net": ConvNet,
    "mixed dtypes": MixedDtypes,
    "shared parameters": SharedParameters,
}


def inputs(name: str, rank: int, step: int) -> Tensor:
    """A batch of 5 for the model of that name; the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    if name == "shared parameters":
        return torch.randint(0, 11, (5, 4), generator=generator)
    shape = (5, 3, 6, 6) if name == "channels_last conv net" else (5, 6)
    return torch.randn(shape, generator=generator)
