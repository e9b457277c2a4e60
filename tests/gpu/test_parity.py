"""Training steps on a GPU are bitwise those of torch's DDP."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from ranks import RankPool


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def gradients(rank: int, ddp: type, device: str, dtype: torch.dtype, options: dict[str, object]) -> list[Tensor]:
    """Of the last of several steps, with a window of two backward passes among them."""
    torch.manual_seed(0)
    view, set_to_none = bool(options.get("view")), bool(options.get("set_to_none", True))
    model = ddp(Mlp().to(device, dtype), gradient_as_bucket_view=view, bucket_cap_mb=0.1)
    if options.get("hook"):
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for step in range(6):
        with model.no_sync() if step == 3 else nullcontext():
            generator = torch.Generator().manual_seed(100 * rank + step)
            inputs = torch.randn(16, 64, generator=generator).to(device, dtype)
            model(inputs).square().mean().backward()
        if step not in (3, 5):
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return [parameter.grad.float().cpu() for parameter in model.parameters()]


def difference(rank: int, device: str, dtype: torch.dtype, options: dict[str, object]) -> list[int]:
    """The parameters whose gradients differ."""
    if device == "cuda":
        torch.cuda.set_device(0)
    ours = gradients(rank, fastddp.DistributedDataParallel, device, dtype, options)
    theirs = gradients(rank, TorchDDP, device, dtype, options)
    return [index for index, pair in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(*pair)]


OPTIONS = [
    {},
    {"set_to_none": False},
    {"view": True},
    {"view": True, "set_to_none": False},
    {"hook": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_rank(gpu_ranks: RankPool, device: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    assert gpu_ranks.run(difference, 1, device, dtype, options) == [[]]


@pytest.mark.needs_cuda
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_ranks_over_gloo(gpu_ranks: RankPool, options: dict[str, object]) -> None:
    assert gpu_ranks.run(difference, 2, "cuda", torch.float32, options, backend="gloo") == [[], []]


def share_the_gpu() -> None:
    """NCCL refuses two ranks on one GPU unless they seem to be on two hosts; for correctness only, it is slow."""
    os.environ |= {
        "NCCL_HOSTID": f"r{os.getpid()}",
        "NCCL_NET": "Socket",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


@pytest.mark.needs_cuda
def test_two_nccl_ranks_on_one_gpu() -> None:
    pool = RankPool(prepare=share_the_gpu, backend="nccl")
    try:
        for options in OPTIONS:
            assert pool.run(difference, 2, "cuda", torch.float32, options, time_limit=100) == [[], []]
    finally:
        pool.stop()
