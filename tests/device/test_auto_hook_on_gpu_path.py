"""An exchange for each bucket on the simulated device, tried and chosen there: collectives and kernels in order."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import _C
from fastddp.compression import auto
from fastddp.compression.choice import Choice, Load
from fastddp.planning import link
from hooks_by_name import register
from on_device import DEVICE, ORDERS
from on_ranks import on_ranks
from ranks import RankPool

DEALT = ("int8", "plain", "powersgd4", "bf16", "powersgd4", "fp8")


def dealt_in_turn(loads: Sequence[Load]) -> Choice:
    """Whatever trials have found."""
    assert all(load.ready > 0 and min(load.seconds.values()) > 0 for load in loads)
    names = [DEALT[number % len(DEALT)] for number in range(len(loads))]
    chosen = [name if name in load.seconds else "plain" for name, load in zip(names, loads, strict=True)]
    return Choice(tuple(chosen), 1.0, 2.0)


def train(rank: int, device: str, order: str) -> tuple[list[str], list[Tensor]]:
    """What buckets travel as, and the gradients and parameters at the end."""
    if device == DEVICE:
        fake_cuda.schedule(order)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 32)).to(device)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.0001, watch=fastddp.Watch(stall=None))
    register(model, "auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    with mock.patch.object(auto, "choose", dealt_in_turn), mock.patch.object(auto, "is_slower", return_value=False):
        for step in range(auto.SETTLED + 2 * auto.MEASURED + 5):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            model(torch.randn(4, 8, generator=generator).to(device)).square().sum().backward()
            last = [parameter.grad.cpu() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    plan = model.compression_plan()
    assert plan.measured_seconds > 0
    return [bucket.choice for bucket in plan.buckets], [*last, *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.tier("slow", but_one_in=3)
@ORDERS
def test_it_is_what_the_cpu_makes_of_it(ranks: RankPool, simulated_ranks: RankPool, order: str) -> None:
    on_cpu = ranks.run(train, 2, "cpu", order)
    on_device = simulated_ranks.run(train, 2, DEVICE, order)
    assert set(on_cpu[0][0]) == set(DEALT)
    for (choices, found), (expected_choices, expected) in zip(on_device, on_cpu, strict=True):
        assert choices == expected_choices
        for mine, wanted, other in zip(found, expected, on_device[0][1], strict=True):
            assert torch.equal(mine, other), "replicas are alike"
            torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=1e-2 * wanted.abs().max().item())


@pytest.mark.parametrize(("what", "windows"), [("trial", 1 + 3), ("link", 1 + link._BACK_TO_BACK)])
@on_ranks(2, pool="simulated_ranks")
def test_the_host_is_ahead_of_what_is_measured(what: str, windows: int, rank: int) -> None:
    """The device has work in front; and the host waits for nothing but the last moments."""
    device, group = torch.device(DEVICE, 0), dist.distributed_c10d._get_default_group()
    fake_cuda.schedule("in_order")
    wire = torch.ones(1000, device=device)
    trial = _C.Trial([wire], _C.Pipeline(_C.Codec.cast(), _C.Transport.all_reduce([group])))
    seconds = {"trial": trial.seconds, "link": lambda: link._seconds([group], [wire], 4000)}[what]
    seconds()  # how long a pass of device work takes is measured once
    fake_cuda.synchronize()
    fake_cuda.reset_records()
    assert seconds() > 0
    assert set(fake_cuda.host_waits()) == {"an event"}
    fake_cuda.synchronize()
    done = [name for name in fake_cuda.history() if name in ("aten::cumsum", "ALLREDUCE")]
    assert len(done) > windows
    assert done == ["aten::cumsum"] * (len(done) - windows) + ["ALLREDUCE"] * windows
