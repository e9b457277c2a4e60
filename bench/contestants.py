"""Who competes in `bench.step`: each one wraps its own twin of the case's model and runs a training step on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bench.cases import Batch

# Who may be compared with whom. default: a gradient has memory of its own. view: gradients are views of the buckets.
# floor: no DDP at all, what the others are made of.
Semantics = Literal["floor", "default", "view"]


class Step(Protocol):
    """One contestant, ready to run."""

    def run(self, batch: Batch) -> None:
        """What is timed: forward and backward, and with them the reduction of the gradients."""

    def gradients(self) -> list[Tensor]:
        """The gradients that the last run left, in the order of the parameters."""

    def clear(self) -> None:
        """Frees the gradients, as an optimizer's zero_grad does between two steps."""


class TrainingStep:
    """Forward and backward of a module, wrapped or not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, batch: Batch) -> None:
        """See Step."""
        self.module(*batch).backward()

    def gradients(self) -> list[Tensor]:
        """See Step."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def clear(self) -> None:
        """See Step."""
        self.module.zero_grad(set_to_none=True)


class FlatAllReduce:
    """The wire alone: one allreduce of as many bytes as the module has gradients."""

    def __init__(self, module: nn.Module) -> None:
        sizes = [parameter.numel() for parameter in module.parameters()]
        # Zeros stay zeros, however often they are summed.
        self.flat = next(module.parameters()).new_zeros(sum(sizes))

    def run(self, batch: Batch) -> None:
        """See Step."""
        dist.all_reduce(self.flat)

    def gradients(self) -> list[Tensor]:
        """None of a model's."""
        return []

    def clear(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True)
class Contestant:
    """A name, who it may be compared with, and how it makes its step; `bucket_cap_mb` None is its own default."""

    name: str
    semantics: Semantics
    prepare: Callable[[nn.Module, float | None], Step]
    baseline: bool = False  # one of the settings of torch's DDP that a user could choose instead


def twin(module: nn.Module) -> nn.Module:
    """A second module with parameters of its own (so with gradients and hooks of its own) in the same memory.

    No step of the bench changes a parameter, and nine copies of GPT-2 on each of two ranks would not fit many machines.
    """
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, shared)


def _alone(module: nn.Module, bucket_cap_mb: float | None) -> Step:
    return TrainingStep(twin(module))


def _flat_all_reduce(module: nn.Module, bucket_cap_mb: float | None) -> Step:
    return FlatAllReduce(module)


def _torch(**options: Any) -> Callable[[nn.Module, float | None], Step]:
    def prepare(module: nn.Module, bucket_cap_mb: float | None) -> Step:
        return TrainingStep(TorchDDP(twin(module), bucket_cap_mb=bucket_cap_mb, **options))

    return prepare


def _fastddp(**options: Any) -> Callable[[nn.Module, float | None], Step]:
    def prepare(module: nn.Module, bucket_cap_mb: float | None) -> Step:
        import fastddp  # here, so that torch's contestants can be measured where the extension is not built

        return TrainingStep(fastddp.DistributedDataParallel(twin(module), bucket_cap_mb=bucket_cap_mb, **options))

    return prepare


# The one that every ratio and every gradient is compared with; always measured.
REFERENCE = "torch"

CONTESTANTS = (
    Contestant("alone", "floor", _alone),
    Contestant("flat-allreduce", "floor", _flat_all_reduce),
    Contestant(REFERENCE, "default", _torch(), baseline=True),
    # The same once more: how far its ratio is from 1 is the noise floor of the whole table.
    Contestant("torch-again", "default", _torch()),
    Contestant("torch-batched", "default", _torch(batched_grad_copy=True), baseline=True),
    Contestant("torch-view", "view", _torch(gradient_as_bucket_view=True), baseline=True),
    Contestant(
        "torch-view-batched", "view", _torch(gradient_as_bucket_view=True, batched_grad_copy=True), baseline=True
    ),
    Contestant("fastddp", "default", _fastddp()),
    Contestant("fastddp-view", "view", _fastddp(gradient_as_bucket_view=True)),
)
