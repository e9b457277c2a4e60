"""Optimizers that step inside backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fastddp
from on_ranks import Wrap, on_ranks, same_under_both


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


class Choice(nn.Module):
    """Layers of which a forward uses those it is told to, behind a table of words with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(5, 3, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, words: Tensor, used: list[int]) -> Tensor:
        return sum(self.layers[i](self.words(words)).square().sum() for i in used)  # type: ignore[return-value]


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}], ids=str)
@on_ranks(2)
def test_they_do_what_a_step_after_backward_does_and_leave_alone_what_no_rank_used(
    rank: int, options: dict[str, Any]
) -> None:
    """Ranks use other layers in each step, and none the last one, which has a gradient of the rank's own."""
    early, late = Choice(), Choice()  # torch's DDP needs an accelerator for it
    _apply_optimizer_in_backward(torch.optim.SGD, early.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD([*late.words.parameters(), *late.layers[:3].parameters()], lr=0.1)
    models = [fastddp.DistributedDataParallel(inner, find_unused_parameters=True, **options) for inner in (early, late)]
    early.layers[3].weight.grad = torch.full((3, 3), float(rank))
    for step in range(6):
        optimizer.zero_grad()
        used = [[0, 1], [1, 2], [0], [2, 0, 1]][(step + rank) % 4]
        for model in models:
            model(torch.tensor([rank, step % 5]), used).backward()
        optimizer.step()
    assert all(map(torch.equal, early.parameters(), late.parameters()))
    assert [name for name, own in early.named_parameters() if own.grad is not None] == ["layers.3.weight"]
    assert (early.layers[3].weight.grad == rank).all()


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


@on_ranks(2)
def test_a_users_hook_that_takes_gradients_away_is_an_error_that_names_the_parameter(rank: int) -> None:
    """It used this rank's own gradient, and leaves none to average."""
    inner = layers()
    for parameter in inner.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    model = fastddp.DistributedDataParallel(inner)
    with pytest.raises(RuntimeError) as raised:
        model(inputs(rank, 0)).square().sum().backward()
    assert "parameter 4.bias (number 5, bucket 0) got a gradient that is not in parameter.grad" in str(raised.value)
    assert "_apply_optimizer_in_backward" in str(raised.value)


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


@on_ranks(1)
def test_a_fused_optimizer_without_a_functional_form_is_an_error(rank: int) -> None:
    class Nameless(torch.optim.SGD):
        pass

    with pytest.raises(Exception, match="Nameless"):
        fastddp.DistributedDataParallel(layers())._register_fused_optim(Nameless, lr=0.1)
