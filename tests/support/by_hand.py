"""What gradients of a module are if they are averaged over ranks by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from on_ranks import differences, gradients, of_ranks

Loss = Callable[[Any], Tensor]


class Net(nn.Module):
    """A trunk with two heads, and a method beside ``forward`` for each way to use them."""

    def __init__(self, inputs: int = 3, width: int = 4) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(inputs, width), nn.Linear(width, 1), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_left(x) + self.of_right(x)

    def score(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x).sigmoid()
        return self.left(hidden).mean() + self.right(hidden).mean()

    def of_left(self, x: Tensor) -> Tensor:
        return self.left(self.trunk(x).tanh()).square().mean()

    def of_right(self, x: Tensor) -> Tensor:
        return self.right(self.trunk(x).tanh()).square().mean()

    def penalty(self) -> Tensor:
        return sum((parameter.square().sum() for parameter in self.parameters()), torch.zeros(()))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs(rank: int, number: int = 0, width: int = 3) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * number + rank))


def averaged(module: nn.Module, *losses: Loss) -> list[Any]:
    """Gradients after a backward of each loss; two ranks' sum is the same bit for bit, whoever adds up."""
    alone = copy.deepcopy(module)  # a plain module
    alone.zero_grad()
    for loss in losses:
        loss(alone).backward()
        for parameter in alone.parameters():
            is_used = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(is_used)
            if is_used:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient)
                parameter.grad = gradient / dist.get_world_size()
    return gradients(alone)


def check_averages(model: Any, *losses: Loss, plain: nn.Module | None = None, tolerance: float = 0.0) -> None:
    """Backwards of these losses leave the averages that ``plain``, or a plain copy, has by hand."""
    expected = averaged(model if plain is None else plain, *losses)
    model.zero_grad()
    for loss in losses:
        loss(model).backward()
    assert tolerance or differences(expected, gradients(model)) == []
    torch.testing.assert_close(gradients(model), expected, rtol=tolerance, atol=tolerance)


def are_same(values: list[Any]) -> bool:
    """Whether two ranks have the same."""
    here, there = of_ranks([None if value is None else value.tolist() for value in values])
    return bool(here == there)
