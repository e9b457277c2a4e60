"""A few steps of a small model in one process: what the sanitizers look at."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import fastddp


def main(view: bool) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)).cuda()
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=0.005)
    held = []
    next(module.parameters()).register_post_accumulate_grad_hook(lambda p: held.append(p.grad))  # so that unpack runs
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 33, device="cuda")).square().sum().backward()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main("view" in sys.argv)
