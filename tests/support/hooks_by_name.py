"""Communication hooks by name, with states for small models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState, CompressState, PowerSGDState


def averages(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of a user's own."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def averages_elsewhere(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Another: the result is not the bucket's buffer."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "fp16": (CompressState, comm_hooks.fp16_compress_hook),
    "bf16": (CompressState, comm_hooks.bf16_compress_hook),
    "fp16, sums in fp32": (partial(CompressState, accumulate="fp32"), comm_hooks.fp16_compress_hook),
    "bf16, sums in fp32": (partial(CompressState, accumulate="fp32"), comm_hooks.bf16_compress_hook),
    "fp16, sums in the wire": (partial(CompressState, accumulate="wire"), comm_hooks.fp16_compress_hook),
    "bf16, sums in the wire": (partial(CompressState, accumulate="wire"), comm_hooks.bf16_compress_hook),
    "int8": (BlockState, comm_hooks.int8_compress_hook),
    "e4m3, drawn": (partial(BlockState, block_size=128, stochastic_rounding=True), comm_hooks.fp8_compress_hook),
    "e5m2, no errors": (partial(BlockState, fp8="e5m2", error_feedback=False), comm_hooks.fp8_compress_hook),
    "PowerSGD": (partial(PowerSGDState, None, 2, start_powerSGD_iter=2), comm_hooks.powerSGD_hook),
    "PowerSGD of rank 1": (partial(PowerSGDState, None, 1, start_powerSGD_iter=2), comm_hooks.powerSGD_hook),
    "batched PowerSGD": (partial(PowerSGDState, None, 1, start_powerSGD_iter=2), comm_hooks.batched_powerSGD_hook),
    "noop": (lambda: None, comm_hooks.noop_hook),
    "python": (lambda: None, averages),
    "python, elsewhere": (lambda: None, averages_elsewhere),
}


def register(model: DistributedDataParallel, name: str) -> None:
    """One of HOOKS; or "none"."""
    if name != "none":
        state, hook = HOOKS[name]
        model.register_comm_hook(state(), hook)
