"""Whole steps with a sharded optimizer, on the simulated device: values, norms, launches, waits of the host, graphs."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fake_cuda
import fastddp
import optimizers
from on_device import DEVICE, ORDERS, WARMUP, Case, batch, captured
from on_ranks import on_ranks
from ranks import RankPool

CASES = [
    *map(Case, ("none", "bf16, sums in fp32", "bf16, sums in the wire", "int8")),
    Case(options={"gradient_as_bucket_view": True}),
    Case(ranks=4, options={"hierarchy": "node"}),
    Case(dtype=torch.bfloat16, options={"main_grads": "grad"}, microbatches=2, tolerance=1e-6),
]
BUCKETS = 2


def sharded(model: fastddp.DistributedDataParallel, gather: Any = "step") -> fastddp.ShardedOptimizer:
    return fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.125, momentum=0.5, gather=gather)


def trained(rank: int, device: str, case: Case, gather: str, order: str = "") -> list[list[Tensor]]:
    """Parameters after each step."""
    if device == DEVICE:
        fake_cuda.schedule(order, 3)
    found = []
    with torch.Stream(device=DEVICE) if device == DEVICE else nullcontext():
        model = case.wrapped(rank, device)
        optimizer = sharded(model, gather)
        for number in range(5):
            optimizer.zero_grad()
            case.backward(model, batch(rank, number).to(device) / 8)
            optimizer.step()
            for _ in range(8):  # what others get of the memory that is free now
                torch.full((2048,), 3.0, device=device)
            found.append([parameter.detach().cpu().clone() for parameter in model.parameters()])
    return found


@pytest.mark.tier("slow", but_one_in=5)
@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("case", CASES, ids=str)
@ORDERS
def test_training_is_that_on_the_cpu(
    ranks: RankPool, simulated_ranks: RankPool, case: Case, gather: str, order: str
) -> None:
    expected = ranks.run(trained, case.ranks, "cpu", case, gather)
    case.compare(simulated_ranks.run(trained, case.ranks, DEVICE, case, gather, order), expected)


LAUNCHES = {
    "none": ["pack"],
    "bf16, sums in fp32": ["pack", "sum", "unpack"],
    "bf16, sums in the wire": ["pack", "unpack"],
    "int8": ["encode", "add", "decode"],
}


@pytest.mark.parametrize("hook", list(LAUNCHES))
@on_ranks(2, "simulated_ranks")
def test_a_steady_step_has_these_launches_and_the_host_does_not_wait(rank: int, hook: str) -> None:
    fake_cuda.schedule("random", 1)
    case = Case(hook)
    model = case.wrapped(rank, DEVICE)
    optimizer = sharded(model)
    inputs = batch(rank, 0).to(DEVICE)
    for number in range(14):
        if number == 6:
            fake_cuda.synchronize()  # which frees memory: addresses change once more
        if number == 11:
            fake_cuda.reset_records()
        with fake_cuda.without_waits() if number >= 11 else nullcontext():
            optimizer.zero_grad()
            case.backward(model, inputs)
            optimizer.step()
    names = [name.removeprefix("fastddp_").removeprefix("block8_").split("_")[0] for name in fake_cuda.launches()]
    # Runs of small buckets may be nothing but gaps.
    own = sum(bool(bucket.spans) for bucket in optimizer.parts.shards.buckets)
    of_a_step = [name for name in LAUNCHES[hook] for _ in range(own if name in ("unpack", "decode") else BUCKETS)]
    assert Counter(names) == Counter(3 * of_a_step)
    assert fake_cuda.uploads() == 0
    assert fake_cuda.host_waits() == []


@pytest.mark.parametrize("hook", ["none", "bf16, sums in the wire"])
@on_ranks(2, "simulated_ranks")
def test_a_graph_of_a_step_goes_on_where_eager_steps_would(rank: int, hook: str) -> None:
    fake_cuda.schedule("random", 3)
    case, found = Case(hook), []
    for replays_it in (False, True):
        with torch.Stream(device=DEVICE):
            model = case.wrapped(rank, DEVICE)
            optimizer = sharded(model)
            static = batch(rank, 0).to(DEVICE)

            def step(model: Any = model, optimizer: Any = optimizer, static: Tensor = static) -> None:
                optimizer.zero_grad()
                case.backward(model, static)
                optimizer.step()

            for _ in range(WARMUP):
                step()
            replays = [step]
            if replays_it:
                optimizer.zero_grad()
                with captured() as replays:
                    step()
            for number in range(3):
                static.copy_(batch(rank, number) / 8)
                replays[0]()
            found.append([parameter.detach().cpu().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", [optimizers.KeepsAnObject, optimizers.ScheduleFree])
@on_ranks(2, "simulated_ranks")
def test_state_that_moves_to_another_rank_is_on_its_device(rank: int, kind: Any) -> None:
    """Of a class that is tried there, too."""
    case, found = Case(), []
    for moves in (False, True):
        model = case.wrapped(rank, DEVICE)
        optimizer = fastddp.ShardedOptimizer(model, kind, lr=0.01)
        getattr(optimizer, "train", lambda: None)()
        for number in range(4):
            optimizer.zero_grad()
            case.backward(model, batch(rank, number).to(DEVICE) / 8)
            if moves and number == 2:
                model.engine.use_plan([[5], [4, 3, 2, 1, 0]], several_lanes=False)
            optimizer.step()
        states = [one for inner in optimizer.parts.inner for state in inner.state.values() for one in state.values()]
        assert {one.device.type for one in states if isinstance(one, Tensor)} == {DEVICE}
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    torch.testing.assert_close(*found)


@ORDERS
@on_ranks(2, "simulated_ranks")
def test_norm_clipping_and_unscaling_need_no_wait_of_the_host(rank: int, order: str) -> None:
    found = []
    for sharded in (False, True):
        fake_cuda.schedule(order, 1)
        case = Case()
        model = case.wrapped(rank, DEVICE)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0)
        for step in range(4):
            model.zero_grad()
            case.backward(model, scaler.scale(batch(rank, step).to(DEVICE)))
            with fake_cuda.without_waits():
                scaler.unscale_(optimizer)
                found += [fastddp.clip_grad_norm_(model, 1.0), model.found_inf()]
            scaler.step(optimizer)
            scaler.update()
        found += [*model.parameters()]
    found = [tensor.detach().cpu() for tensor in found]
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half])
