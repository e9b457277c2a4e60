"""Optimizers that step inside backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fastddp
from on_ranks import Wrap, on_ranks, same_under_both
from parts import Parts, wrapped


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def behind_words() -> Any:
    """Four parts, behind a table of words with sparse gradients."""
    torch.manual_seed(4)
    module = Parts("abcd")
    module.words = nn.Embedding(5, 3, sparse=True)
    module.register_forward_pre_hook(lambda module, args: (module.words(args[0]), *args[1:]))
    return module


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": None, "gradient_as_bucket_view": True}], ids=str)
@on_ranks(2)
def test_they_do_what_a_step_behind_backward_does(rank: int, options: dict[str, Any]) -> None:
    """Ranks use other parts in each step, and none the last one, whose gradient, of the rank's own, is left alone."""
    early, late = behind_words(), behind_words()  # torch's DDP needs an accelerator for it
    _apply_optimizer_in_backward(torch.optim.SGD, early.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD([late.words.weight, late.a, late.b, late.c], lr=0.1)
    models = [wrapped(inner, find_unused_parameters=True, **options) for inner in (early, late)]
    early.d.grad = torch.full((3,), float(rank))
    for step in range(6):
        optimizer.zero_grad()
        for model in models:
            model(torch.tensor([rank, step % 5]), ["ab", "bc", "a", "cab"][(step + rank) % 4]).backward()
        optimizer.step()
    assert all(map(torch.equal, early.parameters(), late.parameters()))
    assert [name for name, own in early.named_parameters() if own.grad is not None] == ["d"]
    assert (early.d.grad == rank).all()


@on_ranks(1)
def test_they_step_while_backward_runs(rank: int) -> None:
    inner = layers()
    _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    model = fastddp.DistributedDataParallel(inner, bucket_cap_mb=0)
    model(inputs(rank, 0)).square().sum().backward()  # buckets are rebuilt after the first step
    before: list[Tensor] = []
    stepped: list[bool] = []  # when the last gradient comes, whether parameters have been
    inner[0].weight.register_hook(lambda _: stepped.append(not all(map(torch.equal, before, inner.parameters()))))
    for step in range(100):  # on a busy machine collectives may end late
        before[:] = [parameter.detach().clone() for parameter in inner.parameters()]
        model(inputs(rank, step)).square().sum().backward()
        if any(stepped):
            return
    raise AssertionError


@pytest.mark.parametrize("some", [False, True], ids=["all parameters", "some parameters"])
@same_under_both()
def test_fused_optimizers_do_what_they_do_under_torchs_ddp(wrap: Wrap, rank: int, some: bool) -> Any:
    inner = layers()
    before = inner[0].weight.detach().clone()
    model = wrap(inner)
    model._register_fused_optim(torch.optim.Adam, 1e-2, optim_params=list(inner.parameters())[:2] if some else None)
    for step in range(3):
        model(inputs(rank, step)).square().sum().backward()
    assert not torch.equal(inner[0].weight, before)
    return list(inner.parameters())
