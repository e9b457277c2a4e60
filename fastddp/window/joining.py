"""Uneven inputs: what a rank does that has no more of them while others train (torch's ``Join``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from fastddp.in_force import InForce
from fastddp.module.replicas import broadcast_replicas

# Note [Collectives of a forward under join]
# A rank with inputs, and one without, make the same collectives: that a rank is still there (torch's Join), what its
# forward is, all that `DistributedDataParallel._begin_step` does, and where a window ends those of the exchange.


def tell_of_forward(now: InForce, synchronises: bool) -> None:
    """Tell ranks without inputs what this rank's forward is."""
    if now.is_uneven:
        _greatest([synchronises, torch.is_grad_enabled()], now)


class JoinedRank(JoinHook):
    """Takes part in the collectives of a model's forwards and backwards, without gradients.

    Args:
        now: what is in force in the model that others train.
        shadow: called with what their forward is: whether it synchronises, and whether gradients are enabled.
        replicas: what is equal on all ranks in the end.
    """

    def __init__(
        self, now: InForce, shadow: Callable[[bool, bool], None], replicas: Callable[[], list[tuple[str, Tensor]]]
    ) -> None:
        super().__init__()
        self._now = now
        self._shadow = shadow
        self._replicas = replicas

    def main_hook(self) -> None:
        """One forward and backward of the others."""
        synchronises, grad_enabled = _greatest([False, False], self._now)
        self._shadow(bool(synchronises), bool(grad_enabled))

    def post_hook(self, is_last_joiner: bool) -> None:
        """The ranks that trained to the end have the final model."""
        group = self._now.process_group
        source = _greatest([group.rank() if is_last_joiner else -1], self._now)[0]
        broadcast_replicas([tensor.detach() for _, tensor in self._replicas()], group, src=source)


def source_of_buffers(now: InForce, is_shadow: bool) -> int:
    """The rank whose buffers all get: 0, or under join one that still has inputs."""
    if not now.is_uneven:
        return 0
    return _greatest([-1 if is_shadow else now.process_group.rank()], now)[0]


def _greatest(numbers: list[int], now: InForce) -> list[int]:
    wire = torch.tensor(numbers, dtype=torch.int64, device=now.device)
    dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=now.process_group)
    return [int(number) for number in wire.tolist()]
