"""A model whose parameters can be used apart, each in a bucket of its own; the gradient of each is the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fastddp
from models import RaisesInBackward
from outputs import OUTPUTS


class Parts(nn.Module):
    """A forward uses the parameters that it is told to, and backward comes to the one named last first.

    Of other ``sizes`` than the input's, this is a number.
    """

    def __init__(self, names: str = "abc", dtype: torch.dtype | None = None, sizes: Sequence[int] = (3,) * 4) -> None:
        super().__init__()
        for name, size in zip(names, sizes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype)))
        self.names, self.output = names, "tensor"

    def forward(self, x: Tensor, used: str | None = None, fails: bool = False) -> Any:
        """``fails``: backward raises, at the parameter named first."""
        loss = x.sum() * 0
        for number, name in enumerate(self.names if used is None else used):
            parameter = getattr(self, name)
            loss = loss + ((RaisesInBackward.apply(parameter) if fails and number == 0 else parameter) * x).sum()
        return OUTPUTS[self.output](loss)


def wrapped(module: nn.Module | None = None, **options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(module or Parts(), **{"bucket_cap_mb": 0, **options})


def local_input(rank: int, factor: float = 1.0) -> Tensor:
    return torch.full((3,), factor * (rank + 1), requires_grad=True)  # the mean over two ranks is 1.5 * factor


def gradients(model: nn.Module, attribute: str = "grad") -> list[float | None]:
    """The first element of each gradient; all elements are equal."""
    found: list[float | None] = []
    for parameter in model.parameters():
        gradient = getattr(parameter, attribute)
        assert gradient is None or torch.equal(gradient, gradient[:1].expand_as(gradient))
        found.append(None if gradient is None else gradient[0].item())
    return found


def step(model: nn.Module, rank: int, used: str | None = None, set_to_none: bool = True) -> list[float | None]:
    """The gradients that a backward brings."""
    model.zero_grad(set_to_none)
    model(local_input(rank), used).backward()
    return gradients(model)
