"""No more memory than torch's DDP, in any mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from ranks import RankPool


def peak(rank: int, fast: bool, view: bool, set_to_none: bool) -> int:
    """Bytes that tensors had at most in steady steps, over those of the model."""
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(25))).cuda()
    before = torch.cuda.memory_allocated()
    ddp = fastddp.DistributedDataParallel if fast else TorchDDP
    model = ddp(module, gradient_as_bucket_view=view)
    inputs = torch.randn(4, 1024, device="cuda")
    for step in range(6):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        model(inputs).square().sum().backward()
        model.zero_grad(set_to_none)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.needs_cuda
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_peak_memory(gpu_ranks: RankPool, view: bool, set_to_none: bool) -> None:
    (ours,) = gpu_ranks.run(peak, 1, True, view, set_to_none)
    (theirs,) = gpu_ranks.run(peak, 1, False, view, set_to_none)
    tables = 2**20  # where gradients are, for the kernels
    assert ours <= theirs + tables
