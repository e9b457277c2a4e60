"""A whole training step captured as a graph, on the simulated device: replays give the gradients of eager steps."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fake_cuda
from fastddp import _C
from fastddp.kernel_loading.launching import load_kernels
from on_device import DEVICE, ORDERS, WARMUP, Case, batch, captured
from on_ranks import on_ranks
from ranks import RankPool

VIEW = {"gradient_as_bucket_view": True}
CASES = [
    *(Case(options=options, set_to_none=set_to_none) for options in ({}, VIEW) for set_to_none in (True, False)),
    *map(Case, ("bf16, sums in fp32", "bf16, sums in the wire", "int8")),
    Case("bf16, sums in the wire", options={"lazy_bucket_allocation": True}),
    Case("PowerSGD", tolerance=1e-4),  # whose state goes on from replay to replay
    *(
        Case(dtype=torch.bfloat16, options={"main_grads": name}, microbatches=2, tolerance=1e-6)
        for name in ("grad", "main_grad")
    ),
]


def stepped(rank: int, device: str, case: Case, order: str = "") -> list[list[Tensor]]:
    """Gradients of steps; on the device, of replays of a captured one and of eager ones on other memory."""
    if device == DEVICE:
        fake_cuda.schedule(order, 3)
    with torch.Stream(device=DEVICE) if device == DEVICE else nullcontext():
        model = case.wrapped(rank, device)
        static = batch(rank, 0).to(device)

        def step() -> None:
            model.zero_grad(case.set_to_none)
            case.backward(model, static)

        for _ in range(WARMUP):
            step()
        replays, of_graph = [step], None
        if device == DEVICE:
            model.zero_grad(case.set_to_none)
            with captured() as replays:
                step()
            of_graph = case.gradients(model)
        found = []
        for number, is_replayed in enumerate([True, True, True, False, False, True, False, True]):
            static.copy_(batch(rank, number))
            replays[0]() if is_replayed else step()
            gradients = (is_replayed and of_graph) or case.gradients(model)
            found.append([gradient.cpu().clone() for gradient in gradients])
            del gradients
            for _ in range(8):  # what others get of the memory that is free now
                torch.full((800,), 3.0, device=device)
    return found


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("case", CASES, ids=str)
@ORDERS
def test_replays_equal_eager_steps(ranks: RankPool, simulated_ranks: RankPool, case: Case, order: str) -> None:
    expected = ranks.run(stepped, 2, "cpu", case)
    case.compare(simulated_ranks.run(stepped, 2, DEVICE, case, order), expected)


def captured_backward(rank: int, case: Case) -> tuple[Any, Tensor, Callable[[], None]]:
    """The model after warm-up, the inputs of a step, and what replays the step's backward; on the current stream."""
    model = case.wrapped(rank, DEVICE)
    static = batch(rank, 0).to(DEVICE)
    for _ in range(WARMUP):
        model.zero_grad()
        case.backward(model, static)
    model.zero_grad()
    with captured() as replays:
        case.backward(model, static)
    return model, static, replays[0]


def replayed_without_its_model(rank: int) -> list[list[Tensor]]:
    """Gradients of replays after the wrapper is gone, and other code has used the pinned memory that it left."""
    fake_cuda.schedule("random", 3)
    case = Case()
    with torch.Stream(device=DEVICE):
        model, static, replay = captured_backward(rank, case)
        module = model.module
        del model
        gc.collect()
        others = [torch.full((size,), 7).pin_memory() for size in (8, 16, 32, 64, 128) * 20]
        results = []
        for step in range(3):
            static.copy_(batch(rank, step))
            replay()
            results.append([gradient.cpu() for gradient in case.gradients(module)])
        del others
    return results


def test_a_graph_outlives_the_model_whose_step_it_is(ranks: RankPool, simulated_ranks: RankPool) -> None:
    expected = [steps[:3] for steps in ranks.run(stepped, 2, "cpu", Case())]
    Case().compare(simulated_ranks.run(replayed_without_its_model, 2), expected)


@on_ranks(1, pool="simulated_ranks")
def test_tables_of_a_graph_are_its_own(rank: int) -> None:
    device = torch.device(DEVICE, 0)
    load_kernels([(device, torch.float32, torch.float32)])
    kernels = _C.Kernels(device)
    with torch.Stream(device=DEVICE):
        values = torch.arange(3000.0, device=DEVICE)
        gradients, wires = values.split(3), [torch.zeros(3000, device=DEVICE) for _ in range(2)]
        with captured() as replays:  # the tables of so many gradients need pinned memory that nobody has asked for yet
            kernels.pack(gradients, list(wires[0].split(3)), 0.5)
        kernels.pack(gradients, list(wires[1].split(3)), 2.0)
        assert not wires[0].any()
        assert torch.equal(wires[1].cpu(), 2 * values.cpu())
        fake_cuda.reset_records()
        replays[0]()
        assert torch.equal(wires[0].cpu(), values.cpu() / 2)
        assert "upload" not in fake_cuda.history()


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("case", [Case(), Case(options=VIEW), Case("int8"), Case("PowerSGD")], ids=str)
@on_ranks(2, pool="simulated_ranks")
def test_a_replay_sends_no_table(rank: int, case: Case) -> None:
    with torch.Stream(device=DEVICE):
        *_kept, replay = captured_backward(rank, case)
        fake_cuda.reset_records()
        replay()
        torch.accelerator.synchronize()
    ran = Counter(fake_cuda.history())
    assert any(name.startswith("fastddp_") for name in ran)
    assert (ran["upload"], ran["fastddp_write_words"]) == (0, 0)


@on_ranks(2, pool="simulated_ranks")
def test_ranks_are_compared_around_a_graph_and_not_in_it(rank: int) -> None:
    case, compared = Case(), []
    with torch.Stream(device=DEVICE):
        model = case.wrapped(rank, DEVICE)
        model.sample_steps(1, compare_ranks=True)
        static = batch(rank, 0).to(DEVICE)
        for step in range(18):
            model.zero_grad()
            if step == 9:
                with captured() as replays:
                    case.backward(model, static)
                replays[0]()
                model.sample_steps(1, compare_ranks=True)  # forgets what there was
            else:
                case.backward(model, static)
            torch.accelerator.synchronize()  # what nobody waits for the simulated device does not do
            report = model.step_report()
            compared.append(report is not None and not any(math.isnan(one.late) for one in report.ranks))
    assert compared[8]
    assert compared[-1]


@on_ranks(1, pool="simulated_ranks")
def test_a_step_with_a_part_that_is_captured_is_not_sampled(rank: int) -> None:
    case, has_report = Case(), []
    with torch.Stream(device=DEVICE):
        model = case.wrapped(rank, DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model.sample_steps(1)
        static = batch(rank, 0).to(DEVICE)
        for step in range(5):
            model.zero_grad()
            case.backward(model, static)
            torch.accelerator.synchronize()
            with captured() if step == 2 else nullcontext():
                optimizer.step()
            has_report.append(model.step_report() is not None)
    assert has_report == [False, True, True, True, True]
