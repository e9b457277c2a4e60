"""How much memory gradients take: bytes of live tensors, by torch's profiler.

Resident memory says less: what malloc keeps after a tensor was freed depends on what else lives between.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import fastddp
from fastddp import comm_hooks
from ranks import RankPool

WIDTH, LAYERS, STEPS = 256, 12, 4
ELEMENTS = LAYERS * (WIDTH + 1) * WIDTH


def live_bytes(
    rank: int, wrap: Any, dtype: torch.dtype, microbatches: int, set_to_none: bool, hook: Any = None, **options: Any
) -> tuple[list[int], int]:
    """Beyond the parameters: the most that lived in each step, and what lives behind the last."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)))
    inputs = torch.ones(4, WIDTH, dtype=dtype)
    model = None
    live, most = 0, []
    for step in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            if model is None:
                # A thread of gloo's may free what a broadcast travelled in, and the profiler would not see that.
                model = wrap(module, bucket_cap_mb=0.6, init_sync=False, **options)
                if hook is not None:
                    model.register_comm_hook(None, hook)
            for microbatch in range(microbatches):
                with model.no_sync() if microbatch + 1 < microbatches else nullcontext():
                    model(inputs).sum().backward()
            if step + 1 < STEPS:
                model.zero_grad(set_to_none=set_to_none)
        most.append(live)
        for event in recorded.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most[-1] = max(most[-1], live)
    return most, live


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_step_with_views_takes_more_memory_than_under_torch(ranks: RankPool, set_to_none: bool) -> None:
    how = (torch.float32, 1, set_to_none)
    ours = ranks.run(live_bytes, 2, fastddp.DistributedDataParallel, *how, gradient_as_bucket_view=True)
    torchs = ranks.run(live_bytes, 2, TorchDDP, *how, gradient_as_bucket_view=True)
    for (our, _), (its, _) in zip(ours, torchs, strict=True):
        assert min(our) > 4 * ELEMENTS  # the profiler sees wires
        # What threads of gloo's free, and small tensors of each side's own.
        assert all(a <= b + 16384 for a, b in zip(our, its, strict=True)), (our, its)


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_there_is_one_fp32_copy_of_all_main_gradients(ranks: RankPool, attribute: str, set_to_none: bool) -> None:
    options = {"main_grads": attribute}
    a_layer = (WIDTH + 1) * WIDTH * (2 + 4)  # what autograd has made, and its cast
    how = (fastddp.DistributedDataParallel, torch.bfloat16, 3, set_to_none)
    for most, live in ranks.run(live_bytes, 2, *how, **options):
        assert 4 * ELEMENTS <= live <= 4 * ELEMENTS + 32768
        assert most[-1] <= 4 * ELEMENTS + 2 * a_layer + 65536
    if set_to_none:
        for _, live in ranks.run(live_bytes, 2, *how, hook=comm_hooks.bf16_compress_hook, **options):
            # With a wire of 16 bits; what sums in fp32 over gloo take is as much as that.
            assert (4 + 2) * ELEMENTS <= live <= (4 + 2 + 2) * ELEMENTS + 65536
