"""Training loops that run twice: with modules that are replicated in place, and with gradients averaged by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from on_ranks import differences, gradients


class Net(nn.Module):
    """A trunk with two heads, and a method beside ``forward`` for each way to use them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x).tanh()
        return self.left(hidden).square().mean() + self.right(hidden).square().mean()

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


def inputs(rank: int, number: int = 0, size: int = 4) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(10 * number + rank))


def average(module: nn.Module) -> None:
    """Gradients over two ranks: the sum is the same bit for bit, whoever adds up."""
    for parameter in module.parameters():
        is_used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(is_used)
        if is_used:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient / 2


def averaged(module: nn.Module, loss: Callable[[Any], Tensor]) -> list[Any]:
    """Gradients of a loss, averaged by hand; ``module`` stays as it is."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    loss(alone).backward()
    average(alone)
    return gradients(alone)


class Training:
    """What a loop does with its modules, and what came of it."""

    def __init__(self, modules: Sequence[nn.Module], rank: int, *, is_by_hand: bool) -> None:
        self.modules, self.rank, self._is_by_hand = modules, rank, is_by_hand
        self._optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
        self.seen: list[Any] = []

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for module in self.modules if self._is_by_hand else ():
            average(module)

    def step(self, *numbers: int) -> None:
        """Of these modules' optimizers, or all."""
        for number in numbers or range(len(self.modules)):
            self.seen.append(gradients(self.modules[number]))
            self._optimizers[number].step()
        for module in self.modules:
            module.zero_grad()


Loop = Callable[[Training, int], object]


def check_loop(
    rank: int, loop: Loop, modules: Sequence[nn.Module] = (), tolerance: float = 0.0, times: int = 3, **options: Any
) -> None:
    """``loop`` runs with replicated modules and by hand; gradients are the same before each step of both."""
    modules = modules or [net()]
    found = []
    for is_by_hand in (True, False):
        copies = [copy.deepcopy(module) for module in modules]
        if not is_by_hand:
            copies = [fastddp.replicate(module, **options) for module in copies]
        training = Training(copies, rank, is_by_hand=is_by_hand)
        for number in range(times):
            loop(training, number)
        found.append(training.seen)
    if tolerance:
        torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)
    else:
        assert differences(*found) == []
