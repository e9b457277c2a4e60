"""The oracle itself: what everything else is compared with must be right by closed form, and agree with torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastddp.reference import ReferenceDataParallel
from models import MODELS, inputs
from on_ranks import on_ranks
from ranks import RankPool

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


class Weighted(nn.Module):
    """Gradients in closed form: that of each parameter is the number that the forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters_by_dtype = nn.ParameterList([torch.zeros(3, 2, dtype=dtype) for dtype in DTYPES])
        self.strided = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.extra = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, weight: float, extra: bool = True) -> Tensor:
        used = [*self.parameters_by_dtype, self.strided, *([self.extra] if extra else [])]
        return sum((parameter * weight).sum().real for parameter in used)  # type: ignore[return-value]


def the_number_in(tensor: Tensor | None) -> Any:
    """The one number that all elements are, up to bf16's rounding; all of them if they are not equal."""
    if tensor is None:
        return None
    values = tensor.detach().flatten().tolist()
    return values[0] if values == pytest.approx(values[:1] * len(values), rel=0.01) else values


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: the_number_in(parameter.grad) for name, parameter in model.module.named_parameters()}


def one_step(rank: int) -> dict[str, Any]:
    model = ReferenceDataParallel(Weighted())
    model(float(2**rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_gradient_is_the_mean_over_ranks_in_every_dtype(ranks: RankPool, world_size: int) -> None:
    mean = sum(2.0**rank for rank in range(world_size)) / world_size
    for found in ranks.run(one_step, world_size):
        assert found.pop("frozen") is None
        assert len(found) == len(DTYPES) + 2
        assert found == pytest.approx(dict.fromkeys(found, mean), rel=0.01)  # a third is no number of bf16


# What each backward does, and [strided, extra] after it on rank 0, where a backward adds 1, and on rank 1, where 2.
WINDOWS: dict[str, tuple[list[set[str]], list[Any], list[Any]]] = {
    "accumulate, then average all of it": (
        [{"no_sync", "extra"}, {"no_sync", "extra"}, {"extra"}],
        [[1, 1], [2, 2], [4.5, 4.5]],
        [[2, 2], [4, 4], [4.5, 4.5]],
    ),
    "a mean that is not set to zero takes part in the next": (
        [{"extra"}, {"extra"}],
        [[1.5, 1.5], [3, 3]],
        [[1.5, 1.5], [3, 3]],
    ),
    "a gradient that came under no_sync alone": (
        [{"no_sync", "extra"}, set()],
        [[1, 1], [3, 1.5]],
        [[2, 2], [3, 1.5]],
    ),
    "a backward that leaves a parameter out is followed by one that does not": (
        [set(), {"extra"}],
        [[1, None], [3, 1.5]],
        [[2, None], [3, 1.5]],
    ),
    "the next window waits for every parameter too": (
        [{"extra"}, set(), {"extra"}],
        [[1.5, 1.5], [2.5, 1.5], [4.5, 3]],
        [[1.5, 1.5], [3.5, 1.5], [4.5, 3]],
    ),
}


@pytest.mark.parametrize("window", WINDOWS)
@on_ranks(2)
def test_a_window_ends_with_the_mean_of_what_it_accumulated(rank: int, window: str) -> None:
    """Each backward adds ``rank + 1`` to the parameters that it uses."""
    steps, *expected = WINDOWS[window]
    model = ReferenceDataParallel(Weighted())
    for step, (strided, extra) in zip(steps, expected[rank], strict=True):
        with model.no_sync() if "no_sync" in step else nullcontext():
            model(float(rank + 1), extra="extra" in step).backward()
        found = gradients(model)
        assert (found["strided"], found["extra"]) == (strided, extra)


@on_ranks(2)
def test_two_forwards_ask_for_one_synchronisation(rank: int) -> None:
    model = ReferenceDataParallel(Weighted())
    for loss, expected in zip([model(float(rank)), model(float(rank))], [0.5, 0.5 + rank], strict=True):
        loss.backward()
        assert gradients(model)["strided"] == expected


def train(wrap: Callable[..., nn.Module], name: str, rank: int) -> list[Tensor]:
    """Six steps, two within no_sync, one behind an evaluation: all gradients, and what is there in the end."""
    torch.manual_seed(rank)
    model = wrap(MODELS[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(6):
        syncs = step not in (1, 2)
        if step == 4:
            with torch.no_grad():
                model(inputs(name, rank, 10))
        with nullcontext() if syncs else model.no_sync():
            model(inputs(name, rank, step)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if syncs:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found + [tensor.detach().clone() for tensor in model.state_dict().values()]


def train_twice(rank: int, name: str) -> list[bool]:
    reference = train(ReferenceDataParallel, name, rank)
    torchs = train(nn.parallel.DistributedDataParallel, name, rank)
    return [torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(reference, torchs, strict=True)]


@on_ranks(2)
def test_construction_leaves_alone_what_is_ignored(rank: int) -> None:
    module = nn.Linear(1, 1)
    module._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    nn.init.constant_(module.weight, rank)
    nn.init.constant_(module.bias, rank)
    ReferenceDataParallel(module)
    assert (module.weight.item(), module.bias.item()) == (0, rank)


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bitwise_that_of_torchs_ddp(ranks: RankPool, name: str) -> None:
    for equal in ranks.run(train_twice, 2, name):
        assert all(equal)
        assert len(equal) > 10
