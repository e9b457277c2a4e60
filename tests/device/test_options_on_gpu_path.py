"""Options of the wrapper on the simulated device: what they compute there is what they compute on the CPU."""

from __future__ import annotations

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
