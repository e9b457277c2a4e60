"""The exchange of two levels on the simulated device: collectives inside nodes and between them, in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import comm_hooks
from models import RaisesOnRank
from nodes import nodes_of_two
from ranks import RankPool

DEVICE = fake_cuda.DEVICE
ORDERS = pytest.mark.parametrize("order", ["lazy", "others_first", "random"])
HOOKS = {
    "none": (lambda: None, None),
    "fp16": (lambda: None, comm_hooks.fp16_compress_hook),
    "int8": (lambda: None, comm_hooks.int8_compress_hook),
    "PowerSGD": (lambda: comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2), comm_hooks.powerSGD_hook),
}


def wrapped(rank: int, device: str, hook: str, view: bool, **options: bool) -> fastddp.DistributedDataParallel:
    """On two nodes of two ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 4)).to(device)
    with nodes_of_two(rank):
        model = fastddp.DistributedDataParallel(
            module,
            bucket_cap_mb=0.003,
            gradient_as_bucket_view=view,
            hierarchy="node",
            watch=fastddp.Watch(stall=None),
            **options,
        )
    assert model.engine.now.setting.hierarchy is not None
    make_state, function = HOOKS[hook]
    if function is not None:
        model.register_comm_hook(make_state(), function)
    return model


def train(rank: int, device: str, hook: str, view: bool, order: str = "lazy", fails: bool = False) -> list[Tensor]:
    if device == DEVICE:
        fake_cuda.schedule(order)
    # With unused parameters hosts wait for the status: all ranks know of a failure in the same step.
    model = wrapped(rank, device, hook, view, find_unused_parameters=fails)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = 0
    if fails:
        model.module[2].register_forward_hook(lambda _, __, out: RaisesOnRank.apply(out, step == 3 and rank == 1))
    for step in range(6):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(4, 8, generator=generator).to(device)
        try:
            model(x).square().sum().backward()
        except (ValueError, RuntimeError):
            optimizer.zero_grad()
            continue
        norm = model.last_grad_norm()
        if not fails:
            optimizer.step()
        last = [parameter.grad.cpu() for parameter in model.parameters()]
        optimizer.zero_grad()
    return [*last, *(parameter.detach().cpu() for parameter in model.parameters()), norm.cpu()]


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@ORDERS
@pytest.mark.parametrize("hook", list(HOOKS))
def test_training_is_that_on_the_cpu(
    ranks: RankPool, simulated_ranks: RankPool, hook: str, order: str, view: bool
) -> None:
    """Bit for bit, but for PowerSGD, whose matrices are orthonormalised in another way, and the norm."""
    expected = ranks.run(train, 4, "cpu", hook, view)
    actual = simulated_ranks.run(train, 4, DEVICE, hook, view, order)
    for mine, theirs in zip(actual, expected, strict=True):
        for ours, on_the_cpu in zip(mine[:-1], theirs[:-1], strict=True):
            if hook == "PowerSGD":
                torch.testing.assert_close(ours, on_the_cpu, rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(ours, on_the_cpu)
        torch.testing.assert_close(mine[-1], theirs[-1], rtol=1e-4, atol=0)


@pytest.mark.tier("slow", but_one_in=3)
@ORDERS
@pytest.mark.parametrize("hook", list(HOOKS))
def test_after_a_failed_window_gradients_are_right(simulated_ranks: RankPool, hook: str, order: str) -> None:
    of_ranks = simulated_ranks.run(train, 4, DEVICE, hook, False, order, True)
    without = simulated_ranks.run(train, 4, DEVICE, hook, False, order, False)
    for mine in of_ranks:
        assert all(torch.equal(ours, others) for ours, others in zip(mine, of_ranks[0], strict=True))
        assert all(torch.isfinite(tensor).all() for tensor in mine)
        assert [tensor.shape for tensor in mine] == [tensor.shape for tensor in without[0]]
