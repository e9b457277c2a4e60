"""What users of torch's DDP complain about in its tracker, and what happens here; numbers are those of pytorch/pytorch.

Complaints whose behaviour another file tests are there, with the number in the test's name.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import comm_hooks
from on_ranks import Wrap, on_ranks, same_under_both
from ranks import RankPool


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: Tensor, used: str = "ab") -> Tensor:
        return sum((getattr(self, name) * x).sum() for name in used)  # type: ignore[return-value]


@same_under_both()
def test_errors_carry_the_words_that_people_search_logs_for_43259_22049_68803(wrap: Wrap, rank: int) -> Any:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arguments"):
        wrap(Pair(), process_group=dist.group.WORLD, device_mesh=DeviceMesh("cpu", [0, 1]))
    model = wrap(Pair())
    model(x).backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()
    model = wrap(Pair())
    model(x, "a").backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as raised:
        model(x)
    assert f"Parameter indices which did not receive grad for rank {rank}: 1" in str(raised.value)
    model = wrap(Pair(), static_graph=True)
    for _ in range(2):
        model(x, "a").backward()
    with pytest.raises(RuntimeError, match="training graph has changed in this iteration"):
        model(x).backward()


@on_ranks(2)
def test_gradients_of_other_strides_warn_of_nothing_70222(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 2, 2, 2), rank + 1.0).to(memory_format=torch.channels_last)).sum().backward()
    gradient = model.module.weight.grad
    assert not any("stride" in str(warning.message) for warning in caught)
    assert gradient.stride() == model.module.weight.stride()
    assert gradient.flatten().tolist() == [6.0] * 8


@on_ranks(2)
def test_an_overflow_of_fp16_is_reported_and_a_sum_that_fits_does_not_overflow_57410(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    # fp16 holds 65504: the sum of the first fits if it is divided before.
    for size, overflows in ((60_000.0, False), (140_000.0, True)):
        model.zero_grad()
        model(torch.full((1, 1), size)).sum().backward()
        assert model.found_inf().item() == model.module.weight.grad.isinf().item() == overflows


# ------------------------------------------------------------------------------------- what a step does not cost here


@on_ranks(2)
def test_what_is_used_shows_in_backward_and_is_not_searched_for_in_forward_53160(rank: int) -> None:
    """The loss uses b, which no graph led to when forward ended: a search from its output would not have found it."""
    model = fastddp.DistributedDataParallel(Pair(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        (model(torch.full((2,), rank + 1.0), "a") + (model.module.b * (rank + 1)).sum()).backward()
        assert [own.grad.tolist() for own in model.parameters()] == [[1.5, 1.5]] * 2


@on_ranks(1)
def test_a_forward_does_the_same_whatever_the_size_of_the_graph_53160(rank: int) -> None:
    """What Python and C functions it calls, by the number of nodes in the graph of its inputs."""
    model = fastddp.DistributedDataParallel(Pair(), find_unused_parameters=True)
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_qualname if event == "call" else function.__qualname__] += 1

    found = []
    for nodes in (10, 10, 10, 5_000):
        model.zero_grad()
        x = torch.ones(2, requires_grad=True)
        for _ in range(nodes):
            x = x + 1
        calls.clear()
        sys.setprofile(note)
        loss = model(x)
        sys.setprofile(None)
        loss.backward()
        found.append(Counter(calls))
    assert found[2] == found[3]
    assert found[2]["Pair.forward"] == 1


def operators_of_a_backward(model: nn.Module, set_to_none: bool) -> set[str]:
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        loss = model(torch.ones(4, 8)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
    return {event.name for event in profile.events() if event.name.startswith("aten::")}


@pytest.mark.parametrize("hook", ["", "fp16_compress_hook", "bf16_compress_hook"])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_no_operator_divides_gradients_81383(rank: int, set_to_none: bool, hook: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    alone = operators_of_a_backward(module, set_to_none)
    ours, torchs = fastddp.DistributedDataParallel(copy.deepcopy(module)), TorchDDP(module)
    if hook:
        ours.register_comm_hook(None, getattr(comm_hooks, hook))
    dividing = {"aten::mul", "aten::mul_", "aten::div", "aten::div_"} - alone
    assert operators_of_a_backward(ours, set_to_none) & dividing == set()
    assert operators_of_a_backward(torchs, set_to_none) & dividing != set()


def users_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(None, bucket)


HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": comm_hooks.fp16_compress_hook,
    "bf16": comm_hooks.bf16_compress_hook,
    "in Python": users_hook,
}


def exchange_beside_a_thread_that_keeps_the_gil(rank: int, hook: str) -> tuple[float, float]:
    """When this rank had all gradients; on rank 0, when a thread gave the GIL back that it took as backward began."""
    model = fastddp.DistributedDataParallel(nn.Sequential(*(nn.Linear(200, 200) for _ in range(4))), bucket_cap_mb=0.1)
    model.register_comm_hook(None, HOOKS[hook])
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
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (gradient,),
        keep_graph=True,  # to free what Python has seen autograd takes the GIL
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    sys.setswitchinterval(0.005)
    begins.set()
    thread.join()
    return max(averaged, default=0.0), given_back[0]


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("hook", HOOKS)
def test_native_hooks_run_without_the_gil_46959(ranks: RankPool, hook: str) -> None:
    """Rank 1 gets all gradients from rank 0, where Python cannot run.

    Only the status of the window, behind them, may wait: in allreduces of gloo torch takes the GIL (flight recorder).
    """
    (_, given_back), (averaged, _) = ranks.run(exchange_beside_a_thread_that_keeps_the_gil, 2, hook)
    assert (averaged < given_back) is (hook != "in Python")
