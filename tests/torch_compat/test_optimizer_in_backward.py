"""Optimizers that step inside backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from ranks import RankPool


def module() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def attached(wrap: Any, rank: int, steps: int) -> tuple[list[Tensor], bool]:
    inner = module()
    _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1, "momentum": 0.9})
    model = wrap(inner)
    for step in range(steps):
        model(inputs(rank, step)).square().sum().backward()
    return [p.detach().clone() for p in inner.parameters()], all(p.grad is None for p in inner.parameters())


def stepped_after_backward(rank: int, steps: int) -> list[Tensor]:
    model = fastddp.DistributedDataParallel(module())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(rank, step)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def compare_attached(rank: int, options: dict[str, Any]) -> tuple[bool, bool]:
    # Torch's DDP needs an accelerator for it.
    early, are_none = attached(lambda inner: fastddp.DistributedDataParallel(inner, **options), rank, 3)
    late = stepped_after_backward(rank, 3)
    return all(torch.equal(a, b) for a, b in zip(early, late, strict=True)), are_none


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}], ids=str)
def test_attached_optimizers_do_what_a_step_after_backward_does(ranks: RankPool, options: dict[str, Any]) -> None:
    assert ranks.run(compare_attached, 2, options) == [(True, True)] * 2


class Choice(nn.Module):
    """Layers of which a forward uses those it is told to, behind a table of words with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(5, 3, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, words: Tensor, used: list[int]) -> Tensor:
        return sum(self.layers[i](self.words(words)).square().sum() for i in used)  # type: ignore[return-value]


def compare_choices(rank: int) -> bool:
    """Each rank uses layers of its own, other ones in each step."""
    early, late = Choice(), Choice()
    _apply_optimizer_in_backward(torch.optim.SGD, early.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
    models = [fastddp.DistributedDataParallel(inner, find_unused_parameters=True) for inner in (early, late)]
    for step in range(6):
        optimizer.zero_grad()
        used = [[0, 1], [1, 2], [0], [2, 0, 1]][(step + rank) % 4]
        for model in models:
            model(torch.tensor([rank, step % 5]), used).backward()
        optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(early.parameters(), late.parameters(), strict=True))


def test_so_they_do_for_sparse_gradients_and_where_ranks_use_other_parameters(ranks: RankPool) -> None:
    assert ranks.run(compare_choices, 2) == [True, True]


def left_alone(rank: int) -> bool:
    """Gradients of this rank's own, of what the window does not use."""
    inner = Choice()
    _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    model = fastddp.DistributedDataParallel(inner, find_unused_parameters=True)
    others = [parameter for layer in inner.layers[1:] for parameter in layer.parameters()]
    before = [parameter.detach().clone() for parameter in others]
    for parameter in others:
        parameter.grad = torch.full_like(parameter, rank)
    model(torch.tensor([rank, 1]), [0]).backward()
    kept = all(torch.equal(parameter.grad, torch.full_like(parameter, rank)) for parameter in others)
    return kept and all(torch.equal(now, then) for now, then in zip(others, before, strict=True))


def test_what_no_rank_used_is_not_stepped(ranks: RankPool) -> None:
    assert ranks.run(left_alone, 2) == [True, True]


def stepped_early(rank: int) -> int:
    """How many parameters have been stepped when the last gradient comes; of several steps, the most."""
    inner = module()
    _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    model = fastddp.DistributedDataParallel(inner, bucket_cap_mb=0)
    model(inputs(rank, 0)).square().sum().backward()  # buckets are rebuilt after the first step
    before: list[Tensor] = []
    most = 0

    def look(gradient: Tensor) -> None:
        nonlocal most
        most = max(most, sum(not torch.equal(a, b) for a, b in zip(before, inner.parameters(), strict=True)))

    inner[0].weight.register_hook(look)
    for step in range(100):  # on a busy machine collectives may end late
        before = [p.detach().clone() for p in inner.parameters()]
        model(inputs(rank, step)).square().sum().backward()
        if most > 0:
            break
    return most


def test_they_step_while_backward_runs(ranks: RankPool) -> None:
    assert ranks.run(stepped_early, 1)[0] > 0


def stepped_by_a_hook_of_the_users(rank: int) -> None:
    """Which uses this rank's own gradient, and leaves none to average."""
    inner = module()
    for parameter in inner.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    model = fastddp.DistributedDataParallel(inner)
    model(inputs(rank, 0)).square().sum().backward()


def test_a_hook_that_takes_gradients_away_is_an_error_that_names_the_parameter(ranks: RankPool) -> None:
    for error in ranks.errors(stepped_by_a_hook_of_the_users, 2):
        assert "parameter 4.bias (number 5, bucket 0) got a gradient that is not in parameter.grad" in error.message
        assert "_apply_optimizer_in_backward" in error.message


def fused(wrap: Any, rank: int, some: bool) -> list[Tensor]:
    inner = module()
    model = wrap(inner)
    chosen = list(inner.parameters())[:2] if some else None
    model._register_fused_optim(torch.optim.Adam, 1e-2, optim_params=chosen)
    for step in range(3):
        model(inputs(rank, step)).square().sum().backward()
    return [p.detach().clone() for p in inner.parameters()]


def compare_fused(rank: int, some: bool) -> tuple[bool, bool]:
    ours = fused(fastddp.DistributedDataParallel, rank, some)
    theirs = fused(TorchDDP, rank, some)
    changed = not torch.equal(ours[0], module()[0].weight)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), changed


@pytest.mark.parametrize("some", [False, True], ids=["all parameters", "some parameters"])
def test_fused_optimizers_do_what_they_do_under_torchs_ddp(ranks: RankPool, some: bool) -> None:
    assert ranks.run(compare_fused, 2, some) == [(True, True)] * 2


class Nameless(torch.optim.SGD):
    """An optimizer that torch has no functional form of."""


def fused_unknown(rank: int) -> None:
    fastddp.DistributedDataParallel(module())._register_fused_optim(Nameless, lr=0.1)


def test_a_fused_optimizer_without_a_functional_form_is_an_error(ranks: RankPool) -> None:
    (error,) = ranks.errors(fused_unknown, 1)
    assert "Nameless" in error.message
