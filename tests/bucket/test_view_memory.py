"""With gradient_as_bucket_view no more memory than torch's DDP takes: bytes of live tensors, by torch's profiler.

Resident memory says less: what malloc keeps after a tensor was freed depends on what else lives between.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import fastddp
from ranks import RankPool

WIDTH = 256
STEPS = 4


def peaks(rank: int, use_fastddp: bool, set_to_none: bool) -> list[int]:
    """The most bytes that lived in each step beyond what lived before the model was wrapped."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    inputs = torch.ones(4, WIDTH)
    wrap = fastddp.DistributedDataParallel if use_fastddp else TorchDDP
    model = None
    live, found = 0, []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            if model is None:
                # A thread of gloo's may free what a broadcast travelled in, and the profiler would not see that.
                model = wrap(module, bucket_cap_mb=0.6, gradient_as_bucket_view=True, init_sync=False)
            model(inputs).sum().backward()
            model.zero_grad(set_to_none=set_to_none)
        top = live
        for event in recorded.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                top = max(top, live)
        found.append(top)
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_step_takes_more_memory_than_under_torch(ranks: RankPool, set_to_none: bool) -> None:
    gradients = 12 * (WIDTH + 1) * WIDTH * 4
    for ours, torchs in zip(
        ranks.run(peaks, 2, True, set_to_none), ranks.run(peaks, 2, False, set_to_none), strict=True
    ):
        assert min(ours) > gradients  # the profiler sees wires
        # What threads of gloo's free, and small tensors of each side's own.
        assert all(our <= its + 16384 for our, its in zip(ours, torchs, strict=True)), (ours, torchs)
