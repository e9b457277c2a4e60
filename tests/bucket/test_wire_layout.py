"""Where gradients lie in a wire, each at a multiple of 16 bytes with zeros between them, and how much memory they take.

Hooks see no gaps. Memory is bytes of live tensors, by torch's profiler: resident memory says less, since what malloc
keeps after a tensor was freed depends on what else lives between.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import fake_cuda
import fastddp
from fastddp import comm_hooks
from hooks_by_name import averages
from models import RaisesInBackward
from on_ranks import on_ranks
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])


class Odd(nn.Module):
    """Parameters of 1, 3, 7, 0, 10 and 33 elements, so that all but the first would lie at odd places."""

    SIZES = (1, 3, 7, 0, 10, 33)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.ones(size, dtype=dtype) for size in self.SIZES)

    def forward(self, factor: float, fails: bool = False) -> Tensor:
        """``fails``: in the backward of the first parameter, which comes last."""
        values = [RaisesInBackward.apply(self.values[0]) if fails else self.values[0], *self.values[1:]]
        return torch.stack([(value * factor * (index + 1)).sum().abs() for index, value in enumerate(values)]).sum()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


@VIEWS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_every_gradient_begins_at_a_multiple_of_16_bytes(rank: int, dtype: torch.dtype, view: bool) -> None:
    models = [ddp(Odd(dtype), gradient_as_bucket_view=view) for ddp in (fastddp.DistributedDataParallel, TorchDDP)]
    for model in models:
        for step in range(3):
            model.zero_grad()
            model(1.5 + rank + step).backward()
    ours, theirs = map(gradients, models)
    assert all(gradient.data_ptr() % 16 == 0 for gradient in ours if gradient.numel())
    assert all(map(torch.equal, ours, theirs))


@VIEWS
@on_ranks(2)
def test_what_lies_between_gradients_is_zero_even_after_a_window_that_failed(rank: int, view: bool) -> None:
    model = fastddp.DistributedDataParallel(Odd(), gradient_as_bucket_view=view)
    for step in range(5):
        model.zero_grad(set_to_none=step % 2 == 0)
        loss = model(float(rank + step), fails=step == 2 and rank == 1)
        with pytest.raises((ArithmeticError, RuntimeError)) if step == 2 else nullcontext():
            loss.backward()
        if step == 2 and rank == 1:
            continue
        assert step != 2 or gradients(model)[0].isnan().all()
        with_elements = [gradient for gradient in gradients(model) if gradient.numel()]
        wire = torch.empty(0).set_(with_elements[0].untyped_storage())
        is_gap = torch.ones(wire.numel(), dtype=torch.bool)
        for gradient in with_elements:
            assert gradient.untyped_storage().data_ptr() == wire.data_ptr()
            is_gap[gradient.storage_offset() : gradient.storage_offset() + gradient.numel()] = False
        assert is_gap.any()
        assert not wire[is_gap].any()
    torch.testing.assert_close(model.last_grad_norm().float(), torch.nn.utils.get_total_norm(gradients(model)))
    assert not bool(model.found_inf())


@VIEWS
@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_a_hook_sees_gradients_one_after_the_other(rank: int, view: bool, late: bool) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        parts = bucket.gradients()
        assert sorted(part.numel() for part in parts) == sorted(Odd.SIZES)
        assert torch.equal(torch.cat([part.flatten() for part in parts]), bucket.buffer())
        return averages(state, bucket)

    model = fastddp.DistributedDataParallel(Odd(), gradient_as_bucket_view=view)
    if late:
        model(1.0).backward()  # in a wire with gaps
    model.register_comm_hook(None, hook)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        model(float(rank + step)).backward()
        for index, gradient in enumerate(gradients(model)):
            torch.testing.assert_close(gradient, torch.full(gradient.shape, (step + 0.5) * (index + 1)))


@pytest.mark.tier("slow", but_one_in=3)
@VIEWS
@pytest.mark.parametrize("hook", ["", "bf16_compress_hook"])
@on_ranks(2, pool="simulated_ranks")
def test_nothing_is_moved_element_by_element_after_a_bias_of_ten(rank: int, hook: str, view: bool) -> None:
    fake_cuda.schedule("in_order")
    module = nn.Sequential(nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 16)).to(DEVICE)
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view)
    if hook:
        model.register_comm_hook(comm_hooks.CompressState(accumulate="wire"), getattr(comm_hooks, hook))
    before = fake_cuda.chunks_by_element()
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 16, device=DEVICE)).square().sum().backward()
    fake_cuda.synchronize()
    assert fake_cuda.launches()
    assert fake_cuda.chunks_by_element() == before


WIDTH, LAYERS, STEPS = 256, 12, 4
ELEMENTS = LAYERS * (WIDTH + 1) * WIDTH


def live_bytes(
    rank: int, wrap: Any, dtype: torch.dtype, microbatches: int, set_to_none: bool, hook: Any = None, **options: Any
) -> tuple[list[int], int]:
    """Beyond the parameters: the most that lived in each step, and what lives after the last."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)))
    inputs = torch.ones(4, WIDTH, dtype=dtype)
    model = None
    live, most = 0, []
    for step in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            # Torch's DDP does not wait until gloo has left a collective. Gloo then writes the time into its event, even
            # if the profiler has freed that.
            torch._C._autograd._enable_record_function(False)
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
            torch._C._autograd._enable_record_function(True)
        most.append(live)
        for event in recorded.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most[-1] = max(most[-1], live)
    return most, live


def fewest_live_bytes(ranks: RankPool, *how: Any, **options: Any) -> tuple[list[int], int]:
    """Of some runs: the profiler does not see what a thread of gloo's frees, if it lets go last."""
    runs = [run for _ in range(3) for run in ranks.run(live_bytes, 2, *how, **options)]
    return [min(of_step) for of_step in zip(*(most for most, _ in runs), strict=True)], min(live for _, live in runs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_step_with_views_takes_more_memory_than_under_torch(ranks: RankPool, set_to_none: bool) -> None:
    how = (torch.float32, 1, set_to_none)
    our, _ = fewest_live_bytes(ranks, fastddp.DistributedDataParallel, *how, gradient_as_bucket_view=True)
    its, _ = fewest_live_bytes(ranks, TorchDDP, *how, gradient_as_bucket_view=True)
    assert min(our) > 4 * ELEMENTS  # the profiler sees wires
    assert all(a <= b + 16384 for a, b in zip(our, its, strict=True)), (our, its)  # small tensors of each side's own


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_there_is_one_fp32_copy_of_all_main_gradients(ranks: RankPool, attribute: str, set_to_none: bool) -> None:
    options = {"main_grads": attribute}
    a_layer = (WIDTH + 1) * WIDTH * (2 + 4)  # what autograd has made, and its cast
    how = (fastddp.DistributedDataParallel, torch.bfloat16, 3, set_to_none)
    most, live = fewest_live_bytes(ranks, *how, **options)
    assert 4 * ELEMENTS <= live <= 4 * ELEMENTS + 32768
    assert most[-1] <= 4 * ELEMENTS + 2 * a_layer + 65536
    if set_to_none:
        _, live = fewest_live_bytes(ranks, *how, hook=comm_hooks.bf16_compress_hook, **options)
        # With a wire of 16 bits; what sums in fp32 over gloo take is as much as that.
        assert (4 + 2) * ELEMENTS <= live <= (4 + 2 + 2) * ELEMENTS + 65536


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.used(x) + (self.unused(x) if x[0, 0] > 2 else 0)).square()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0}])
@on_ranks(2)
def test_gradients_that_get_other_memory_are_averaged(rank: int, options: dict[str, Any]) -> None:
    """As torch's DDP does where they are no views."""
    found = []
    ours = fastddp.DistributedDataParallel
    for wrap in (TorchDDP, ours, partial(ours, gradient_as_bucket_view=True)):
        torch.manual_seed(3)
        model: Any = wrap(WithUnused() if options.get("find_unused_parameters") else nn.Linear(3, 2), **options)
        of_steps = []
        for step in range(4):
            with model.no_sync() if step == 2 else nullcontext():
                model(torch.full((2, 3), 1.0 + (rank + step) % 3)).sum().backward()
            with_gradients = [parameter for parameter in model.parameters() if parameter.grad is not None]
            for parameter in with_gradients:
                parameter.grad.data = parameter.grad.data * 0.5
            of_steps.append([parameter.grad.clone() for parameter in with_gradients])
        found.append(of_steps)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)
