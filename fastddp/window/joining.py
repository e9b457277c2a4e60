"""Uneven inputs (torch's ``Join``): what a rank without inputs does while others train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.module.replicas import broadcast_replicas
from fastddp.ranks.agreement import greatest

# Note [Collectives of a forward under join]
# Ranks with and without inputs make the same collectives: which ranks still have inputs (torch's Join), what their
# forward is, all of `DistributedDataParallel._begin_step`, and at the end of a window those of the exchange.


def tell_of_forward(now: InForce, synchronises: bool) -> None:
    """Tell ranks without inputs of what kind this rank's forward is."""
    if now.is_uneven:
        _greatest([synchronises, torch.is_grad_enabled()], now)


def check_all_have_inputs(now: InForce, what: str) -> None:
    """Raise RuntimeError under Join, where a rank without inputs would neither be asked nor change its own part.

    Raised in the first step, before any rank has run out.
    """
    if now.is_uneven:
        raise RuntimeError(
            f"{what} asks all ranks, since each has a part of the gradients, and under Join a rank without inputs "
            "would not answer. Use an optimizer that is not sharded, or give all ranks as many inputs (drop_last=True)."
            + see("FD042")
        )


class JoinedRank(JoinHook):
    """Takes part in the collectives of a model's forwards and backwards, without gradients.

    ``shadow`` is told whether the others' forward synchronises, and whether gradients are enabled. The ``replicas`` are
    made equal on all ranks in the end.
    """

    def __init__(
        self, now: InForce, shadow: Callable[[bool, bool], None], replicas: Callable[[], list[tuple[str, Tensor]]]
    ) -> None:
        super().__init__()
        self._now = now
        self._shadow = shadow
        self._replicas = replicas

    def main_hook(self) -> None:
        """Follow one forward and backward of the others."""
        synchronises, grad_enabled = _greatest([False, False], self._now)
        self._shadow(bool(synchronises), bool(grad_enabled))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the model of a rank that trained to the end."""
        group = self._now.process_group
        source = _greatest([group.rank() if is_last_joiner else -1], self._now)[0]
        broadcast_replicas([tensor.detach() for _, tensor in self._replicas()], group, src=source)


def source_of_buffers(now: InForce, is_shadow: bool) -> int:
    """The rank whose buffers all others get: 0, or under join one with inputs."""
    if not now.is_uneven:
        return 0
    return _greatest([-1 if is_shadow else now.process_group.rank()], now)[0]


def _greatest(numbers: list[int], now: InForce) -> list[int]:
    return [int(number) for number in greatest(numbers, now.process_group, now.device)]
