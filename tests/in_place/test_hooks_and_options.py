"""A replicated module trains as fastddp.DistributedDataParallel does, bit for bit, with each hook and option."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fastddp
from fastddp import comm_hooks
from fastddp.watch.corruption import Corruption
from hooks_by_name import averages
from on_ranks import differences, gradients, on_ranks


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 32), nn.BatchNorm1d(32), nn.Linear(32, 24)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).tanh())).square().mean()

    def score(self, x: Tensor) -> Tensor:
        return self.forward(x)


BY = pytest.mark.parametrize("by", ["forward", "method", "turns"])
Wrap = Callable[[nn.Module], Any]


def layers(dtype: torch.dtype = torch.float32) -> Layers:
    torch.manual_seed(0)
    return Layers(dtype)


def inputs(rank: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(10 * number + rank)).to(dtype)


def trained(
    wrap: Wrap,
    rank: int,
    by: str = "forward",
    make_optimizer: Callable[[Any], Any] | None = None,
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
    after_backward: Callable[[Any], Any] = lambda model: None,
    join: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Gradients before each step, and parameters in the end."""
    model = wrap(layers(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if make_optimizer is None else make_optimizer(model)
    found: list[Any] = []
    with contextlib.nullcontext() if join is None else join(model):
        for number in range(steps):
            is_by_method = by == "method" or (by == "turns" and number % 2 == 0)
            x = inputs(rank, number, dtype)
            (model.score if is_by_method else model)(x).backward()
            found.append(after_backward(model))
            if make_optimizer is None:
                found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    if make_optimizer is not None:
        found.append([value.clone() for value in model.parameters()])
        found.append([value.clone() for value in (getattr(model, "module", model)).state_dict().values()])
    return found


def check_as_wrapper(rank: int, by: str, of_wrapper: Wrap, of_replicated: Wrap | None = None, **how: Any) -> None:
    found = trained(of_replicated or of_wrapper, rank, by, **how)
    expected = trained(of_wrapper, rank, **how)
    # Buffers are rank 0's in a forward of the root only, so that those of the end may differ.
    assert differences(expected[:-1], found[:-1]) == []
    assert differences(expected[-1:], found[-1:]) == [] or by != "forward"


def with_hook(state: Callable[[], Any], hook: Any) -> Wrap:
    def wrap(module: nn.Module) -> Any:
        model = fastddp.DistributedDataParallel(module)
        model.register_comm_hook(state(), hook)
        return model

    return wrap


@BY
@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "fp8", "powersgd2"])
@on_ranks(2)
def test_a_hook_by_name(rank: int, name: str, by: str) -> None:
    wrap = with_hook(lambda: comm_hooks.hook_named(name)[0], comm_hooks.hook_named(name)[1])
    check_as_wrapper(rank, by, wrap, lambda module: fastddp.replicate(module, hook=name))


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "PowerSGD from the third step on": (
        lambda: comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2),
        comm_hooks.powerSGD_hook,
    ),
    "written in Python": (lambda: None, averages),
}


@BY
@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_a_hook_with_its_state(rank: int, name: str, is_registered: bool, by: str) -> None:
    state, hook = HOOKS[name]

    def replicated(module: nn.Module) -> nn.Module:
        if not is_registered:
            return fastddp.replicate(module, hook=(state(), hook))
        model = fastddp.replicate(module)
        model.register_comm_hook(state(), hook)
        return model

    check_as_wrapper(rank, by, with_hook(state, hook), replicated, steps=5)


BF16 = {"dtype": torch.bfloat16}
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gradient_average": "sum"}, {}),
    ({"gradient_average": "a weight"}, {}),
    ({"gradient_as_bucket_view": True}, {}),
    ({"bucket_cap_mb": 0.001}, {}),
    ({"bucket_cap_mb_list": [0.001, 0.002]}, {}),
    ({"buckets": "a plan"}, {}),
    ({"find_unused_parameters": True}, {}),
    ({"static_graph": True}, {}),
    ({"lazy_bucket_allocation": True}, {}),
    ({"main_grads": "main_grad"}, BF16),
    *([({"main_grads": "grad"}, BF16)] if hasattr(Tensor, "grad_dtype") else []),
]


@BY
@pytest.mark.parametrize(("options", "how"), OPTIONS, ids=str)
@on_ranks(2)
def test_an_option(rank: int, options: dict[str, Any], how: dict[str, Any], by: str) -> None:
    options = dict(options)
    if "buckets" in options:
        options["buckets"] = fastddp.replicate(layers(), bucket_cap_mb=0.002).bucket_plan()
    if options.get("gradient_average") == "a weight":
        options["gradient_average"] = lambda: rank + 1.5
    if options.get("main_grads") == "main_grad":
        how = {**how, "after_backward": lambda model: [one.main_grad.clone() for one in model.parameters()]}
    check_as_wrapper(
        *(rank, by),
        lambda module: fastddp.DistributedDataParallel(module, **options),
        lambda module: fastddp.replicate(module, **options),
        **how,
    )


@BY
@on_ranks(2)
def test_a_plan_that_is_made_after_some_steps(rank: int, by: str) -> None:
    seen = trained(lambda module: fastddp.replicate(module, bucket_cap_mb="auto"), rank, by, steps=10)
    alone = trained(lambda module: fastddp.DistributedDataParallel(module), rank, steps=10)
    torch.testing.assert_close(seen, alone)


SHARDED: list[dict[str, Any]] = [{}, {"gather": "forward"}, {"shard": "parameters"}]


@BY
@pytest.mark.parametrize("options", SHARDED, ids=str)
@on_ranks(2)
def test_a_sharded_optimizer(rank: int, options: dict[str, Any], by: str) -> None:
    def optimizer(model: Any) -> Any:
        return fastddp.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, foreach=True, **options)

    check_as_wrapper(
        rank, by, fastddp.DistributedDataParallel, fastddp.replicate, make_optimizer=optimizer,
        after_backward=lambda model: [fastddp.clip_grad_norm_(model, 0.1)],
    )  # fmt: skip


@BY
@pytest.mark.parametrize("what", ["clip", "last_grad_norm", "found_inf"])
@on_ranks(2)
def test_what_is_asked_after_a_backward(rank: int, what: str, by: str) -> None:
    ask = {
        "clip": lambda model: fastddp.clip_grad_norm_(model, 0.1),
        "last_grad_norm": lambda model: model.last_grad_norm(),
        "found_inf": lambda model: model.found_inf(),
    }[what]
    check_as_wrapper(rank, by, fastddp.DistributedDataParallel, fastddp.replicate, after_backward=ask)


@pytest.mark.parametrize("by", ["forward", "method"])
@on_ranks(2)
def test_gradients_that_are_not_finite_are_found(rank: int, by: str) -> None:
    model = fastddp.replicate(layers())
    for is_wrong in (False, True, False):
        factor = float("inf") if is_wrong and rank == 1 else 1.0
        (factor * getattr(model, "score" if by == "method" else "__call__")(inputs(rank, 0))).backward()
        assert model.found_inf() == is_wrong
        model.zero_grad()


# ------------------------------------------------------------------------------------------------------ uneven inputs


JOINS: dict[str, Callable[[Any], Any]] = {
    "join()": lambda model: model.join(),
    "Join": lambda model: Join([model]),
    "by inputs": lambda model: model.join(divide_by_initial_world_size=False),
}


@pytest.mark.parametrize("by", ["forward", "method"])
@pytest.mark.parametrize("join", JOINS)
@on_ranks(2)
def test_ranks_may_have_other_numbers_of_inputs(rank: int, join: str, by: str) -> None:
    how = {"join": JOINS[join], "steps": 2 + 2 * rank, "make_optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1)}
    check_as_wrapper(rank, by, fastddp.DistributedDataParallel, fastddp.replicate, **how)


# ------------------------------------------------------------------------------------------------------------ watching


@pytest.mark.parametrize("by", ["forward", "method"])
@on_ranks(2)
def test_a_step_is_sampled(rank: int, by: str) -> None:
    model = fastddp.replicate(layers())
    model.sample_steps(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        getattr(model, "score" if by == "method" else "__call__")(inputs(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = model.step_report()
    assert report is not None
    assert len(report.buckets) == 1
    assert report.split.exposed >= 0
    model.sample_steps(0)


@pytest.mark.parametrize("by", ["forward", "method"])
@on_ranks(2)
def test_replicas_that_differ_are_told(rank: int, by: str) -> None:
    told: list[Corruption] = []
    model = fastddp.replicate(layers(), watch=fastddp.Watch(audit_every=1, corruption=told.append))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.audit(optimizer)
    for number in range(6):
        getattr(model, "score" if by == "method" else "__call__")(inputs(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and rank == 1:
            assert told == []
            with torch.no_grad():
                model.last.bias[3] += 1.0
    assert {one.parameter for one in told} == {"last.bias"}


@on_ranks(2)
def test_the_module_whose_output_is_not_finite_is_found(rank: int) -> None:
    told: list[Corruption] = []
    model = fastddp.replicate(layers(), watch=fastddp.Watch(corruption=told.append))
    model.find_non_finite_module()
    x = inputs(rank, 0)
    with torch.no_grad():
        model.first.weight[0, 0] = float("inf") if rank else 1.0
    model(x).backward()
    assert [one.ranks for one in told] == [(1,)] * rank
    assert all(re.search(r"on rank 1 the output of first \(Linear\)", one.message) for one in told)
