"""A whole training step captured as a graph, on the simulated device: replays give the gradients of eager steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import fake_cuda
from fastddp import _C, DistributedDataParallel
from fastddp.exchange.launching import load_kernels
from ranks import RankPool
from test_gpu_path import DEVICE, ORDERS, register, wrapped

WARMUP = 4


@contextmanager
def captured() -> Iterator[list[Callable[[], None]]]:
    """Capture what the current stream is given; then the list holds the function that replays it."""
    extension = fake_cuda.build()
    extension.begin_capture()
    replays: list[Callable[[], None]] = []
    yield replays
    replays.append(extension.end_capture().replay)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 8, generator=generator)


def backward(model: DistributedDataParallel, inputs: Tensor) -> None:
    model(inputs).square().sum().backward()


def gradients(model: DistributedDataParallel) -> list[Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters()]


def eager(rank: int, steps: int, hook: str = "") -> list[list[Tensor]]:
    model = wrapped("cpu")
    register(model, hook)
    results = []
    for step in range(steps):
        model.zero_grad()
        backward(model, batch(rank, step))
        results.append(gradients(model))
    return results


def replayed(rank: int, view: bool, set_to_none: bool, order: str, steps: int, hook: str = "") -> list[list[Tensor]]:
    """Gradients of a replay for each step, then of eager steps after them on other memory."""
    fake_cuda.schedule(order, 3)
    with torch.Stream(device=DEVICE):
        model = wrapped(DEVICE, gradient_as_bucket_view=view)
        register(model, hook)
        static = batch(rank, 0).to(DEVICE)
        for _ in range(WARMUP):
            model.zero_grad(set_to_none)
            backward(model, static)
        torch.accelerator.synchronize()
        model.zero_grad(set_to_none)
        with captured() as replays:
            if not set_to_none:
                model.zero_grad(set_to_none=False)
            backward(model, static)
        results = []
        for step in range(steps):
            static.copy_(batch(rank, step))
            replays[0]()
            results.append(gradients(model))
        for step in range(steps):
            model.zero_grad(set_to_none)
            backward(model, batch(rank, step).to(DEVICE))
            results.append(gradients(model))
        static.copy_(batch(rank, 0))
        replays[0]()  # and the graph is as it was
        torch.accelerator.synchronize()
    return results


def compare(actual: list[list[list[Tensor]]], expected: list[list[list[Tensor]]], atol: float = 0) -> None:
    """Of each rank the gradients of each step."""
    rtol = 0 if atol == 0 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("hook", "view", "set_to_none"),
    [*(("", view, none) for view in (False, True) for none in (True, False)), ("bf16_compress_hook", False, True)],
)
def test_replays_equal_eager_steps_89546(
    ranks: RankPool, simulated_ranks: RankPool, hook: str, view: bool, set_to_none: bool, order: str
) -> None:
    expected = ranks.run(eager, 2, 3, hook)
    actual = simulated_ranks.run(replayed, 2, view, set_to_none, order, 3, hook)
    compare(actual, [steps * 2 for steps in expected])


def under_power_sgd(rank: int, device: str, order: str) -> list[list[Tensor]]:
    """Gradients of eager steps, on a device of replays: the state goes on from replay to replay."""
    results = []
    if device == DEVICE:
        fake_cuda.schedule(order, 4)
    with torch.Stream(device=DEVICE) if device == DEVICE else nullcontext():
        model = wrapped(device)
        register(model, "powerSGD_hook")
        static = batch(rank, 0).to(device)
        for _ in range(WARMUP):
            model.zero_grad()
            backward(model, static)
        model.zero_grad()
        replays: list[Callable[[], None]] = []
        if device == DEVICE:
            torch.accelerator.synchronize()
            with captured() as replays:
                backward(model, static)
        for step in range(4):
            static.copy_(batch(rank, step))
            if replays:
                replays[0]()
            else:
                model.zero_grad()
                backward(model, static)
            results.append(gradients(model))
    return results


@pytest.mark.parametrize("order", ORDERS)
def test_replays_under_power_sgd_go_on_with_its_state(ranks: RankPool, simulated_ranks: RankPool, order: str) -> None:
    expected = ranks.run(under_power_sgd, 2, "cpu", order)
    actual = simulated_ranks.run(under_power_sgd, 2, DEVICE, order)
    compare(actual, expected, atol=1e-4)


def replayed_without_its_model(rank: int) -> list[list[Tensor]]:
    """Gradients of replays after the wrapper is gone, and other code has used the pinned memory that it left."""
    fake_cuda.schedule("random", 3)
    with torch.Stream(device=DEVICE):
        model = wrapped(DEVICE)
        module = model.module
        static = batch(rank, 0).to(DEVICE)
        for _ in range(WARMUP):
            model.zero_grad()
            backward(model, static)
        torch.accelerator.synchronize()
        model.zero_grad()
        with captured() as replays:
            backward(model, static)
        del model
        gc.collect()
        others = [torch.full((size,), 7).pin_memory() for size in (8, 16, 32, 64, 128) * 20]
        results = []
        for step in range(3):
            static.copy_(batch(rank, step))
            replays[0]()
            results.append(gradients(module))
        del others
    return results


def test_a_graph_outlives_the_model_whose_step_it_is(ranks: RankPool, simulated_ranks: RankPool) -> None:
    expected = ranks.run(eager, 2, 3)
    actual = simulated_ranks.run(replayed_without_its_model, 2)
    compare(actual, expected)


def packed_in_a_graph(rank: int) -> list[Tensor]:
    device = torch.device(DEVICE, 0)
    load_kernels([(device, torch.float32, torch.float32)])
    kernels = _C.Kernels(device)
    with torch.Stream(device=DEVICE):
        gradients = list(torch.arange(3000.0, device=DEVICE).split(3))
        wires = [torch.zeros(3000, device=DEVICE) for _ in range(2)]
        torch.accelerator.synchronize()
        with captured() as replays:  # the tables of so many gradients need pinned memory that nobody has asked for yet
            kernels.pack(gradients, list(wires[0].split(3)), 0.5)
        kernels.pack(gradients, list(wires[1].split(3)), 2.0)  # before the graph has filled its tables
        results = [wires[0].cpu(), wires[1].cpu()]
        replays[0]()
        return [*results, wires[0].cpu()]


def test_tables_of_a_graph_are_its_own(simulated_ranks: RankPool) -> None:
    ((before, eager, after),) = simulated_ranks.run(packed_in_a_graph, 1)
    values = torch.arange(3000.0)
    assert torch.equal(before, torch.zeros(3000))
    assert torch.equal(eager, 2 * values)
    assert torch.equal(after, values / 2)


def compared_around_a_graph(rank: int) -> list[int]:
    """Of how many ranks there are times after each step: eager ones, a captured one and its replay, eager ones."""
    seen = []
    with torch.Stream(device=DEVICE):
        model = wrapped(DEVICE)
        model.sample_steps(1, compare_ranks=True)
        static = batch(rank, 0).to(DEVICE)
        for step in range(18):
            if step == 9:
                model.zero_grad()
                torch.accelerator.synchronize()
                with captured() as replays:
                    backward(model, static)
                replays[0]()
                model.sample_steps(1, compare_ranks=True)  # forgets what there was
            else:
                model.zero_grad()
                backward(model, static)
            torch.accelerator.synchronize()  # what nobody waits for the simulated device does not do
            report = model.step_report()
            seen.append(0 if report is None else sum(not math.isnan(one.late) for one in report.ranks))
    return seen


def test_ranks_are_compared_around_a_graph_and_not_in_it(simulated_ranks: RankPool) -> None:
    for seen in simulated_ranks.run(compared_around_a_graph, 2):
        assert seen[8] == seen[-1] == 2


def sampled_around_a_captured_optimizer(rank: int) -> list[bool]:
    """Whether there is a report after each step; the optimizer of the third one is captured."""
    seen = []
    with torch.Stream(device=DEVICE):
        model = wrapped(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model.sample_steps(1)
        static = batch(rank, 0).to(DEVICE)
        for step in range(5):
            model.zero_grad()
            backward(model, static)
            torch.accelerator.synchronize()
            with captured() if step == 2 else nullcontext():
                optimizer.step()
            seen.append(model.step_report() is not None)
    return seen


def test_a_step_with_a_part_that_is_captured_is_not_sampled(simulated_ranks: RankPool) -> None:
    (seen,) = simulated_ranks.run(sampled_around_a_captured_optimizer, 1)
    assert seen == [False, True, True, True, True]


def with_main_gradients(rank: int, device: str, attribute: str, order: str) -> list[list[Tensor]]:
    """Of each step, two microbatches: what bf16 parameters have for gradients."""
    if device == DEVICE:
        fake_cuda.schedule(order, 3)
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 4, dtype=torch.bfloat16).to(device)
    results = []
    with torch.Stream(device=DEVICE) if device == DEVICE else nullcontext():
        model = DistributedDataParallel(module, main_grads=attribute)
        static = batch(rank, 0).to(device)

        def step() -> None:
            model.zero_grad()
            with model.no_sync():
                model(static.bfloat16()).float().square().sum().backward()
            model(2 * static.bfloat16()).float().square().sum().backward()

        steps = [step]
        if device == DEVICE:
            for _ in range(WARMUP):
                step()
            torch.accelerator.synchronize()
            with captured() as steps:
                step()
        for number in range(3):
            static.copy_(batch(rank, number))
            steps[0]()
            results.append([getattr(parameter, attribute).cpu().clone() for parameter in module.parameters()])
    return results


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
@pytest.mark.parametrize("order", ORDERS)
def test_replays_with_main_gradients_equal_eager_steps(
    ranks: RankPool, simulated_ranks: RankPool, attribute: str, order: str
) -> None:
    expected = ranks.run(with_main_gradients, 2, "cpu", attribute, order)
    for rank, steps in enumerate(simulated_ranks.run(with_main_gradients, 2, DEVICE, attribute, order)):
        for ours, theirs in zip(steps, expected[rank], strict=True):
            assert all(gradient.dtype == torch.float32 for gradient in ours)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
