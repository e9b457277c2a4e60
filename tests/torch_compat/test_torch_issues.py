"""What users of torch's DDP complain about in its tracker, and what happens here; numbers are those of pytorch/pytorch.

Complaints whose behaviour another file tests are there, with the number in the test's name.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from hooks_by_name import register
from nodes import by_messages
from on_ranks import Wrap, on_ranks, same_under_both
from parts import Parts, gradients, local_input, wrapped
from ranks import RankPool


@same_under_both()
def test_errors_carry_the_words_that_people_search_logs_for_43259_22049_68803(wrap: Wrap, rank: int) -> Any:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arguments"):
        wrap(Parts("ab"), process_group=dist.group.WORLD, device_mesh=DeviceMesh("cpu", [0, 1]))
    model = wrap(Parts("ab"))
    model(x).backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()
    model = wrap(Parts("ab"))
    model(x, "a").backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as raised:
        model(x)
    assert f"Parameter indices which did not receive grad for rank {rank}: 1" in str(raised.value)
    model = wrap(Parts("ab"), static_graph=True)
    for _ in range(2):
        model(x, "a").backward()
    with pytest.raises(RuntimeError, match="training graph has changed in this iteration"):
        model(x).backward()


# ------------------------------------------------------------------------------------- what a step does not cost here


@on_ranks(2)
def test_what_is_used_shows_in_backward_and_is_not_searched_for_in_forward_53160(rank: int) -> None:
    """The loss uses b, which no graph led to when forward ended: a search from its output would not have found it."""
    model = wrapped(Parts("ab"), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        (model(local_input(rank), "a") + (model.module.b * (rank + 1)).sum()).backward()
        assert gradients(model) == [1.5, 1.5]


def operators_of_a_backward(model: nn.Module, set_to_none: bool) -> set[str]:
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        loss = model(torch.ones(4, 8)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
    return {event.name for event in profile.events() if event.name.startswith("aten::")}


@pytest.mark.parametrize("hook", ["none", "fp16"])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_no_operator_divides_gradients_81383(rank: int, set_to_none: bool, hook: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    alone = operators_of_a_backward(module, set_to_none)
    ours, torchs = fastddp.DistributedDataParallel(copy.deepcopy(module)), TorchDDP(module)
    register(ours, hook)
    dividing = {"aten::mul", "aten::mul_", "aten::div", "aten::div_"} - alone
    assert operators_of_a_backward(ours, set_to_none) & dividing == set()
    assert operators_of_a_backward(torchs, set_to_none) & dividing != set()


def exchange_beside_a_thread_that_keeps_the_gil(rank: int, hook: str) -> tuple[float, float]:
    """When this rank had all gradients; on rank 0, when a thread gave the GIL back that it took as backward began."""
    model = fastddp.DistributedDataParallel(nn.Sequential(*(nn.Linear(200, 200) for _ in range(4))), bucket_cap_mb=0.1)
    register(model, hook)
    with by_messages():
        for _ in range(2):
            model(torch.ones(200, 200)).sum().backward()
            model.zero_grad()
    loss = model(torch.ones(200, 200)).sum()
    averaged: list[float] = []
    if rank == 1:
        model.reducer.on_averaged(lambda parameters: averaged.append(time.monotonic()))
    begins, given_back = threading.Event(), []

    def keep_the_gil() -> None:
        begins.wait()
        ctypes.PyDLL(None).usleep(1_000_000)
        given_back.append(time.monotonic())

    thread = threading.Thread(target=keep_the_gil)
    thread.start()
    gradient = torch.ones(())
    # In seconds: the thread gets the GIL where backward leaves Python, and Tensor.backward did before.
    sys.setswitchinterval(10)
    if rank == 0:
        begins.set()
    flags = {"keep_graph": True, "create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
    # The graph is kept: to free what Python has seen autograd takes the GIL.
    torch.autograd.Variable._execution_engine.run_backward((loss,), (gradient,), inputs=(), **flags)
    sys.setswitchinterval(0.005)
    begins.set()
    thread.join()
    return max(averaged, default=0.0), given_back[0]


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("hook", ["fp16", "bf16", "python"])
def test_native_hooks_run_without_the_gil_46959(ranks: RankPool, hook: str) -> None:
    """Rank 1 gets all gradients from rank 0, where Python cannot run; without reads, which wait for each other.

    Only the status of the window, after them, may wait: in allreduces of gloo torch takes the GIL (flight recorder).
    """
    (_, given_back), (averaged, _) = ranks.run(exchange_beside_a_thread_that_keeps_the_gil, 2, hook)
    assert (averaged < given_back) is (hook != "python")
