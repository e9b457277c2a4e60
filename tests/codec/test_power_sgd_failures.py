"""What PowerSGD remembers of a window that failed: nothing, whatever its gradients were, or have become since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import PowerSGDState
from ranks import RankPool

HOOKS = pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])


class FailsBehind(torch.autograd.Function):
    """Calls ``then`` in backward, which may raise."""

    @staticmethod
    def forward(context: Any, value: Tensor, then: Callable[[], None]) -> Tensor:
        context.then = then
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.then()
        return gradient, None


class Pair(nn.Module):
    """Two matrices; the second one's gradient is the input, and comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(12, 9)) for _ in range(2))

    def forward(self, gradient: Tensor, then: Callable[[], None] = lambda: None) -> Tensor:
        behind = FailsBehind.apply(self.first.sum(), then)
        return behind + (self.second * gradient).sum()


def errors_around_a_failure(rank: int, hook: str, what: str) -> tuple[Tensor, Tensor, bool]:
    """The second matrix's error before and after a window that failed on all ranks; whether the next step is finite."""
    model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0)
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, getattr(comm_hooks, hook))
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(12, 9, generator=generator) for _ in range(6)]
    for gradient in gradients[:4]:
        model.zero_grad()
        model(gradient).backward()
    before = state.errors["second"].reshape(12, 9).clone()

    def fail() -> None:
        if what == "is zeroed":
            model.module.second.grad.zero_()
        raise ValueError("on purpose")

    model.zero_grad()
    failing = gradients[4].clone()
    if what == "is not finite":
        failing[3, 4] = float("nan")
        failing[5, 6] = float("-inf")
    with pytest.raises(ValueError, match="on purpose"):
        model(failing, fail).backward()
    with torch.no_grad():
        model(failing)  # repairs
    after = state.errors["second"].reshape(12, 9).clone()
    model.zero_grad()
    model(gradients[5]).backward()
    finite = [p.grad.isfinite().all() for p in model.parameters()] + [e.isfinite().all() for e in state.errors.values()]
    return before, after, all(finite)


@HOOKS
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_is_given_back(ranks: RankPool, hook: str, world_size: int) -> None:
    for before, after, finite in ranks.run(errors_around_a_failure, world_size, hook, "stays"):
        assert before.abs().max() > 0.1
        assert torch.allclose(after, before, atol=1e-5)
        assert finite


@HOOKS
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_not_finite_is_forgotten(ranks: RankPool, hook: str, world_size: int) -> None:
    for before, after, finite in ranks.run(errors_around_a_failure, world_size, hook, "is not finite"):
        before[3, 4] = before[5, 6] = 0.0
        assert torch.allclose(after, before, atol=1e-5)
        assert finite


@HOOKS
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_has_changed_takes_its_error_along(ranks: RankPool, hook: str, world_size: int) -> None:
    """What was added to the error cannot be known any more; half of it would be taken for an error."""
    for before, after, finite in ranks.run(errors_around_a_failure, world_size, hook, "is zeroed"):
        assert before.abs().max() > 0.1
        assert torch.equal(after, torch.zeros(12, 9))
        assert finite
