"""The norm of the averaged gradients, which the reducer measures anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from fastddp.errors import see
from fastddp.in_force import InForce


def measured(now: InForce) -> Tensor:
    """The sum of squares of the synchronised gradients, and how many elements are not finite.

    With sharded gradients each rank has measured its part, so this is a collective of the model's ranks.

    Raises:
        RuntimeError: no synchronisation has ended since the last forward.
    """
    if now.reducer.state != "finished":
        raise RuntimeError(
            "The norm of gradients, and whether they are finite, is known between the backward that synchronises them "
            "and the next forward. Ask for it after backward() and before the model is called again; a backward whose "
            "forward ran under no_sync() synchronises nothing." + see("FD014")
        )
    if now.setting.sharding is None:
        return now.reducer.measure()
    with _sparse_gradients_on_one_rank(now):
        parts = now.reducer.measure()
    dist.all_reduce(parts, group=now.process_group)
    return parts


@contextmanager
def _sparse_gradients_on_one_rank(now: InForce) -> Iterator[None]:
    """Each rank has all of them, and they count once."""
    counts = now.process_group.rank() == 0
    parameters = [] if counts else [now.parameters.tensors[index] for index in now.parameters.sparse]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
