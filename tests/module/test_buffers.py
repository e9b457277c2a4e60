"""Buffers: when they are synchronised, by what, and what earlier graphs see of it. Always beside torch's DDP."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import fastddp
from ranks import RankPool
from releases import FORWARD_SYNC_BUFFERS, TORCH_WITH_USABLE_GRAPHS

BOTH = (fastddp.DistributedDataParallel, TORCH_WITH_USABLE_GRAPHS)
LOCATIONS = pytest.mark.parametrize("location", list(Location), ids=lambda location: location.name)


class Scaled(nn.Module):
    """Its graph saves a buffer, and its forward counts in another one and replaces a third."""

    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.register_buffer("factor", torch.ones(2))
        self.register_buffer("forwards", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.replaced = self.replaced + x.detach().max()
        return (self.layer(x) * self.factor).sum()


def local_input(rank: int) -> Tensor:
    return torch.full((1, 2), rank + 1.0)


def content(model: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in model.module.named_buffers()}


def broadcasts(rank: int) -> list[list[Any]]:
    everything = []
    for cls in BOTH:
        model = cls(Scaled())
        seen = []
        for step in range(3):
            with torch.no_grad():
                model.module.forwards.fill_(10 * rank)
            model(local_input(rank)).backward()
            seen.append(content(model))
            if step == 1:  # under no_sync nothing is broadcast, nor in the forward after it
                with model.no_sync():
                    model(local_input(rank)).backward()
                    seen.append(content(model))
        everything.append(seen)
    return everything


def test_forwards_begin_with_rank_0s_buffers_when_torchs_do(ranks: RankPool) -> None:
    for ours, theirs in ranks.run(broadcasts, 2):
        assert ours == theirs
        assert ours[0]["forwards"] == [1.0]
    assert ours[2]["replaced"] != ours[0]["replaced"]


def two_forwards(rank: int, module: Callable[[], nn.Module], change: bool) -> list[list[Tensor]]:
    """Gradients of one backward through the graphs of two forwards, under each class."""
    torch.manual_seed(rank)
    batches = [torch.randn(4, 2) for _ in range(2)]
    torch.manual_seed(0)
    inner = module()
    everything = []
    for cls in BOTH:
        model = cls(copy.deepcopy(inner))
        loss = model(batches[0]).square().sum()
        if change:
            with torch.no_grad():
                model.module.forwards.fill_(rank)  # the second forward's broadcast has something to write
        (loss + model(batches[1]).square().sum()).backward()
        everything.append([parameter.grad.clone() for parameter in model.parameters()])
    return everything


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("module", [batch_norm, Scaled])
def test_buffers_broadcast_between_two_forwards_leave_the_first_ones_graph_usable_175024(
    ranks: RankPool, module: Callable[[], nn.Module]
) -> None:
    for ours, theirs in ranks.run(two_forwards, 2, module, module is Scaled):
        assert all(map(torch.equal, ours, theirs))


def hooked_program(rank: int, location: Location) -> list[list[Any]]:
    everything = []
    for cls in BOTH:
        model = cls(Scaled())
        events: list[Any] = []

        def add_up(state: str, buffers: dict[str, Tensor], events: list[Any] = events) -> None:
            events.append((state, sorted(buffers), buffers["forwards"].item(), torch.is_grad_enabled()))
            dist.all_reduce(buffers["forwards"])
            buffers["factor"].mul_(1.0)  # which the forward's graph has saved

        model._register_buffer_comm_hook("the state", add_up, location)
        for mode in ("train", "no_sync", "no_sync", "train", "eval", "train", "train"):
            events.append(mode)
            if mode == "eval":
                with torch.no_grad():
                    model(local_input(rank))
            elif mode == "no_sync":
                with model.no_sync():
                    model(local_input(rank)).backward()
            else:
                model(local_input(rank)).backward()
                events.append(content(model))
        everything.append(events)
    return everything


@LOCATIONS
def test_a_hook_for_buffers_is_called_when_torch_calls_it_with_what_torch_gives_it(
    ranks: RankPool, location: Location
) -> None:
    for ours, theirs in ranks.run(hooked_program, 2, location):
        assert ours == theirs
        assert sum(isinstance(event, tuple) for event in ours) >= 4


def late_futures(rank: int, location: Location) -> list[list[bool]]:
    """Whether a future has been waited for: after the forward, and after the backward."""
    everything = []
    for cls in BOTH:
        model = cls(Scaled())
        future: torch.futures.Future = torch.futures.Future()

        def complete_later(
            state: None, buffers: dict[str, Tensor], future: torch.futures.Future = future
        ) -> list[torch.futures.Future]:
            def work() -> None:
                time.sleep(0.3)
                with torch.no_grad():
                    buffers["factor"].fill_(7.0)
                future.set_result(None)

            threading.Thread(target=work).start()
            return [future]

        model._register_buffer_comm_hook(None, complete_later, location)
        loss = model(local_input(rank))
        after_forward = future.done()
        loss.backward()
        everything.append([after_forward, future.done(), model.module.factor.tolist() == [7.0, 7.0]])
    return everything


@LOCATIONS
def test_the_end_of_backward_waits_for_a_hooks_futures(ranks: RankPool, location: Location) -> None:
    for ours, theirs in ranks.run(late_futures, 2, location):
        assert ours == theirs == [False, True, True]


def without_backward(rank: int) -> list[bool]:
    model = fastddp.DistributedDataParallel(Scaled())
    futures: list[torch.futures.Future] = []

    def hook(state: None, buffers: dict[str, Tensor]) -> torch.futures.Future:
        futures.append(torch.futures.Future())
        threading.Timer(0.2, futures[-1].set_result, [None]).start()
        return futures[-1]

    model._register_buffer_comm_hook(None, hook)
    seen = []
    model(local_input(rank))
    seen.append(futures[0].done())
    model.module.register_forward_pre_hook(lambda *_: seen.append(futures[0].done()))
    model(local_input(rank))
    seen.append(futures[1].done())
    copy.deepcopy(model)
    return [*seen, futures[1].done()]


def test_without_a_backward_the_next_forward_and_a_copy_wait_for_a_hooks_futures(ranks: RankPool) -> None:
    assert ranks.run(without_backward, 1) == [[False, True, False, True]]


def failing_future(rank: int) -> float:
    model = fastddp.DistributedDataParallel(Scaled())
    failed, done = torch.futures.Future(), torch.futures.Future()
    failed.set_exception(ZeroDivisionError("in the hook's callback"))
    done.set_result(None)
    futures = iter([failed, done])
    model._register_buffer_comm_hook(None, lambda state, buffers: [next(futures)])
    with pytest.raises(ZeroDivisionError, match="in the hook's callback"):
        model(local_input(rank)).backward()
    model.zero_grad()
    model(local_input(rank)).backward()
    return model.module.layer.weight.grad[0, 0].item()


def test_what_a_hooks_future_raises_backward_raises_and_the_next_step_is_right(ranks: RankPool) -> None:
    assert ranks.run(failing_future, 2) == [1.5, 1.5]


def default_from_hook(rank: int) -> list[list[float]]:
    everything = []
    for cls in BOTH:
        model = cls(Scaled())

        def hook(state: TorchDDP, buffers: dict[str, Tensor]) -> None:
            state._default_broadcast_coalesced([buffers["factor"]])

        model._register_buffer_comm_hook(model, hook, Location.PRE_FORWARD)
        with torch.no_grad():
            model.module.factor.fill_(rank + 5.0)
        model(local_input(rank))
        everything.append(model.module.factor.tolist())
    return everything


def test_a_hook_may_call_the_default_broadcast(ranks: RankPool) -> None:
    assert ranks.run(default_from_hook, 2) == [[[5.0, 5.0], [5.0, 5.0]]] * 2


def register(rank: int, hook: Any, location: Any) -> None:
    fastddp.DistributedDataParallel(Scaled())._register_buffer_comm_hook(None, hook, location)


@pytest.mark.parametrize(
    ("hook", "location", "text"),
    [("hook", Location.PRE_FORWARD, "must be callable, got str"), (print, "before", "PRE_FORWARD or POST_FORWARD")],
)
def test_registering_no_hook_or_no_place_is_refused(ranks: RankPool, hook: Any, location: Any, text: str) -> None:
    (error,) = ranks.errors(register, 1, hook, location)
    assert error.type_name == "TypeError"
    assert text in error.message


def traced(rank: int, trained: bool) -> list[float]:
    values = []
    for cls in BOTH:
        model = cls(Scaled(), **{FORWARD_SYNC_BUFFERS: False})  # torch traces no collective
        for _ in range(3 * trained):
            model(local_input(rank)).backward()
        trace = torch.jit.trace(model.eval(), local_input(rank), check_trace=False)
        values.append(trace(local_input(rank) + 1).item())
    return values


@pytest.mark.parametrize("trained", [False, True])
def test_a_wrapper_can_be_traced_as_torchs_can(ranks: RankPool, trained: bool) -> None:
    for rank, values in enumerate(ranks.run(traced, 2, trained)):
        assert values == [2.0 * (rank + 2)] * 2
