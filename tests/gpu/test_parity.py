"""Training steps on a GPU are bitwise those of torch's DDP, as exact in 16 bits, and take no more memory."""

from __future__ import annotations

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


def gradients(
    rank: int, ddp: type, device: str, dtype: torch.dtype, options: dict[str, object], hook: object = None
) -> list[Tensor]:
    """Of the last of several steps, with a window of two backward passes among them."""
    torch.manual_seed(0)
    view, set_to_none = bool(options.get("view")), bool(options.get("set_to_none", True))
    model = ddp(Mlp().to(device, dtype), gradient_as_bucket_view=view, bucket_cap_mb=0.1)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.get("rate", 0.01), foreach=False)
    for step in range(6):
        with model.no_sync() if step == 3 else nullcontext():
            generator = torch.Generator().manual_seed(100 * rank + step)
            inputs = torch.randn(16, 64, generator=generator).to(device, dtype)
            (model(inputs).square().mean() * options.get("scale", 1.0)).backward()
        if step not in (3, 5):
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return [parameter.grad.cpu() for parameter in model.parameters()]


def use(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)


def difference(rank: int, device: str, dtype: torch.dtype, options: dict[str, object]) -> list[int]:
    """The parameters whose gradients differ."""
    use(device)
    ours = gradients(rank, fastddp.DistributedDataParallel, device, dtype, options)
    theirs = gradients(rank, TorchDDP, device, dtype, options)
    return [index for index, pair in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(*pair)]


OPTIONS = [{}, {"set_to_none": False}, {"view": True}, {"view": True, "set_to_none": False}]


def backend_of(device: str, world_size: int) -> str | None:
    """What ranks can exchange gradients over with one GPU."""
    return "gloo" if device == "cuda" and world_size > 1 else None


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (2, torch.float32)], ids=str
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_bit_is_torchs(
    gpu_ranks: RankPool, device: str, world_size: int, dtype: torch.dtype, options: dict[str, object]
) -> None:
    backend = backend_of(device, world_size)
    assert gpu_ranks.run(difference, world_size, device, dtype, options, backend=backend) == [[]] * world_size


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, exact, strict=True))


def hook_errors(rank: int, device: str, scale: float) -> tuple[float, float]:
    """Of the native fp16 hook and of torch's, against fp64.

    Ours multiplies and casts, torch's casts and divides: where fp16 has few digits left the bits differ. Nothing is
    trained, so the two cannot drift apart.
    """
    use(device)
    options: dict[str, object] = {"scale": scale, "rate": 0.0}
    exact = gradients(rank, TorchDDP, device, torch.float64, options)
    ours = gradients(rank, fastddp.DistributedDataParallel, device, torch.float32, options, fp16_compress_hook)
    theirs = gradients(rank, TorchDDP, device, torch.float32, options, fp16_compress_hook)
    return error(ours, exact), error(theirs, exact)


@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["normal", "subnormal"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_fp16_hook_is_as_exact_as_torchs(gpu_ranks: RankPool, device: str, world_size: int, scale: float) -> None:
    backend = backend_of(device, world_size)
    for ours, theirs in gpu_ranks.run(hook_errors, world_size, device, scale, backend=backend):
        assert 0 < ours <= 2 * theirs


@pytest.mark.needs_cuda
def test_two_nccl_ranks_on_one_gpu(sharing_ranks: RankPool) -> None:
    for options in OPTIONS:
        assert sharing_ranks.run(difference, 2, "cuda", torch.float32, options, time_limit=100) == [[], []]
    for ours, theirs in sharing_ranks.run(hook_errors, 2, "cuda", 1.0, time_limit=100):
        assert 0 < ours <= 2 * theirs


# --------------------------------------------------------------------------------------------------------------- memory


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
