"""Parameters that are read while they are on their way (``gather="forward"``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fastddp
from on_ranks import differences, on_ranks


class Two(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(8, 300), nn.Linear(300, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Holding(Two):
    """It holds a parameter of another module in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"weights": [[self.first.weight]]}

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ self.held["weights"][0][0].T).tanh() + self.first.bias)


class Recurrent(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(8, 300)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[0])


class Unpacking(Two):
    """It takes parameters out of the dictionary that has them."""

    def forward(self, x: Tensor) -> Tensor:
        first = {**self.first._parameters}
        return self.last((x @ first["weight"].T).tanh() + dict(self.first._parameters)["bias"])


def traced() -> nn.Module:
    module = Two()
    module.first = torch.jit.trace(module.first, torch.ones(3, 8))
    return module


def scripted() -> nn.Module:
    module = Two()
    module.first = torch.jit.script(module.first)
    return module


def compiled() -> nn.Module:
    module = Two()
    module.first.compile(backend="eager")
    return module


def trained(module: nn.Module, gather: Any, rank: int) -> list[Tensor]:
    """Rank 1 is late at each step, so rank 0 is in its next forward before parameters are here."""
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0)
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, gather=gather)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model(torch.randn(3, 8, generator=generator)).square().mean().backward()
        if rank == 1 and gather == "forward":
            time.sleep(0.05)
        optimizer.step()
        optimizer.zero_grad()
    found = [model.module(torch.ones(3, 8)).detach()]
    model.parameters_ready()
    assert all(type(part._parameters) is dict for part in (model.module, model.module.last))
    return found + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("make", [traced, Two, Recurrent, Holding, Unpacking, compiled, scripted])
@on_ranks(2)
def test_whoever_reads_them_waits(rank: int, make: Callable[[], nn.Module]) -> None:
    assert differences(trained(make(), "step", rank), trained(make(), "forward", rank)) == []


@pytest.mark.parametrize("change", ["replaced", "added"])
@pytest.mark.parametrize("arrived", [False, True])
@on_ranks(2)
def test_parameters_that_change_after_wrapping_are_noticed(rank: int, arrived: bool, change: str) -> None:
    model = fastddp.DistributedDataParallel(Two(), bucket_cap_mb=0)
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, gather="forward")
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    if arrived:
        model.parameters_ready()
    setattr(model.module.last, "bias" if change == "replaced" else "more", nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match=rf"last\.{'bias' if change == 'replaced' else 'more'}(.|\n)*FD012"):
        model(torch.ones(3, 8))


@on_ranks(2)
def test_optimizers_of_two_models_may_step_in_another_order_on_each_rank(rank: int) -> None:
    """The models have the same sizes, and messages of one would fit the other."""
    found = []
    for turned in (False, True):
        models = [fastddp.DistributedDataParallel(Two(seed), bucket_cap_mb=0) for seed in (1, 2)]
        steps = [fastddp.ShardedOptimizer(one, torch.optim.SGD, lr=0.1, gather="forward") for one in models]
        for _ in range(3):
            for model in models:
                model.zero_grad()
                model(torch.ones(3, 8)).square().mean().backward()
            for optimizer in steps[::-1] if turned and rank == 1 else steps:
                optimizer.step()
        for model in models:
            model.parameters_ready()
        found.append([parameter.detach().clone() for model in models for parameter in model.parameters()])
    assert differences(*found) == []


# --------------------------------------------------------------------------------------------------- several threads


class Held:
    """Whoever receives a bucket first is held when it has come, until another thread wants one too."""

    def __init__(self, shards: Any, error: Exception | None = None) -> None:
        self.first, self.second, self._lock = threading.Event(), threading.Event(), threading.RLock()
        self._error, self._reducer = error, shards._reducer
        send = self._reducer.send_parameters
        shards._receives, shards._reducer = self, SimpleNamespace(await_parameters=self._await, send_parameters=send)
        self.let_go = lambda: setattr(shards, "_reducer", self._reducer)

    def __enter__(self) -> None:
        if self.first.is_set():
            self.second.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _await(self, gather: Any, number: int) -> None:
        self._reducer.await_parameters(gather, number)
        if not self.first.is_set():
            self.first.set()
            assert self.second.wait(60)
            if self._error is not None:
                raise self._error


READERS: dict[str, Callable[[Any, Any], object]] = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "an average": lambda model, optimizer: [parameter.norm() for parameter in model.parameters()],
    "parameters_ready": lambda model, optimizer: model.parameters_ready(),
    "forward": lambda model, optimizer: model.module(torch.ones(3, 8)),
}


def stepped(gather: Any) -> tuple[Any, Any]:
    model = fastddp.DistributedDataParallel(Two(), bucket_cap_mb=0)
    how: Any = {"gather": gather, "parameter_wire": torch.bfloat16}
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, **how)
    model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def in_thread(read: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            read()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("reader", READERS)
@on_ranks(2)
def test_who_comes_second_waits_until_the_first_has_all(rank: int, reader: str) -> None:
    """What has come is not yet a parameter: it is copied, and then versions rise."""
    expected, _ = stepped("step")
    model, optimizer = stepped("forward")
    held = Held(optimizer.parts.shards)
    thread, errors = in_thread(lambda: READERS[reader](model, optimizer))
    assert held.first.wait(60)
    output = model(torch.ones(3, 8))
    held.second.set()  # for the code that does not wait
    thread.join()
    assert errors == []
    assert differences(expected(torch.ones(3, 8)), output) == []
    held.let_go()
    output.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("reader", READERS)
@on_ranks(2)
def test_a_failure_in_one_thread_is_seen_by_all_until_parameters_are_loaded(rank: int, reader: str) -> None:
    saved = {name: value.clone() for name, value in stepped("step")[0].state_dict().items()}
    model, optimizer = stepped("forward")
    held = Held(optimizer.parts.shards, RuntimeError("the network"))
    thread, errors = in_thread(lambda: READERS[reader](model, optimizer))
    assert held.first.wait(60)
    for read in (model.state_dict, lambda: model(torch.ones(3, 8)), model.parameters_ready, optimizer.step):
        with pytest.raises(RuntimeError, match=r"is incomplete(.|\n)*FD044"):
            read()
        held.second.set()
    thread.join()
    assert [str(error) for error in errors] == ["the network"]
    held.let_go()
    hooks = [len(module._state_dict_pre_hooks) for module in model.module.modules()]
    assert hooks == [1] * 3
    model.load_state_dict(saved)
    model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()
    assert [len(module._state_dict_pre_hooks) for module in model.module.modules()] == [0] * 3


@on_ranks(2)
def test_a_reader_of_the_last_step_does_not_end_what_the_next_one_begins(rank: int) -> None:
    model, optimizer = stepped("forward")
    held = Held(optimizer.parts.shards)
    thread, errors = in_thread(model.parameters_ready)
    assert held.first.wait(60)
    model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()
    held.second.set()
    thread.join()
    assert errors == []
    assert type(model.module.last._parameters) is not dict  # the next forward waits


@on_ranks(2)
def test_readers_wait_for_what_came_before_a_step_that_raised(rank: int) -> None:
    model, optimizer = stepped("forward")
    model(torch.ones(3, 8)).square().mean().backward()
    last = optimizer.parts.inner[0]  # it steps last
    with mock.patch.object(last, "step", side_effect=OSError), pytest.raises(OSError):
        optimizer.step()
    assert not optimizer.parts.shards._coming


@pytest.mark.parametrize("compiled", ["wrapper", "module", "before it is wrapped", "caller"])
@on_ranks(2)
def test_a_compiled_model_is_one_graph_over_all_steps(rank: int, compiled: str) -> None:
    torch._dynamo.reset()
    module: Any = Two()
    expected = trained(module, "step", rank)
    module, graphs = Two(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    if compiled == "module":
        module.compile(backend=backend)
    if compiled == "before it is wrapped":
        module = torch.compile(module, backend=backend)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0)
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, gather="forward")
    run: Any = torch.compile(model, backend=backend) if compiled == "wrapper" else model
    if compiled == "caller":
        run = torch.compile(lambda x: model(x), backend=backend)  # type: ignore[misc]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        run(torch.randn(3, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(graphs) == 1
    assert differences(expected[1:], [parameter.detach().clone() for parameter in model.parameters()]) == []
