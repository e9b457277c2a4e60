"""A sharded optimizer trains as a replicated one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.planning.model import Link
from on_ranks import of_ranks, on_ranks

Optimizer = Callable[..., torch.optim.Optimizer]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, foreach=True)


class Layers(nn.Module):
    """They are registered in another order than they are used, so the first window ends with other buckets."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Linear(61, 10)
        self.first = nn.Linear(20, 130)
        self.second = nn.Linear(130, 61)
        self.norm = nn.LayerNorm(61)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(self.first(x).tanh())))


class Tied(nn.Module):
    """A transformer with a table that is also its head, a frozen layer, and attention whose parameters others read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.layer(self.table((x[:, :8] * 1e4).long() % 50))))


class Training:
    def __init__(self, rank: int, module: nn.Module, cap: Any = 0.01, hook: str = "", **options: Any) -> None:
        self.model = fastddp.DistributedDataParallel(module, bucket_cap_mb=cap, **options)
        if hook:
            state = comm_hooks.BlockState() if hook == "int8" else None
            self.model.register_comm_hook(state, getattr(comm_hooks, f"{hook}_compress_hook"))
        self._generator = torch.Generator().manual_seed(rank)
        self._dtype = next(iter(module.parameters())).dtype

    def backward(self) -> None:
        x = torch.randn(4, 20, generator=self._generator)
        self.model(x if isinstance(self.model.module, Tied) else x.to(self._dtype)).float().square().mean().backward()

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 4, local: int = 0) -> None:
        for _ in range(steps):
            with self.model.no_sync():
                for _ in range(local):
                    self.backward()
            self.backward()
            optimizer.step()
            optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        self.model.parameters_ready()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def both(rank: int, module: type[nn.Module], optimizer: Optimizer, how: dict[str, Any], **options: Any) -> Any:
    """Parameters after some steps: of a replicated optimizer, and of a sharded one."""
    train = {name: options.pop(name) for name in ("steps", "local") if name in options}
    found = []
    for sharded in (False, True):
        training = Training(rank, module(), **options)
        training.train(
            of(training.model, optimizer, **how) if sharded else optimizer(training.model.parameters()), **train
        )
        found.append(training.parameters())
        assert all(equal(found[-1], others) for others in of_ranks(found[-1]))
    return found


def of(model: Any, optimizer: Any, params: Any = None, **how: Any) -> fastddp.ShardedOptimizer:
    return fastddp.ShardedOptimizer(model, optimizer.func, params, **optimizer.keywords, **how)


# ------------------------------------------------------------------------------------------- as a replicated optimizer

SHARDED: dict[str, dict[str, Any]] = {
    "elements": {},
    "parameters": {"shard": "parameters"},
    "parameters arrive in forward": {"gather": "forward"},
}


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["SGD with momentum", "AdamW"])
@pytest.mark.parametrize("hook", ["", "fp16", "int8"])
@on_ranks(2)
def test_parameters_are_those_of_the_replicated_optimizer(rank: int, hook: str, optimizer: Optimizer) -> None:
    replicated, sharded = both(rank, Layers, optimizer, {}, hook=hook, steps=20)
    assert equal(replicated, sharded)


WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "lent wires": {"lazy_bucket_allocation": True, "local": 2},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "accumulation": {"local": 2},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("how", SHARDED)
@on_ranks(2)
def test_tied_and_frozen_parameters_and_those_that_other_modules_read(rank: int, how: str, wrapper: str) -> None:
    replicated, sharded = both(rank, Tied, ADAMW, SHARDED[how], **WRAPPERS[wrapper])
    assert equal(replicated, sharded)


@on_ranks(2)
def test_parameters_may_have_names_and_a_rate_that_is_a_tensor_may_be_changed_in_place(rank: int) -> None:
    found = []
    for sharded in (False, True):
        training, rate = Training(rank, Layers()), torch.tensor(0.01)
        adamw = partial(torch.optim.AdamW, lr=rate, foreach=False)
        named = training.model.named_parameters()
        optimizer = of(training.model, adamw, named) if sharded else adamw(named)
        for _ in range(3):
            training.train(optimizer, steps=1)
            rate.mul_(0.5)
        found.append(training.parameters())
    assert equal(*found)


@on_ranks(2)
def test_a_closure_computes_the_loss_that_step_returns(rank: int) -> None:
    training = Training(rank, Layers())
    optimizer, before = of(training.model, MOMENTUM), training.parameters()

    def closure() -> str:
        training.backward()
        return "the loss"

    assert optimizer.step(closure) == "the loss"
    assert not equal(training.parameters(), before)


# ----------------------------------------------------------------------------------------------------- where state is


@on_ranks(2)
def test_each_rank_has_half_of_the_state(rank: int) -> None:
    training = Training(rank, Layers())
    optimizer = of(training.model, ADAMW)
    training.train(optimizer, steps=2)
    numbers = sum(span.end - span.begin for span in optimizer.parts.shards.spans())
    assert sum(of_ranks(numbers)) == sum(parameter.numel() for parameter in training.model.parameters())
    assert abs(numbers - sum(of_ranks(numbers)) / 2) < 1024 * len(optimizer.parts.shards.buckets)


# ------------------------------------------------------------------------------------------------------ copies in fp32


class Mixed(Layers):
    """Of bf16, but for a norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()
        self.norm.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(self.first(x.bfloat16()).tanh()).float()).bfloat16())


@pytest.mark.parametrize("main_grads", [None, "grad"])
@pytest.mark.parametrize("how", SHARDED)
@on_ranks(2)
def test_parameters_of_16_bits_are_those_of_an_optimizer_with_copies_in_fp32(
    rank: int, how: str, main_grads: Any
) -> None:
    sharded = Training(rank, Mixed(), main_grads=main_grads)
    dtypes = [parameter.dtype for parameter in sharded.model.parameters()]
    sharded.train(of(sharded.model, ADAMW, **SHARDED[how]))
    assert [parameter.dtype for parameter in sharded.model.parameters()] == dtypes
    replicated = Training(rank, Mixed(), main_grads=main_grads)
    parameters = [*replicated.model.parameters()]
    copies = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = ADAMW(copies)
    for _ in range(4):
        replicated.backward()
        for copy, parameter in zip(copies, parameters, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, parameters, strict=True):
                parameter.copy_(copy)
        replicated.model.zero_grad()
    assert equal(sharded.parameters(), replicated.parameters())


@on_ranks(2)
def test_fp32_parameters_may_travel_in_16_bits(rank: int) -> None:
    """Ranks compute with rounded parameters; the copies in the optimizer are not rounded."""
    training = Training(rank, Layers())
    optimizer = of(training.model, partial(torch.optim.SGD, lr=1e-5), parameter_wire=torch.bfloat16)
    training.train(optimizer, steps=3)
    found = training.parameters()
    assert all(equal(found, others) for others in of_ranks(found))
    assert equal(found, [parameter.bfloat16().float() for parameter in found])
    spans = [*optimizer.parts.shards.spans()]
    copies = [span.holder.detach().flatten() for span in spans]
    parts = [found[span.parameter].flatten()[span.begin : span.end] for span in spans]
    assert equal([copy.bfloat16().float() for copy in copies], parts)
    assert not equal(copies, parts)


@pytest.mark.parametrize("before", [0, 4], ids="made after {} steps".format)
@pytest.mark.parametrize("how", SHARDED)
@on_ranks(2)
def test_state_moves_to_the_buckets_that_are_planned_after_four_and_after_seven_steps(
    rank: int, how: str, before: int
) -> None:
    found = []
    for cap in (0.01, "auto"):
        training = Training(rank, Mixed(), cap=cap)
        training.train(partial(torch.optim.SGD, lr=0.1)(training.model.parameters()), steps=before)
        optimizer = of(training.model, MOMENTUM, **SHARDED[how])
        plan = training.model.bucket_plan()
        with mock.patch("fastddp.planning.planner.measure_link", return_value=Link(latency=1e-9, bandwidth=1e3)):
            training.train(optimizer, steps=9 - before)
        found.append(training.parameters())
    assert training.model.bucket_plan() != plan
    assert equal(*found)


@pytest.mark.parametrize("write", ["one", "all"])
@on_ranks(2)
def test_copies_follow_what_others_write(rank: int, write: str) -> None:
    """Those of parameters that nobody has written stay as they are."""
    training = Training(rank, Mixed())
    optimizer = of(training.model, partial(torch.optim.SGD, lr=1e-5))
    training.train(optimizer, steps=3)
    before = {span.parameter: span.holder.detach().clone() for span in optimizer.parts.shards.spans()}
    state = training.model.module.state_dict()
    if write == "one":
        state = {"first.bias": state["first.bias"]}
    training.model.module.load_state_dict({name: value + 1 for name, value in state.items()}, strict=False)
    expected = training.parameters()
    optimizer.zero_grad()
    optimizer.step()
    assert equal(training.parameters(), expected)
    names = optimizer.parts.now.parameters.names
    for span in optimizer.parts.shards.spans():
        is_written = write == "all" or names[span.parameter] == "first.bias"
        assert torch.equal(span.holder, before[span.parameter]) != is_written
