"""Ranks of one machine read each other's memory over gloo: who may, with which results, and who waits for whom."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import _C, comm_hooks
from fastddp.ranks import placement
from fastddp.sharding.shards import Shards
from nodes import Traffic, by_messages, by_reads, on_machines
from on_ranks import on_ranks


@pytest.mark.parametrize(
    ("machines", "blind", "may"),
    [
        ((0, 0, 0), None, [[True, True, True]] * 3),
        ((0, 0, 1), None, [[True, True, False], [True, True, False], [False, False, True]]),
        ((0, 0, 1), 1, [[False] * 3, [False] * 3, [False, False, True]]),
    ],
    ids=["one machine", "two machines", "one rank cannot"],
)
@on_ranks(3)
def test_ranks_of_a_machine_read_each_other_if_all_of_them_can(
    rank: int, machines: tuple[int, ...], blind: int | None, may: list[list[bool]]
) -> None:
    """``may``: which ranks each of them may read. Rank number ``blind`` cannot read anybody."""
    cannot = mock.patch.object(_C, "has_bytes", return_value=False)
    with on_machines(rank, machines), cannot if rank == blind else contextlib.nullcontext():
        processes = placement.processes_of(dist.new_group(), torch.device("cpu"))
    assert [process != 0 for process in processes] == may[rank]


def test_a_number_that_means_another_process_is_noticed() -> None:
    memory = torch.frombuffer(bytearray(b"12345678"), dtype=torch.uint8)
    here = os.getpid(), memory.data_ptr()
    assert _C.has_bytes(*here, b"12345678")
    assert not _C.has_bytes(*here, b"12345679")  # of another process
    assert not _C.has_bytes(here[0], 8, b"12345678")  # which has nothing at this address
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert not _C.has_bytes(child, here[1], b"12345678")  # or is gone


def trained(rank: int, hook: Any, sharded: bool, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(70, 700), nn.ReLU(), nn.Linear(700, 300), nn.Linear(300, 3))
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.5, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    make = fastddp.ShardedOptimizer if sharded else lambda model, kind, **rest: kind(model.parameters(), **rest)
    optimizer = make(model, torch.optim.AdamW, lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 70, generator=generator)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("hook", ["plain", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@on_ranks(3)
def test_what_is_read_adds_up_to_the_bits_of_messages(rank: int, hook: str, sharded: bool) -> None:
    how = (getattr(comm_hooks, f"{hook}_compress_hook", None), sharded, {"gradient_as_bucket_view": hook != "fp16"})
    read = trained(rank, *how)
    with by_messages():
        sent = trained(rank, *how)
    assert all(torch.equal(one, other) for one, other in zip(read, sent, strict=True))


ENOUGH, FP32 = 1024 * 1024, torch.float32  # elements, of fp32


@contextlib.contextmanager
def cores(number: int) -> Iterator[None]:
    """Inside, two ranks of a thread each have this number."""
    of_both = mock.patch.object(os, "sched_getaffinity", return_value={*range(number)})
    with of_both, mock.patch.object(torch, "get_num_threads", return_value=1):
        yield


few_cores, idle_cores = (functools.partial(cores, number) for number in (2, 3))


@pytest.mark.parametrize(
    ("elements", "dtype", "within", "read", "options"),
    [
        (ENOUGH, FP32, few_cores, True, {}),
        (ENOUGH, torch.complex64, few_cores, True, {}),
        (ENOUGH - 1, FP32, few_cores, False, {}),
        (ENOUGH - 1, FP32, by_reads, True, {}),
        (2 * ENOUGH, torch.bfloat16, few_cores, False, {}),
        (ENOUGH, FP32, few_cores, False, {"bucket_cap_mb": "auto"}),
        (ENOUGH, FP32, by_messages, False, {}),
        (ENOUGH, FP32, idle_cores, False, {}),
    ],
    ids=["many", "complex", "few", "few, by reads", "16 bits", "planned buckets", "not to be read", "idle cores"],
)
@on_ranks(2)
def test_large_gradients_are_read_in_place_of_an_allreduce(
    rank: int, elements: int, dtype: torch.dtype, within: Any, read: bool, options: dict[str, Any]
) -> None:
    """In the third window; no messages are sent either."""
    with within():
        model = fastddp.DistributedDataParallel(Parameter(torch.zeros(elements, dtype=dtype)), **options)
        for _ in range(3):
            model.zero_grad()
            with Traffic() as traffic:
                model(rank + 1.0).backward()
    assert torch.equal(model.module.weight.grad, torch.full((elements,), 1.5, dtype=dtype))
    assert (traffic.messages, len(traffic.sums)) == ([], 0 if read else 1)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@on_ranks(2)
def test_a_profile_shows_the_collectives_in_whose_place_ranks_read(rank: int, sharded: bool) -> None:
    with by_reads():
        model = fastddp.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), bucket_cap_mb=0.001)
        optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1) if sharded else None
        for step in range(4):
            with torch.autograd.profiler.profile(step == 3, record_shapes=True) as profile:
                model(torch.ones(1, 8)).sum().backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.parameters_ready()
    runs = [one for one in profile.function_events if one.name.startswith("gloo:") and one.input_shapes != [[102]]]
    assert all(one.is_async for one in runs)
    sums = "gloo:reduce_scatter" if sharded else "gloo:all_reduce"
    for name in (sums, "gloo:all_gather"):  # an allreduce ends with one
        elements = [math.prod(one.input_shapes[0]) for one in runs if one.name == name]
        assert len(elements) == len(model.bucket_plan().buckets) > 1
        assert sum(elements) >= sum(parameter.numel() for parameter in model.module.parameters())
    assert {one.name for one in runs} == {sums, "gloo:all_gather"}


class Parameter(nn.Module):
    """Its gradient is what forward is called with."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, gradient: float | Tensor) -> Tensor:
        return (self.weight * gradient).real.sum()


@on_ranks(2)
def test_zeros_of_both_signs_and_what_is_not_finite_add_up_as_in_an_allreduce(rank: int) -> None:
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38])
    gradient = values.repeat_interleave(len(values)) if rank == 0 else values.repeat(len(values))
    found = []
    for carrier in (by_reads, by_messages):
        with carrier():
            model = fastddp.DistributedDataParallel(Parameter(torch.zeros(49)), gradient_average="sum")
            for _ in range(2):
                model.zero_grad()
                model(gradient).backward()
        found.append(model.module.weight.grad.view(torch.int32))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("sharded", "carrier"), [(False, by_reads), (True, by_reads), (True, by_messages)], ids=["read", "run", "sent run"]
)
@on_ranks(3)
def test_ranks_are_added_in_their_order_whoever_adds(rank: int, sharded: bool, carrier: Any) -> None:
    """Numbers whose sum depends on the order."""
    gradients = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 3, 3)[:, None]
    expected = gradients[0] + gradients[1] + gradients[2]
    assert not torch.equal(expected, gradients[1] + gradients[2] + gradients[0])
    with carrier():
        model = fastddp.DistributedDataParallel(Parameter(torch.zeros(5000)), gradient_average="sum")
        optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=1.0) if sharded else None
        for _ in range(2):
            model.zero_grad()
            model(gradients[rank]).backward()
    if optimizer is not None:
        optimizer.step()
    result = model.module.weight.grad if optimizer is None else -model.module.weight.detach()
    assert torch.equal(result, expected)


@on_ranks(2)
def test_a_sharded_step_sends_no_messages(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(700, 700, bias=False))
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        with Traffic() as traffic:
            model(torch.ones(1, 700)).sum().backward()
            optimizer.step()
    assert traffic.messages == []


@on_ranks(2)
def test_parameters_may_change_when_a_step_has_returned_though_another_rank_reads_late(rank: int) -> None:
    def wait_late(shards: Shards) -> None:
        time.sleep(0.1)
        wait(shards)

    wait = Shards.wait
    model = fastddp.DistributedDataParallel(nn.Linear(700, 700, bias=False))
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 700)).sum().backward()
        with torch.no_grad():
            model.module.weight.fill_(2.0)
        with mock.patch.object(Shards, "wait", wait_late if rank == 1 else wait):
            optimizer.step()
        if rank == 0:
            model.module.weight.detach().zero_()
        else:
            assert torch.equal(model.module.weight, torch.full((700, 700), 1.5))


@on_ranks(2)
def test_a_wire_is_given_back_when_another_rank_has_read_it(rank: int) -> None:
    """Rank 0 has finished its first bucket while rank 1 is still busy; memory of that length is unmapped when freed."""
    size = 3000
    module = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(2)))
    for layer in module:
        nn.init.constant_(layer.weight, 1 / size)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=1, lazy_bucket_allocation=True)
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
    module[1 - rank].weight.register_hook(lambda gradient: time.sleep(0.1 + 0.2 * rank))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, size), 1.0 + rank)).sum().backward()
        assert model.last_grad_norm() == pytest.approx(1.5 * size * 2**0.5, rel=1e-4)


@on_ranks(2)
def test_a_rank_waits_for_parameters_in_forward_though_others_do_not_look_at_them(rank: int) -> None:
    """Rank 0 saves a checkpoint between two steps."""
    model = fastddp.DistributedDataParallel(nn.Linear(700, 700))
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, gather="forward")
    for _ in range(3):
        model(torch.ones(1, 700)).sum().backward()
        optimizer.step()
        saved = model.state_dict() if rank == 0 else {}
        dist.barrier()  # where rank 1 has been while rank 0 read parameters
        for name, value in saved.items():
            assert torch.equal(value, model.state_dict()[name])
