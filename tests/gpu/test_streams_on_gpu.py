"""Streams and the host on a real device: closed-form gradients, a new input each step, nobody waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastddp
from ranks import RankPool

pytestmark = pytest.mark.needs_cuda

STEPS = 20
CYCLES = 3_000_000  # about two milliseconds


class Slow(torch.autograd.Function):
    """The identity, whose gradient is late."""

    @staticmethod
    def forward(context: object, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return gradient.clone()


class TwoStreams(nn.Module):
    """Half of the parameters are used, and their gradients made, on a stream of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.ParameterList([nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(4)])
        self.there = nn.ParameterList([nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(4)])
        self.other = torch.cuda.Stream()

    def forward(self, factor: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        self.other.wait_stream(current)
        with torch.cuda.stream(self.other):
            there = sum((Slow.apply(p) * factor * (i + 1)).sum() for i, p in enumerate(self.there))
        here = sum((p * factor * 10 * (i + 1)).sum() for i, p in enumerate(self.here))
        current.wait_stream(self.other)
        return here + there


def races(rank: int, view: bool, set_to_none: bool, on_own_stream: bool) -> list[str]:
    torch.cuda.set_device(0)
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.current_stream()
    found = []
    with torch.cuda.stream(stream):
        model = fastddp.DistributedDataParallel(TwoStreams(), gradient_as_bucket_view=view, bucket_cap_mb=0.01)
        results = []
        for step in range(STEPS):
            model.zero_grad(set_to_none)
            model(torch.full((), float(step), device="cuda")).backward()
            results.append([p.grad * 1 for p in model.parameters()])  # no wait: the copy comes after the gradient
        for step, gradients in enumerate(results):
            expected = [step * 10 * (i + 1) for i in range(4)] + [step * (i + 1) for i in range(4)]
            for index, (gradient, value) in enumerate(zip(gradients, expected, strict=True)):
                if not bool((gradient == value).all()):
                    found.append(f"step {step}, parameter {index}: {gradient.unique().tolist()}, not {value}")
    return found


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default-stream", "own-stream"])
def test_no_races(gpu_ranks: RankPool, view: bool, set_to_none: bool, on_own_stream: bool) -> None:
    assert gpu_ranks.run(races, 1, view, set_to_none, on_own_stream) == [[]]


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


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
def test_a_captured_step_replays(gpu_ranks: RankPool, view: bool) -> None:
    assert gpu_ranks.run(captured_step, 1, view) == [[]]
