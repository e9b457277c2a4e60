"""A step that no optimizer takes leaves no trace: in what compression remembers, nor in the next step's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState, PowerSGDState
from ranks import RankPool


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
        self.first, self.second = (nn.Parameter(torch.ones(12, 9)) for _ in range(2))

    def forward(self, gradient: Tensor, then: Callable[[], None] = lambda: None) -> Tensor:
        behind = FailsBehind.apply((self.first * gradient.flip(0)).sum(), then)
        return behind + (self.second * gradient).sum()


class Training:
    """A model under a hook, and an optimizer that has stepped four times."""

    def __init__(self, rank: int, hook: str, fused: bool = False) -> None:
        mesh = init_device_mesh("cpu", (2, 2)) if "two levels" in hook else None
        self.rank = rank
        self.model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0, hierarchy=mesh)
        self.state: Any = BlockState(block_size=128, fp8="e5m2")
        if "power" in hook:
            self.state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
        self.model.register_comm_hook(self.state, getattr(comm_hooks, hook.split(",")[0]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
        self._generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            self.backward(self.gradient())
            self.optimizer.step()

    def gradient(self) -> Tensor:
        return torch.randn(12, 9, generator=self._generator)

    def backward(self, gradient: Tensor, then: Callable[[], None] = lambda: None, scale: float = 1.0) -> None:
        self.model.zero_grad()
        (self.model(gradient, then) * scale).backward()

    def remembered(self) -> list[Tensor]:
        kept = list(self.state.errors.values()) + list(getattr(self.state, "qs", {}).values())
        return [tensor.clone() for tensor in kept]


@contextmanager
def one_rank_raises(training: Training, spoil: Callable[[Tensor], object] = lambda gradient: None) -> Iterator[Any]:
    """Behind the second matrix's gradient, which that rank has changed by then."""

    def fail() -> None:
        spoil(training.model.module.second.grad)
        raise ValueError("on purpose")

    fails = training.rank == 1
    error, words = (ValueError, "on purpose") if fails else (RuntimeError, "failed on rank 1")
    with pytest.raises(error, match=words):
        yield fail if fails else lambda: None
    with torch.no_grad():
        training.model(torch.zeros(12, 9))  # repairs


def raises(training: Training) -> None:
    with one_rank_raises(training) as then:
        training.backward(1e6 * torch.ones(12, 9), then)


def raises_behind_a_change(training: Training) -> None:
    """That no version counter shows."""
    with one_rank_raises(training, lambda gradient: gradient.data.zero_().numpy().fill(0)) as then:
        training.backward(1e6 * torch.ones(12, 9), then)


def raises_behind_what_is_not_finite(training: Training) -> None:
    with one_rank_raises(training) as then:
        training.backward(torch.full((12, 9), torch.nan), then)


def is_too_large(training: Training) -> None:
    """One loss in a million times."""
    training.backward(torch.randn(12, 9) * (1e8 if training.rank == 0 else 1.0))
    training.model.discard_step()


def is_too_large_in_the_first_of_three_backwards(training: Training) -> None:
    training.backward(torch.randn(12, 9) * 1e8)
    for _ in range(2):
        training.model(torch.ones(12, 9)).backward()
    training.model.discard_step()


def has_an_infinity(training: Training) -> None:
    """In one matrix; the other is only large."""
    gradient = torch.full((12, 9), 1e8)
    if training.rank == 0:
        gradient[3, 4] = torch.inf
    training.backward(gradient)
    assert training.model.found_inf() == 1.0


def cannot_be_clipped(training: Training) -> None:
    training.backward(torch.full((12, 9), 1e8) * torch.tensor([1.0] * 8 + [torch.inf]))
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        fastddp.clip_grad_norm_(training.model, 1.0, error_if_nonfinite=True)


def is_skipped_by_a_scaler(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameters = [parameter.clone() for parameter in training.model.parameters()]
    gradient = torch.full((12, 9), 1e8)
    gradient[3, 4] = torch.inf
    training.backward(gradient, scale=scaler.scale(torch.ones(())).item())
    scaler.step(training.optimizer)
    scaler.update()
    assert all(map(torch.equal, training.model.parameters(), parameters))


FAILED = [raises, raises_behind_a_change, raises_behind_what_is_not_finite]
SKIPPED = [
    is_too_large,
    is_too_large_in_the_first_of_three_backwards,
    has_an_infinity,
    cannot_be_clipped,
    is_skipped_by_a_scaler,
]
HOOKS = ["int8_compress_hook", "fp8_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"]


def traces(rank: int, hook: str, void: Callable[[Training], None], fused: bool) -> list[str]:
    """What differs from a training without that step."""
    without, trained = Training(rank, hook, fused), Training(rank, hook, fused)
    before = trained.remembered()
    void(trained)
    assert all(map(torch.equal, trained.remembered(), before)), "at once"
    for training in (without, trained):
        training.backward(training.gradient())
    found = [] if any(bool(error.abs().max() > 1e-4) for error in before) else ["nothing is remembered"]
    found += ["what is remembered"] * (not all(map(torch.equal, trained.remembered(), without.remembered())))
    gradients = ([p.grad for p in training.model.parameters()] for training in (without, trained))
    return found + ["gradients"] * (not all(map(torch.equal, *gradients)))


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("void", [*FAILED, *SKIPPED], ids=lambda void: void.__name__)
def test_a_step_that_is_not_taken_leaves_no_trace(ranks: RankPool, hook: str, void: Callable[..., None]) -> None:
    assert ranks.run(traces, 2, hook, void, False) == [[], []]


def first_step_is_void(rank: int, hook: str) -> list[Tensor]:
    """What is remembered behind two windows of a step, over which buckets are rebuilt, and that nobody takes."""
    module = Pair()
    module.first = module._parameters.pop("first")  # type: ignore[assignment]  # the last, whose gradient comes last too
    model = fastddp.DistributedDataParallel(module)
    state = BlockState()
    model.register_comm_hook(state, getattr(comm_hooks, hook))
    plan = model.bucket_plan()
    for scale in (1e8, 1.0):
        model(scale * torch.randn(12, 9)).backward()
    assert model.bucket_plan() != plan
    model.discard_step()
    return [*state.errors.values()]


@pytest.mark.parametrize("hook", HOOKS[:2])
def test_nor_does_the_first_step_over_which_buckets_are_rebuilt(ranks: RankPool, hook: str) -> None:
    for errors in ranks.run(first_step_is_void, 2, hook):
        assert len(errors) == 2
        assert not any(bool(error.any()) for error in errors)


def test_an_optimizer_that_skips_by_itself_leaves_no_trace(ranks: RankPool) -> None:
    assert ranks.run(traces, 2, "int8_compress_hook", is_skipped_by_a_scaler, True) == [[], []]


@pytest.mark.parametrize("hook", ["int8_compress_hook, two levels", "powerSGD_hook, two levels"])
@pytest.mark.parametrize("void", [raises_behind_a_change, is_too_large], ids=lambda void: void.__name__)
def test_nor_does_it_in_two_levels(ranks: RankPool, hook: str, void: Callable[..., None]) -> None:
    assert ranks.run(traces, 4, hook, void, False) == [[]] * 4
