"""The oracle itself: what everything else is compared with must be right by closed form, and agree with torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import MODELS, inputs
from ranks import RankPool
from torch import Tensor, nn

from fastddp.reference import ReferenceDataParallel

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


class Weighted(nn.Module):
    """Gradients in closed form: that of each parameter is the number that the forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters_by_dtype = nn.ParameterList([torch.zeros(3, 2, dtype=dtype) for dtype in DTYPES])
        self.strided = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.unused = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, weight: float, use: bool = False) -> Tensor:
        self.seen += 1
        sums = [(parameter * weight).sum().real for parameter in [*self.parameters_by_dtype, self.strided]]
        return sum(sums) + (self.unused.sum() * weight if use else 0)


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


def windows(rank: int) -> list[list[Any]]:
    """Two parameters' gradients after each backward. ``unused`` is used in the first alone, within no_sync."""
    model, steps = ReferenceDataParallel(Weighted()), []
    for syncs, use in [(False, True), (False, False), (True, False), (True, False)]:
        with nullcontext() if syncs else model.no_sync():
            model(float(rank + 1), use=use).backward()
        steps.append([gradients(model)["unused"], gradients(model)["strided"]])
    return steps


def two_backwards_after_one_forward_each(rank: int) -> list[Any]:
    model, steps = ReferenceDataParallel(Weighted()), []
    first, second = model(float(rank)), model(float(rank))
    for loss in (first, second):
        loss.backward()
        steps.append(gradients(model)["strided"])
    return steps


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of backward")


def step_after_a_backward_that_raised(rank: int) -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model = ReferenceDataParallel(module)
    module[1].register_forward_pre_hook(lambda _, args: FailsInBackward.apply(*args))
    with pytest.raises(ArithmeticError):
        model(torch.ones(1)).backward()  # the second layer's gradients came, the first one's did not
    module[1]._forward_pre_hooks.clear()
    model.zero_grad()
    model(torch.full((1,), float(rank))).backward()
    return gradients(model)


def state_after_construction(rank: int) -> dict[str, float]:
    module = Weighted()
    module._ddp_params_and_buffers_to_ignore = ["unused"]
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.fill_(rank + 1)
    ReferenceDataParallel(module)
    return {name: the_number_in(tensor) for name, tensor in module.state_dict().items()}


def buffer_after_each_forward(rank: int, forwards: str, forward_sync_buffers: bool) -> list[float]:
    """Forwards are letters: s synchronises, n is within no_sync, e under no_grad. Rank 1's buffer runs ahead by 10."""
    module = Weighted()
    model, seen = ReferenceDataParallel(module, forward_sync_buffers=forward_sync_buffers), []
    for forward in forwards:
        module.seen += 10 * rank
        with model.no_sync() if forward == "n" else nullcontext(), torch.set_grad_enabled(forward != "e"):
            model(1.0)
        seen.append(module.seen.item())
    return seen


def train(wrap: Callable[..., nn.Module], name: str, rank: int) -> list[Tensor]:
    """Six steps, two of them within no_sync: all gradients on the way, and in the end all parameters and buffers."""
    torch.manual_seed(rank)
    model = wrap(MODELS[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(6):
        syncs = step not in (1, 2)
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_gradient_is_the_mean_over_ranks_in_every_dtype(ranks: RankPool, world_size: int) -> None:
    mean = sum(2.0**rank for rank in range(world_size)) / world_size
    for found in ranks.run(one_step, world_size):
        assert (found.pop("unused"), found.pop("frozen")) == (None, None)
        assert len(found) == len(DTYPES) + 1
        assert found == pytest.approx(dict.fromkeys(found, mean), rel=0.01)  # a third is no number of bf16


def test_a_window_ends_with_the_mean_of_all_that_it_accumulated(ranks: RankPool) -> None:
    # [unused, strided]: local 1 or 2 a step, three steps; then the mean once more on top of 4.5
    assert ranks.run(windows, 2) == [
        [[1, 1], [1, 2], [1.5, 4.5], [1.5, 6.0]],
        [[2, 2], [2, 4], [1.5, 4.5], [1.5, 6.0]],
    ]


def test_two_forwards_ask_for_one_synchronisation(ranks: RankPool) -> None:
    assert ranks.run(two_backwards_after_one_forward_each, 2) == [[0.5, 0.5], [0.5, 1.5]]


def test_after_a_backward_that_raised_the_next_one_averages(ranks: RankPool) -> None:
    first, second = ranks.run(step_after_a_backward_that_raised, 2)
    assert first == second and None not in first.values()


def test_construction_copies_rank_0_except_what_is_ignored(ranks: RankPool) -> None:
    state = ranks.run(state_after_construction, 2)[1]
    assert state.pop("unused") == 2
    assert len(state) == 8 and set(state.values()) == {1}


@pytest.mark.parametrize(
    ("forwards", "expected"),
    [
        ("sss", [[1, 2, 3], [1, 2, 3]]),
        ("sns", [[1, 2, 3], [1, 2, 13]]),  # the forward after one within no_sync broadcasts nothing
        ("nss", [[1, 2, 3], [1, 12, 3]]),
        ("ess", [[1, 2, 3], [1, 12, 3]]),
    ],
)
def test_a_forward_takes_rank_0s_buffers_if_the_one_before_it_synchronised(
    ranks: RankPool, forwards: str, expected: list[list[float]]
) -> None:
    assert ranks.run(buffer_after_each_forward, 2, forwards, True) == expected


def test_without_forward_sync_buffers_each_rank_keeps_its_own(ranks: RankPool) -> None:
    assert ranks.run(buffer_after_each_forward, 2, "sss", False) == [[1, 2, 3], [11, 22, 33]]


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bitwise_that_of_torchs_ddp(ranks: RankPool, name: str) -> None:
    for equal in ranks.run(train_twice, 2, name):
        assert all(equal) and len(equal) > 10
