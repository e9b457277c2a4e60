"""What frameworks call on ``model.reducer``, and ask of torch's logger, is what it is under torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import comm_hooks
from models import MODELS, inputs
from ranks import RankPool

NAME = "batch norm MLP"
SMALL_BUCKETS = {"bucket_cap_mb": 100 / 2**20}
Result = list[Tensor]


def prepare(model: nn.Module, outputs: Any = ()) -> None:
    """What Lightning does before a backward that no forward has prepared."""
    model.require_forward_param_sync = True
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward(outputs)


def gradients(model: nn.Module) -> Result:
    return [parameter.grad.clone() for parameter in model.parameters()]


def after_local_passes(rank: int, model: nn.Module) -> Result:
    """Accelerate's way: all forwards under no_sync, the last backward synchronises."""
    found = []
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            losses = [model(inputs(NAME, rank, 2 * step + index)).square().mean() for index in (0, 1)]
        losses[0].backward()
        # Accelerate never gives outputs, with which torch's DDP raises under find_unused_parameters.
        prepare(model, losses[1:] if model.find_unused_parameters else [])
        losses[1].backward()
        found += gradients(model)
    return found


def twice_over_one_forward(rank: int, model: nn.Module) -> Result:
    """Lightning's way, by hand: each backward synchronises."""
    found = []
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            output = model(inputs(NAME, rank, step))
        for scale, retain in ((1.0, True), (0.1, False)):
            prepare(model, output)
            (output * scale).square().sum().backward(retain_graph=retain)
            found += gradients(model)
    return found


def between_usual_steps(rank: int, model: nn.Module) -> Result:
    found = []
    for step in range(4):
        model.zero_grad()
        if step % 2 == 0:
            loss = model(inputs(NAME, rank, step)).square().sum()
        else:
            with model.no_sync():
                loss = model(inputs(NAME, rank, step)).square().sum()
            prepare(model, [loss])
        loss.backward()
        found += gradients(model)
    return found


def under_both(rank: int, training: Callable[[int, nn.Module], Result], options: dict[str, Any]) -> list[bool]:
    results = []
    for make in (TorchDDP, fastddp.DistributedDataParallel):
        torch.manual_seed(0)
        results.append(training(rank, make(MODELS[NAME](), **options)))
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize(
    "options", [SMALL_BUCKETS, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)
@pytest.mark.parametrize("training", [after_local_passes, twice_over_one_forward, between_usual_steps])
def test_a_backward_that_no_forward_has_prepared(
    ranks: RankPool, training: Callable[[int, nn.Module], Result], options: dict[str, Any]
) -> None:
    for same in ranks.run(under_both, 2, training, options):
        assert all(same)


def scheduled(rank: int) -> list[str]:
    model = fastddp.DistributedDataParallel(nn.Linear(40, 40))
    model.register_comm_hook(comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=3), comm_hooks.powerSGD_hook)
    with model.no_sync():
        output = model(torch.ones(2, 40))
    used = []
    for _ in range(4):
        model.reducer.prepare_for_backward([])
        used.append(type(model._exchange).__name__)
        output.sum().backward(retain_graph=True)
    return used


def test_each_window_that_is_prepared_follows_the_schedule_of_the_hook(ranks: RankPool) -> None:
    assert ranks.run(scheduled, 2) == [["AllReduce", "AllReduce", "AllReduce", "PowerSGD"]] * 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(1))
        self.left_out = nn.Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return self.used * 2


def with_missing_gradient(rank: int, method: str) -> None:
    model = fastddp.DistributedDataParallel(Two())
    model().backward()
    getattr(model.reducer, method)(*[[]] * (method == "prepare_for_backward"))


@pytest.mark.parametrize("method", ["prepare_for_backward", "_delay_all_reduce"])
def test_gradients_that_are_missing_are_named(ranks: RankPool, method: str) -> None:
    for error in ranks.errors(with_missing_gradient, 2, method):
        assert "left_out" in error.message


def rebuilt(rank: int) -> list[bool]:
    model = fastddp.DistributedDataParallel(MODELS[NAME](), **SMALL_BUCKETS)
    before_a_window = model.reducer._rebuild_buckets()
    model(inputs(NAME, rank, 0)).sum().backward()
    first = gradients(model)
    found = [before_a_window, model.reducer._rebuild_buckets(), model.reducer._rebuild_buckets()]
    return [*found, model._has_rebuilt_buckets, all(map(torch.equal, first, gradients(model)))]


def test_buckets_are_rebuilt_once_after_the_first_window(ranks: RankPool) -> None:
    assert ranks.run(rebuilt, 2) == [[False, True, False, True, True]] * 2
