"""Where gradients lie in a wire: each at a multiple of 16 bytes, with zeros between them. Hooks see no gaps."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fake_cuda
import fastddp
from fastddp import comm_hooks
from models import RaisesInBackward
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
        self.breaks = False  # in the backward of the first parameter, which comes last

    def forward(self, factor: float) -> Tensor:
        values = [RaisesInBackward.apply(self.values[0]) if self.breaks else self.values[0], *self.values[1:]]
        return torch.stack([(value * factor * (index + 1)).sum().abs() for index, value in enumerate(values)]).sum()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def places(rank: int, dtype: torch.dtype, view: bool) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """How far each gradient is from a multiple of 16 bytes; the gradients, and torch's."""
    found = []
    for ddp in (fastddp.DistributedDataParallel, TorchDDP):
        model = ddp(Odd(dtype), gradient_as_bucket_view=view)
        for step in range(3):
            model.zero_grad()
            model(1.5 + rank + step).backward()
        found.append(model)
    ours, theirs = (gradients(model) for model in found)
    distances = [gradient.data_ptr() % 16 for gradient in ours if gradient.numel()]
    return distances, [gradient.clone() for gradient in ours], [gradient.clone() for gradient in theirs]


@VIEWS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gradient_begins_at_a_multiple_of_16_bytes(ranks: RankPool, dtype: torch.dtype, view: bool) -> None:
    for distances, ours, theirs in ranks.run(places, 2, dtype, view):
        assert distances == [0] * 5
        assert all(map(torch.equal, ours, theirs))


def between(model: nn.Module) -> Tensor:
    """What lies in the wire, fp32, where no gradient is."""
    of = [gradient for gradient in gradients(model) if gradient.numel()]
    storage = of[0].untyped_storage()
    assert all(gradient.untyped_storage().data_ptr() == storage.data_ptr() for gradient in of)
    wire = torch.empty(0).set_(storage)
    is_gap = torch.ones(wire.numel(), dtype=torch.bool)
    for gradient in of:
        is_gap[gradient.storage_offset() : gradient.storage_offset() + gradient.numel()] = False
    return wire[is_gap]


def gaps(rank: int, view: bool) -> tuple[int, bool, list[float]]:
    """How many gaps; whether gradients were NaN in a window that failed on rank 1; and what was not zero in a gap."""
    model = fastddp.DistributedDataParallel(Odd(), gradient_as_bucket_view=view)
    wrong: list[float] = []
    was_nan = False
    for step in range(5):
        model.zero_grad(set_to_none=step % 2 == 0)
        fails = step == 2
        model.module.breaks = fails and rank == 1
        with pytest.raises((ArithmeticError, RuntimeError)) if fails else nullcontext():
            model(float(rank + step)).backward()
        if fails:
            was_nan = rank == 1 or bool(gradients(model)[0].isnan().all())
        if not (fails and rank == 1):
            empty = between(model)
            wrong += empty[empty != 0].tolist()  # NaN too
    norm = model.last_grad_norm()
    assert torch.allclose(norm.float(), torch.nn.utils.get_total_norm(gradients(model)))
    assert not bool(model.found_inf())
    return len(empty), was_nan, wrong


@VIEWS
def test_what_lies_between_gradients_is_zero_even_behind_a_window_that_failed(ranks: RankPool, view: bool) -> None:
    for count, was_nan, wrong in ranks.run(gaps, 2, view):
        assert count > 0
        assert was_nan
        assert wrong == []


SEEN: list[tuple[int, list[int], bool]] = []


def look(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer, parts = bucket.buffer(), bucket.gradients()
    is_flat = torch.equal(torch.cat([part.flatten() for part in parts]), buffer)
    SEEN.append((buffer.numel(), [part.numel() for part in parts], is_flat))
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0] / 2)


def seen_by_a_hook(rank: int, view: bool, late: bool) -> list[tuple[int, list[int], bool]]:
    model = fastddp.DistributedDataParallel(Odd(), gradient_as_bucket_view=view)
    if late:
        model(1.0).backward()  # in a wire with gaps
    model.register_comm_hook(None, look)
    SEEN.clear()
    for step in range(3):
        model.zero_grad(set_to_none=False)
        model(float(rank + step)).backward()
        assert [gradient.mean().item() for gradient in gradients(model) if gradient.numel()] == pytest.approx(
            [(step + 0.5) * (index + 1) for index, size in enumerate(Odd.SIZES) if size]
        )
    return SEEN


@VIEWS
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_sees_gradients_one_behind_the_other(ranks: RankPool, view: bool, late: bool) -> None:
    for seen in ranks.run(seen_by_a_hook, 2, view, late):
        for elements, parts, is_flat in seen:
            assert elements == sum(parts)
            assert sorted(parts) == sorted(Odd.SIZES)
            assert is_flat


def moved_by_element(rank: int, hook: str, view: bool) -> tuple[int, int]:
    """Chunks that were moved element by element, and kernels launched, by a model with a bias of 10 elements."""
    fake_cuda.schedule("in_order")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 16)).to(DEVICE)
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view)
    if hook:
        model.register_comm_hook(comm_hooks.CompressState(accumulate="wire"), getattr(comm_hooks, hook))
    before = fake_cuda.chunks_by_element()
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 16, device=DEVICE)).square().sum().backward()
    fake_cuda.synchronize()
    return fake_cuda.chunks_by_element() - before, len(fake_cuda.launches())


@pytest.mark.tier("slow", but_one_in=3)
@VIEWS
@pytest.mark.parametrize("hook", ["", "bf16_compress_hook"])
def test_nothing_is_moved_element_by_element_behind_a_bias_of_ten(
    simulated_ranks: RankPool, hook: str, view: bool
) -> None:
    for chunks, launches in simulated_ranks.run(moved_by_element, 2, hook, view):
        assert launches > 0
        assert chunks == 0
