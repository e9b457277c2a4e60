"""What a rank's gradients count: their mean, their sum, or a weight of each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import comm_hooks
from hooks_by_name import averages
from on_ranks import on_ranks


def backward(model: fastddp.DistributedDataParallel, rank: int, step: int = 1) -> float:
    """The gradient after it; rank r's own is r + 1, times the step's number."""
    model(torch.full((1, 1), (rank + 1.0) * step)).sum().backward()
    return next(model.module.parameters()).grad.item()


def wrapped(average: Any, module: nn.Module | None = None, **options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(module or nn.Linear(1, 1, bias=False), gradient_average=average, **options)


def of_steps(model: fastddp.DistributedDataParallel, rank: int, steps: int) -> list[float]:
    seen = []
    for step in range(1, steps + 1):
        model.zero_grad()
        seen.append(backward(model, rank, step))
    return seen


@pytest.mark.parametrize("wire", [None, "fp16"])
@pytest.mark.parametrize(
    ("average", "expected"), [("mean", [1.5, 3.5]), ("sum", [3.0, 7.0]), ("weight", [7 / 4, 43 / 12])]
)
@on_ranks(4)
def test_what_gradients_count_follows_from_the_ranks_that_exchange_them(
    rank: int, average: str, expected: list[float], wire: str | None
) -> None:
    """Two at a time. A weight is as many tokens as a batch may have."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrapped((lambda: 100_000 * (2.0 * rank + 1)) if average == "weight" else average)
    hook = comm_hooks.allreduce_hook if wire is None else getattr(comm_hooks, f"{wire}_compress_hook")
    model.register_comm_hook(pairs[rank // 2], hook)
    mean = expected[rank // 2]
    assert of_steps(model, rank, 3) == pytest.approx([mean, 2 * mean, 3 * mean], rel=2e-3 if wire else 1e-6)


@on_ranks(2)
def test_what_stays_after_the_window_of_a_sum_counts_in_the_next(rank: int) -> None:
    """Two more backwards over its forward, which stay on this rank."""
    model = wrapped("sum")
    for expected in (3.0, 3.0 + 2 * 3.0 + 3.0):
        loss = model(torch.full((1, 1), rank + 1.0)).sum()
        loss.backward(retain_graph=True)
        assert model.module.weight.grad.item() == expected
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
@on_ranks(2)
def test_weights_without_a_sum_to_divide_by_are_an_error_on_every_rank(rank: int, weight: float) -> None:
    model = wrapped(lambda: weight if rank == 0 else 0.0)
    with pytest.raises(ValueError, match=f"add up to {weight} over all ranks"):
        model(torch.ones(1, 1))


@pytest.mark.parametrize("broken", [None, "x", torch.ones(2), LookupError("no tokens")], ids=str)
@on_ranks(2)
def test_a_weight_that_one_rank_cannot_read_is_an_error_on_every_rank(rank: int, broken: Any) -> None:
    weights: list[Any] = [1.0, broken if rank == 1 else 1.0, 1.0]

    def weight() -> Any:
        if isinstance(weights[0], Exception):
            raise weights.pop(0)
        return weights.pop(0)

    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("buffer", torch.ones(1))  # which ranks exchange after their weights
    model = wrapped(weight, module)
    backward(model, rank)
    with pytest.raises((ValueError, TypeError, LookupError)) as raised:
        model(torch.ones(1, 1))
    of_rank_1 = "no tokens" if isinstance(broken, Exception) else f"returned {broken!r}, which is no number"
    assert (of_rank_1 if rank == 1 else "Where a rank cannot read its weight, it sends nan") in str(raised.value)
    assert of_steps(model, rank, 1) == [1.5]  # the next step is right


@on_ranks(2)
def test_other_choices_and_what_has_no_sum_or_scales_itself_are_refused_and_leave_no_trace(rank: int) -> None:
    for average in ("median", torch.ones(2), 3):
        with pytest.raises((ValueError, TypeError), match=r"gradient_average.* one element"):
            wrapped(average)
    model = wrapped("sum")
    with pytest.raises(ValueError, match="PowerSGD keeps what its average has lost"):
        model.register_comm_hook(comm_hooks.PowerSGDState(None, start_powerSGD_iter=2), comm_hooks.powerSGD_hook)
    with pytest.raises(ValueError, match="scale in the hook"):
        model.register_comm_hook(None, averages)
    assert backward(model, rank) == 3.0
