"""Options of the wrapper on the simulated device: what they compute there is what they compute on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import fake_cuda
import fastddp
from ranks import RankPool

DEVICE = fake_cuda.DEVICE


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def train(rank: int, device: str, config: _MixedPrecision, view: bool, order: str) -> list[Tensor]:
    if device == DEVICE:
        fake_cuda.schedule(order)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4)).to(device)
    model = fastddp.DistributedDataParallel(
        module, mixed_precision=config, gradient_as_bucket_view=view, bucket_cap_mb=0.001
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step).to(device)).float().square().sum().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("order", ["lazy", "others_first", "random"])
@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training_in_mixed_precision_is_bitwise_that_on_the_cpu(
    simulated_ranks: RankPool, ranks: RankPool, reduce_dtype: torch.dtype, view: bool, order: str
) -> None:
    config = _MixedPrecision(torch.bfloat16, reduce_dtype)
    expected = ranks.run(train, 2, "cpu", config, view, order)
    for actual in simulated_ranks.run(train, 2, DEVICE, config, view, order):
        assert all(map(torch.equal, actual, expected[0]))


def sync_batch_norm(rank: int) -> str | int:
    torch.manual_seed(0)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    model = fastddp.DistributedDataParallel(module.to(DEVICE))
    model(batch(rank, 0).to(DEVICE)).square().sum().backward()
    twin = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    twin.load_state_dict({name: value.cpu() for name, value in module.state_dict().items()})
    twin(batch(rank, 0)).square().sum().backward()
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), expected.grad)
    return model._get_ddp_logging_data()["has_sync_bn"]


def test_a_module_with_sync_batch_norm_trains_on_a_device(simulated_ranks: RankPool) -> None:
    # One rank: the simulated device has no kernels for the statistics of several.
    assert simulated_ranks.run(sync_batch_norm, 1) == [1]


def train_with_main_gradients(rank: int, device: str, options: dict[str, Any], hook: bool, order: str) -> list[Tensor]:
    if device == DEVICE:
        fake_cuda.schedule(order)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4)).bfloat16().to(device)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.001, **{"main_grads": "grad"} | options)
    if hook:
        model.register_comm_hook(None, fastddp.comm_hooks.bf16_compress_hook)
    attribute = options.get("main_grads", "grad")
    found = []
    for step in range(3):
        model.zero_grad()
        for last in (False, False, True):
            with contextlib.nullcontext() if last else model.no_sync():
                model(batch(rank, step).to(device).bfloat16()).float().square().sum().backward()
        gradients = [getattr(parameter, attribute) for parameter in model.parameters()]
        found += [model.last_grad_norm().cpu(), *(gradient.cpu().clone() for gradient in gradients)]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.01)
    return found


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("order", ["lazy", "others_first", "random"])
@pytest.mark.parametrize("hook", [False, True], ids=["fp32 wire", "bf16 wire"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"main_grads": "main_grad"}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options), "grad"),
)
def test_main_gradients_are_those_on_the_cpu(
    simulated_ranks: RankPool, ranks: RankPool, options: dict[str, Any], hook: bool, order: str
) -> None:
    expected = ranks.run(train_with_main_gradients, 2, "cpu", options, hook, order)
    for actual in simulated_ranks.run(train_with_main_gradients, 2, DEVICE, options, hook, order):
        torch.testing.assert_close(actual, expected[0], rtol=2**-7 if hook else 1e-6, atol=2**-7 if hook else 1e-6)
