"""A replicated module trains as fastddp.DistributedDataParallel does, bit for bit, with each hook and option."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD, AdamW

import fastddp
from by_hand import Net, inputs
from fastddp import comm_hooks
from fastddp.watch.corruption import Corruption
from hooks_by_name import averages
from on_ranks import differences, gradients, on_ranks

Case = dict[str, Any]
NORM = functools.partial(fastddp.clip_grad_norm_, max_norm=0.1)


def module() -> Net:
    torch.manual_seed(0)
    made = Net(24, 32)
    made.register_buffer("mean", torch.zeros(()))
    return made


def sgd(model: nn.Module) -> Any:
    return SGD(model.parameters(), lr=0.1)


def sharded(**options: Any) -> Case:
    """Gradients of such an optimizer's model are averages only where they are used: their norm is compared."""
    return {"optimizer": lambda m: fastddp.ShardedOptimizer(m, AdamW, lr=0.01, foreach=True, **options), "ask": NORM}


MAIN: Case = {"main_grads": "main_grad", "ask": lambda model: [one.main_grad.clone() for one in model.parameters()]}
BF16: Case = {"dtype": torch.bfloat16}
CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: {"hook": name} for name in ("fp16", "bf16", "int8", "fp8", "powersgd2")},  # type: ignore[misc]
    "PowerSGD": lambda: {"hook": (comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2), comm_hooks.powerSGD_hook)},
    "a hook in Python": lambda: {"hook": (None, averages)},
    "sums": lambda: {"gradient_average": "sum"},
    "weights": lambda: {"gradient_average": lambda: dist.get_rank() + 1.5},
    "views": lambda: {"gradient_as_bucket_view": True},
    "small buckets": lambda: {"bucket_cap_mb": 0.001},
    "a plan": lambda: {"buckets": fastddp.replicate(module(), bucket_cap_mb=0.002).bucket_plan()},
    "a plan after some steps": lambda: {"bucket_cap_mb": "auto", "steps": 10},
    "lazy": lambda: {"lazy_bucket_allocation": True},
    "main_grad": lambda: {**MAIN, **BF16},
    **({"grad": lambda: {"main_grads": "grad", **BF16}} if hasattr(Tensor, "grad_dtype") else {}),
    "sharded": sharded,
    "sharded, gathers in forward": lambda: sharded(gather="forward"),
    "sharded parameters": lambda: sharded(shard="parameters"),
    "the norm": lambda: {"ask": lambda model: [model.last_grad_norm(), model.found_inf(), NORM(model)]},
    "join()": lambda: {"join": lambda model: model.join()},
    "Join": lambda: {"join": lambda model: Join([model])},
    "join() by inputs": lambda: {"join": lambda model: model.join(divide_by_initial_world_size=False)},
}


def trained(model: Any, rank: int, by: str, steps: int = 5, **how: Any) -> list[Any]:
    """Gradients before each step, and parameters in the end; rank 1 has more inputs where ranks join."""
    make_optimizer, join = how.get("optimizer", sgd), how.get("join")
    optimizer, found = make_optimizer(model), []
    with contextlib.nullcontext() if join is None else join(model):
        for number in range(steps if join is None else 2 + 2 * rank):
            run = model.forward if by == "method" or (by == "turns" and number % 2 == 0) else model
            run(inputs(rank, number, 24).to(next(model.parameters()).dtype)).backward()
            found += [how["ask"](model) if "ask" in how else None, gradients(model) if make_optimizer is sgd else None]
            optimizer.step()
            model.zero_grad()
    return [found, [parameter.detach().clone() for parameter in model.parameters()]]


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("by", ["forward", "method", "turns"])
@pytest.mark.parametrize("which", CASES)
@on_ranks(2)
def test_training_is_the_wrappers(rank: int, which: str, by: str) -> None:
    def train(wrap: Callable[..., Any], by: str) -> list[Any]:
        case = CASES[which]()
        how = {name: case.pop(name) for name in ("ask", "optimizer", "join", "steps") if name in case}
        return trained(wrap(module().to(case.pop("dtype", torch.float32)), **case), rank, by, **how)

    def wrap(module: nn.Module, hook: Any = None, **options: Any) -> nn.Module:
        wrapper = fastddp.DistributedDataParallel(module, **options)
        if hook is not None:
            wrapper.register_comm_hook(*(comm_hooks.hook_named(hook) if isinstance(hook, str) else hook))
        return wrapper

    assert differences(train(wrap, "forward"), train(fastddp.replicate, by)) == []


@on_ranks(2)
def test_a_step_is_watched(rank: int) -> None:
    told: list[Corruption] = []
    model = fastddp.replicate(module(), watch=fastddp.Watch(audit_every=1, corruption=told.append))
    model.audit(sgd(model))
    model.sample_steps(1)
    for is_wrong in (0, 1):
        with torch.no_grad():
            model.left.bias += rank * is_wrong
        trained(model, rank, "method")
        assert {one.parameter for one in told} == ({"left.bias"} if is_wrong else set())
    assert len(model.step_report().buckets) == 1
    (model(inputs(rank, width=24)) * (float("inf") if rank else 1.0)).backward()
    assert model.found_inf()


@on_ranks(2)
def test_the_module_whose_output_is_not_finite_is_found(rank: int) -> None:
    told: list[Corruption] = []
    model = fastddp.replicate(module(), watch=fastddp.Watch(corruption=told.append))
    model.find_non_finite_module()
    with torch.no_grad():
        model.trunk.weight[0, 0] = float("inf") if rank else 1.0
    model(inputs(rank, width=24)).backward()
    assert ["on rank 1 the output of trunk (Linear)" in one.message for one in told] == [True] * rank
