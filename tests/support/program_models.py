"""The models of random training programs (``programs.py``), whose gradients are chosen numbers.

They are small dyadic rationals: sums and means over two or four ranks are exact in whatever order they are taken, in
every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models import Expected, RaisesInBackward
from outputs import OUTPUTS
from programs import ParameterSpec, Program, Uneven


def empty_in_layout(spec: ParameterSpec, device: str) -> Tensor:
    empty = partial(torch.empty, dtype=getattr(torch, spec.dtype), device=device)
    if spec.layout == "gaps":
        return empty(*spec.shape[:-1], 2 * spec.shape[-1] + 1)[..., : 2 * spec.shape[-1] : 2]
    if spec.layout == "reversed":
        return empty(spec.shape[::-1]).permute(*reversed(range(len(spec.shape))))
    memory_format = torch.channels_last if spec.layout == "channels_last" else torch.contiguous_format
    return empty(spec.shape, memory_format=memory_format)


def dyadic(spec: ParameterSpec, *seeds: int) -> Tensor:
    """Halves from -1 to 1, the same for the same seeds."""
    generator = torch.Generator().manual_seed(hash(seeds))
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_complex:
        return torch.randint(-2, 3, spec.shape, generator=generator).div(2).to(dtype)
    return torch.view_as_complex(torch.randint(-2, 3, (*spec.shape, 2), generator=generator).div(2))


MOST_ROWS = 3  # of an embedding that one use looks up


def rows(spec: ParameterSpec, *seeds: int) -> Tensor:
    """Indices of up to three rows, some of them the same; none of an embedding that has none."""
    generator = torch.Generator().manual_seed(hash(seeds))
    number = int(torch.randint(0, MOST_ROWS + 1, (), generator=generator)) if spec.shape[0] else 0
    return torch.randint(0, max(spec.shape[0], 1), (number,), generator=generator)


def shares(number: int, world_size: int, least: int) -> list[int]:
    """Of each rank, in forward ``number``; together a power of two."""
    generator = torch.Generator().manual_seed(number)
    rest = (8 << number % 3) - world_size * least
    cuts = torch.randint(0, rest + 1, (world_size - 1,), generator=generator).sort().values.tolist()
    return [least + after - before for before, after in pairwise([0, *cuts, rest])]


class Layer(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter


class Table(nn.Embedding):
    """A layer whose gradient is a sparse tensor."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__(parameter.shape[0], parameter.shape[1], sparse=True, device="meta")
        self.weight = parameter

    @property
    def parameter(self) -> Tensor:
        return self.weight


class Linear(nn.Module):
    """The loss is the sum of all parameters, each element times a number of its own: that number is its gradient."""

    def __init__(self, program: Program, rank: int, device: str) -> None:
        super().__init__()
        self.program, self.rank, self.device = program, rank, device
        self.layers = nn.ModuleList()
        for index, spec in enumerate(program.parameters):
            values = empty_in_layout(spec, device).copy_(dyadic(spec, rank, index))
            parameter = nn.Parameter(values, requires_grad=not spec.frozen)
            if spec.steps_in_backward and not spec.frozen:
                _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
            kind = Table if spec.sparse else Layer
            self.layers.append(nn.ModuleList([kind(parameter) for _ in range(1 + spec.shared)]))
        self.weight_in_average = torch.zeros((), device=device)
        self.register_buffer("forwards", torch.tensor(rank, device=device))
        self.register_buffer("drifts", torch.full((2, 3), float(rank), device=device).t())
        self.output = "tensor"

    def begin(self, number: int) -> None:
        """Before a forward: what this rank counts in an average with weights."""
        # Weights may be 0, but not those of all ranks that have inputs left.
        least = int(any(isinstance(op, Uneven) for op in self.program.ops))
        self.weight_in_average.fill_(shares(number, dist.get_world_size(), least)[self.rank])

    def forward(self, number: int, skip: Iterable[int] = (), fails: str = "") -> Any:
        return OUTPUTS[self.output](self._loss(number, skip, fails))

    def _loss(self, number: int, skip: Iterable[int], fails: str) -> Tensor:
        self.forwards += 1
        self.drifts += self.rank + 1
        if fails == "forward":
            raise Expected
        # A loss that requires a gradient, so that reentrant checkpoints have one, and a rank may use no parameter.
        loss = torch.zeros((), dtype=torch.float64, device=self.device, requires_grad=True)
        order = self.program.order_on(self.rank)
        for index in order:
            for use, layer in enumerate(self.layers[index] if index not in skip else []):
                loss = self._run(partial(self._add, layer.parameter, number, index, use), loss)
            if fails == "backward" and index == order[0]:
                loss = RaisesInBackward.apply(loss)
        return loss * 1

    def _run(self, layer: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        if self.program.checkpointed == "no":
            return layer(loss)
        return checkpoint(layer, loss, use_reentrant=self.program.checkpointed == "reentrant")

    def _add(self, parameter: Tensor, number: int, index: int, use: int, loss: Tensor) -> Tensor:
        spec = self.program.parameters[index]
        seeds = (self.rank, number, index, use)
        if spec.sparse:
            indices = rows(spec, *seeds)
            spec = replace(spec, shape=(len(indices), spec.shape[1]))
            parameter = F.embedding(indices.to(self.device), parameter, sparse=True)
        products = parameter * dyadic(spec, *seeds).to(self.device)
        return loss + (products.real if products.is_complex() else products).sum().double()
