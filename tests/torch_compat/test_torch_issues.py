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
from ranks import RankPool


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: Tensor, used: str = "ab") -> Tensor:
        return sum((getattr(self, name) * x).sum() for name in used)  # type: ignore[return-value]


def unused(wrap: Any) -> None:
    model = wrap(Pair())
    model(torch.ones(2), "a").backward()
    model(torch.ones(2))


def changed(wrap: Any) -> None:
    model = wrap(Pair(), static_graph=True)
    for used in ("a", "a", "ab"):
        model(torch.ones(2), used).backward()


def static_too_late(wrap: Any) -> None:
    model = wrap(Pair())
    model(torch.ones(2)).backward()
    model._set_static_graph()


def group_and_mesh(wrap: Any) -> None:
    wrap(Pair(), process_group=dist.group.WORLD, device_mesh=DeviceMesh("cpu", [0, 1]))


def said_by_both(rank: int, mistake: Callable[[Any], None]) -> list[str]:
    said = []
    for wrap in (fastddp.DistributedDataParallel, TorchDDP):
        with pytest.raises(RuntimeError) as raised:
            mistake(wrap)
        said.append(str(raised.value))
    return said


@pytest.mark.parametrize(
    ("mistake", "phrases"),
    [
        (
            unused,
            [
                "Expected to have finished reduction in the prior iteration before starting a new one.",
                "Parameter indices which did not receive grad for rank {rank}: 1",
            ],
        ),
        (changed, ["training graph has changed in this iteration"]),
        (static_too_late, ["should be called before training loop starts"]),
        (group_and_mesh, ["Cannot specify both process_group and device_mesh arguments"]),
    ],
)
def test_errors_carry_the_words_that_people_search_logs_for_43259_22049_68803(
    ranks: RankPool, mistake: Callable[[Any], None], phrases: list[str]
) -> None:
    for rank, said in enumerate(ranks.run(said_by_both, 2, mistake)):
        assert all(phrase.format(rank=rank) in text for phrase in phrases for text in said), said


def strided(rank: int) -> tuple[list[str], list[float]]:
    model = fastddp.DistributedDataParallel(nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 2, 2, 2), rank + 1.0).to(memory_format=torch.channels_last)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.stride() == model.module.weight.stride()
    return [str(warning.message) for warning in caught if "stride" in str(warning.message)], gradient.flatten().tolist()


def test_gradients_of_other_strides_warn_of_nothing_70222(ranks: RankPool) -> None:
    assert ranks.run(strided, 2) == [([], [6.0] * 8)] * 2


def overflow(rank: int) -> list[float]:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    found = []
    for size in (60_000.0, 140_000.0):  # fp16 holds 65504: the sum of the first fits if it is divided before
        model.zero_grad()
        model(torch.full((1, 1), size)).sum().backward()
        found += [model.found_inf().item(), model.module.weight.grad.isinf().item()]
    return found


def test_an_overflow_of_fp16_is_reported_and_a_sum_that_fits_does_not_overflow_57410(ranks: RankPool) -> None:
    assert ranks.run(overflow, 2) == [[0.0, False, 1.0, True]] * 2


# ------------------------------------------------------------------------------------- what a step does not cost here


def used_outside_of_forward(rank: int) -> list[list[float]]:
    """The loss uses b, which no graph led to when forward ended: a search from its output would not have found it."""
    model = fastddp.DistributedDataParallel(Pair(), find_unused_parameters=True)
    seen = []
    for _ in range(3):
        model.zero_grad()
        (model(torch.full((2,), rank + 1.0), "a") + (model.module.b * (rank + 1)).sum()).backward()
        seen.append([model.module.a.grad[0].item(), model.module.b.grad[0].item()])
    return seen


def test_what_is_used_shows_in_backward_and_is_not_searched_for_in_forward_53160(ranks: RankPool) -> None:
    assert ranks.run(used_outside_of_forward, 2) == [[[1.5, 1.5]] * 3] * 2


def calls_of_a_forward(rank: int, nodes: int) -> Counter[str]:
    """What Python and C functions a forward calls, whose outputs have a graph of so many nodes."""
    model = fastddp.DistributedDataParallel(Pair(), find_unused_parameters=True)
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_qualname if event == "call" else function.__qualname__] += 1

    for _ in range(3):
        model.zero_grad()
        x = torch.ones(2, requires_grad=True)
        for _ in range(nodes):
            x = x + 1
        calls.clear()
        sys.setprofile(note)
        loss = model(x)
        sys.setprofile(None)
        loss.backward()
    return calls


def test_a_forward_does_the_same_whatever_the_size_of_the_graph_53160(ranks: RankPool) -> None:
    (few,), (many,) = ranks.run(calls_of_a_forward, 1, 10), ranks.run(calls_of_a_forward, 1, 5_000)
    assert few == many
    assert few["Pair.forward"] == 1


def operators_of_a_backward(model: nn.Module, set_to_none: bool) -> set[str]:
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        loss = model(torch.ones(4, 8)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
    return {event.name for event in profile.events() if event.name.startswith("aten::")}


def operators_beside_the_modules(rank: int, set_to_none: bool, hook: str) -> list[set[str]]:
    """Those that run in fastddp's backward, and in that of torch's DDP, and not in the module's own."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    alone = operators_of_a_backward(module, set_to_none)
    ours, torchs = fastddp.DistributedDataParallel(copy.deepcopy(module)), TorchDDP(module)
    if hook:
        ours.register_comm_hook(None, getattr(comm_hooks, hook))
    return [operators_of_a_backward(model, set_to_none) - alone for model in (ours, torchs)]


@pytest.mark.parametrize("hook", ["", "fp16_compress_hook", "bf16_compress_hook"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_operator_divides_gradients_81383(ranks: RankPool, set_to_none: bool, hook: str) -> None:
    dividing = {"aten::mul", "aten::mul_", "aten::div", "aten::div_"}
    for ours, torchs in ranks.run(operators_beside_the_modules, 2, set_to_none, hook):
        assert ours & dividing == set()
        assert torchs & dividing != set()


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
