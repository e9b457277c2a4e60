"""Streams and the host on a real device: closed-form gradients, a new input each step, nobody waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
import fastddp
from ranks import RankPool

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


def races(rank: int, device: str, view: bool, set_to_none: bool, on_own_stream: bool) -> list[str]:
    torch.accelerator.set_device_index(0)
    if device == fake_cuda.DEVICE:
        fake_cuda.schedule("lazy")
    stream = torch.Stream(device=device) if on_own_stream else torch.accelerator.current_stream()
    found = []
    with stream:
        module = SeveralProducers(device)
        model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=0.01)
        module.uses.clear()
        results = []
        for step in range(STEPS):
            model.zero_grad(set_to_none)
            model(torch.full((), float(step), device=device)).backward()
            results.append([p.grad * 1 for p in model.parameters()])  # no wait: the copy comes after the gradient
        for step, gradients in enumerate(results):
            for index, gradient in enumerate(gradients):
                values = set(gradient.tolist())
                if values != {step * (index + 1)}:
                    found.append(f"step {step}, parameter {index}: {values}, not {step * (index + 1)}")
        if max(map(len, model.engine.now.setting.plan)) < 2:
            found.append("no bucket has several producers")
    return found


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
def test_no_races(gpu_ranks: RankPool, device: str, view: bool, set_to_none: bool, on_own_stream: bool) -> None:
    assert gpu_ranks.run(races, 1, device, view, set_to_none, on_own_stream) == [[]]


def steady_steps_without_waits(rank: int, view: bool, set_to_none: bool) -> None:
    torch.cuda.set_device(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view)
    inputs = torch.randn(8, 64, device="cuda")
    for step in range(8):
        torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")
        model(inputs).square().sum().backward()
        model.zero_grad(set_to_none)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.needs_cuda
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_the_host_waits_for_nothing(gpu_ranks: RankPool, view: bool, set_to_none: bool) -> None:
    gpu_ranks.run(steady_steps_without_waits, 1, view, set_to_none)


def captured_step(rank: int, view: bool) -> list[str]:
    """Replays of a captured step against closed-form gradients, then an eager one."""
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream()
    found = []
    with torch.cuda.stream(stream):
        module = nn.ParameterList([nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(6)])
        module.forward = lambda factor: sum((p * factor * (i + 1)).sum() for i, p in enumerate(module))
        model = fastddp.DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=0.01)
        factor = torch.ones((), device="cuda")
        for _ in range(11):
            model.zero_grad()
            model(factor).backward()
        model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            model(factor).backward()

        def check(step: int, how: str) -> None:
            for index, parameter in enumerate(model.parameters()):
                if not bool((parameter.grad == step * (index + 1)).all()):
                    found.append(f"{how} {step}, parameter {index}: {parameter.grad.unique().tolist()}")

        for step in range(5):
            factor.fill_(step)
            graph.replay()
            check(step, "replay")
        model.zero_grad()
        model(torch.full((), 3.0, device="cuda")).backward()
        check(3, "eager")
    return found


@pytest.mark.needs_cuda
@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
def test_a_captured_step_replays(gpu_ranks: RankPool, view: bool) -> None:
    assert gpu_ranks.run(captured_step, 1, view) == [[]]
