"""Streams and the host on a real device: closed-form gradients, a new input each step, nobody waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from on_ranks import on_ranks

STEPS = 20
CYCLES = 3_000_000  # about two milliseconds
STREAMS = 3


class Slow(torch.autograd.Function):
    """The identity, whose gradient is late. The simulated device does everything as late as it may."""

    @staticmethod
    def forward(context: object, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        if gradient.is_cuda:
            torch.cuda._sleep(CYCLES)
        return gradient.clone()


class SeveralProducers(nn.Module):
    """Neighbours among the parameters, which share a bucket, get their gradients on different streams.

    A gradient is accumulated on the stream on which its parameter was first used: here, before there is a wrapper.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(1000, device=device)) for _ in range(8)])
        self.streams = [torch.Stream(device=device) for _ in range(STREAMS)]
        torch.accelerator.synchronize()
        self.uses = [self.used(index) for index in range(len(self.parts))]
        self.kept: list[Tensor] = []  # until all is over: what one stream made and another one reads

    def used(self, index: int) -> Tensor:
        with self.streams[index % STREAMS]:
            return self.parts[index].expand(1000)

    def forward(self, factor: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        terms = []
        for index, part in enumerate(self.parts):
            own = self.streams[index % STREAMS]
            own.wait_stream(current)
            with own:
                terms.append((Slow.apply(part) * factor * (index + 1)).sum())
        for own in self.streams:
            current.wait_stream(own)
        self.kept += [factor, *terms]
        return torch.stack(terms).sum()


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
@on_ranks(1, pool="gpu_ranks")
def test_no_races(rank: int, device: str, view: bool, set_to_none: bool, on_own_stream: bool) -> None:
    torch.accelerator.set_device_index(0)
    if device == fake_cuda.DEVICE:
        fake_cuda.schedule("lazy")
    with torch.Stream(device=device) if on_own_stream else torch.accelerator.current_stream():
        module = SeveralProducers(device)
        model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=0.01)
        module.uses.clear()
        results = []
        for step in range(STEPS):
            model.zero_grad(set_to_none)
            model(torch.full((), float(step), device=device)).backward()
            results.append([p.grad * 1 for p in model.parameters()])  # no wait: the copy comes after the gradient
        found = [[set(gradient.tolist()) for gradient in gradients] for gradients in results]
    assert found == [[{step * (index + 1)} for index in range(len(module.parts))] for step in range(STEPS)]
    assert max(map(len, model.engine.now.setting.plan)) > 1, "no bucket has several producers"


@pytest.mark.needs_cuda
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@on_ranks(1, pool="gpu_ranks")
def test_the_host_waits_for_nothing(rank: int, view: bool, set_to_none: bool) -> None:
    torch.cuda.set_device(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view)
    inputs = torch.randn(8, 64, device="cuda")
    for step in range(8):
        torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")
        model(inputs).square().sum().backward()
        model.zero_grad(set_to_none)
    torch.cuda.set_sync_debug_mode("default")


class Weighted(nn.Module):
    """The gradient of parameter i is i + 1 times a factor."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(1000, device=device)) for _ in range(6)])

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([(part * factor * (index + 1)).sum() for index, part in enumerate(self.parts)]).sum()


@pytest.mark.needs_cuda
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@on_ranks(1, pool="gpu_ranks")
def test_a_captured_step_replays(rank: int, view: bool) -> None:
    """Against closed-form gradients; then an eager step."""
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = fastddp.DistributedDataParallel(Weighted("cuda"), gradient_as_bucket_view=view, bucket_cap_mb=0.01)
        factor = torch.ones((), device="cuda")
        for _ in range(11):
            model.zero_grad()
            model(factor).backward()
        model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            model(factor).backward()

        def found() -> list[list[float]]:
            return [parameter.grad.unique().tolist() for parameter in model.parameters()]

        for step in range(5):
            factor.fill_(step)
            graph.replay()
            assert found() == [[step * (index + 1.0)] for index in range(6)]
        model.zero_grad()
        model(torch.full((), 3.0, device="cuda")).backward()
        assert found() == [[3 * (index + 1.0)] for index in range(6)]
