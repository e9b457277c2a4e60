"""Buffers: when they are synchronised, by what, and what earlier graphs see of it. Always beside torch's DDP."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import fastddp
from on_ranks import Wrap, gradients, on_ranks, same_under_both
from releases import FORWARD_SYNC_BUFFERS


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


@same_under_both()
def test_a_broadcast_leaves_an_earlier_forwards_graph_usable_175024(wrap: Wrap, rank: int) -> Any:
    model = wrap(Scaled())
    loss = model(local_input(rank)).square()
    nn.init.constant_(model.module.forwards, rank)  # the second forward's broadcast has something to write
    (loss + model(local_input(rank + 2)).square()).backward()
    return gradients(model)


@pytest.mark.parametrize("location", [None, *Location], ids=str)
@same_under_both()
def test_buffers_are_synchronised_and_hooks_called_when_torchs_are(wrap: Wrap, rank: int, location: Any) -> Any:
    model = wrap(Scaled())
    events: list[Any] = []

    def add_up(state: str, buffers: dict[str, Tensor]) -> None:
        events.append((state, sorted(buffers), buffers["forwards"].item(), torch.is_grad_enabled()))
        dist.all_reduce(buffers["forwards"])
        buffers["factor"].mul_(1.0)  # which the forward's graph has saved

    if location is not None:
        model._register_buffer_comm_hook("the state", add_up, location)
    for mode in ("train", "no_sync", "no_sync", "train", "eval", "train", "train"):
        nn.init.constant_(model.module.forwards, 10 * rank)
        with torch.no_grad() if mode == "eval" else model.no_sync() if mode == "no_sync" else nullcontext():
            loss = model(local_input(rank))
            if mode != "eval":
                loss.backward()
        events += [mode, {name: buffer.tolist() for name, buffer in model.module.named_buffers()}]
    assert location is None or sum(isinstance(event, tuple) for event in events) >= 4
    assert location is not None or events[1]["forwards"] == [1.0]
    return events


@pytest.mark.parametrize("location", list(Location), ids=str)
@same_under_both()
def test_the_end_of_backward_waits_for_a_hooks_futures(wrap: Wrap, rank: int, location: Location) -> Any:
    model = wrap(Scaled())
    future: Future = Future()

    def complete_later(state: None, buffers: dict[str, Tensor]) -> list[Future]:
        def work() -> None:
            nn.init.constant_(buffers["factor"], 7.0)
            future.set_result(None)

        threading.Timer(0.3, work).start()
        return [future]

    model._register_buffer_comm_hook(None, complete_later, location)
    loss = model(local_input(rank))
    loss.backward()
    assert model.module.factor.tolist() == [7.0, 7.0]


@on_ranks(2)
def test_what_a_hooks_future_raises_backward_raises_and_the_next_step_is_right(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Scaled())
    failed, done = Future(), Future()
    failed.set_exception(ZeroDivisionError("in the hook's callback"))
    done.set_result(None)
    futures = iter([failed, done])
    model._register_buffer_comm_hook(None, lambda state, buffers: [next(futures)])
    with pytest.raises(ZeroDivisionError, match="in the hook's callback"):
        model(local_input(rank)).backward()
    model.zero_grad()
    model(local_input(rank)).backward()
    assert model.module.layer.weight.grad[0, 0].item() == 1.5


@pytest.mark.parametrize("steps", [0, 3])
@same_under_both()
def test_a_wrapper_can_be_traced_as_torchs_can(wrap: Wrap, rank: int, steps: int) -> Any:
    model = wrap(Scaled(), **{FORWARD_SYNC_BUFFERS: False})  # torch traces no collective
    for _ in range(steps):
        model(local_input(rank)).backward()
    trace = torch.jit.trace(model.eval(), local_input(rank), check_trace=False)
    assert trace(local_input(rank) + 1).item() == 2.0 * (rank + 2)
