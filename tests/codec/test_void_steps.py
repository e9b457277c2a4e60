"""A step that no optimizer takes leaves no trace: in what compression remembers, nor in the next step's gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState, PowerSGDState
from fastddp.sharding.notice import ShardedGradient
from on_ranks import on_ranks
from ranks import RankPool


class Pair(nn.Module):
    """Two matrices; the second one's gradient is the input, and comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(12, 9)) for _ in range(2))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.first * gradient.flip(0)).sum() + (self.second * gradient).sum()


class Training:
    """A model under a hook, and an optimizer that has stepped four times."""

    def __init__(self, rank: int, hook: str) -> None:
        mesh = init_device_mesh("cpu", (2, 2)) if "two levels" in hook else None
        self.rank = rank
        self.zeroes = True
        self.model = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0, hierarchy=mesh)
        self.state: Any = BlockState(block_size=128, fp8="e5m2")
        if "power" in hook:
            self.state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
        self.model.register_comm_hook(self.state, getattr(comm_hooks, hook.split(",")[0]))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if "sharded" in hook:
            self.optimizer = fastddp.ShardedOptimizer(self.model, torch.optim.SGD, lr=0.1)
        self._generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            self.backward(torch.randn(12, 9, generator=self._generator))
            self.optimizer.step()

    def backward(self, gradient: Tensor, scale: float = 1.0) -> None:
        if self.zeroes:
            self.model.zero_grad()
        (self.model(gradient) * scale).backward()

    def next_gradients(self) -> list[Any]:
        self.backward(torch.randn(12, 9, generator=self._generator))
        if isinstance(self.optimizer, fastddp.ShardedOptimizer):
            return self.optimizer.parts.gradients()
        return [parameter.grad for parameter in self.model.parameters()]

    def remembered(self) -> list[Tensor]:
        kept = list(self.state.errors.values()) + list(getattr(self.state, "qs", {}).values())
        return [tensor.clone() for tensor in kept]


def raises(training: Training, gradient: Tensor, by: Sequence[int] = (1,), spoil: Any = lambda _: None) -> None:
    """After the second matrix's gradient, which these ranks have changed by then."""

    def fail(_: Tensor) -> None:
        spoil(training.model.module.second.grad)
        raise ValueError("on purpose")

    fails = training.rank in by
    handle = training.model.module.first.register_hook(fail) if fails else None
    with pytest.raises(ValueError if fails else RuntimeError, match="on purpose" if fails else "failed on rank 1"):
        training.backward(gradient)
    if handle is not None:
        handle.remove()


def raises_after_a_change(training: Training) -> None:
    """That no version counter shows. Where a rank has a part of the gradient, the average may have come by then."""

    def spoil(gradient: Tensor) -> None:
        if not isinstance(gradient, ShardedGradient):
            gradient.data.zero_().numpy().fill(0)

    raises(training, 1e6 * torch.ones(12, 9), spoil=spoil)
    repair(training)


def raises_after_what_is_not_finite(training: Training) -> None:
    raises(training, torch.full((12, 9), torch.nan))
    repair(training)


def repair(training: Training) -> None:
    with torch.no_grad():
        training.model(torch.zeros(12, 9))


def is_discarded_with_two_more_backwards(training: Training) -> None:
    """One loss on one rank is a million times too large."""
    training.backward(torch.randn(12, 9) * (1e8 if training.rank == 0 else 1.0))
    for _ in range(2):
        training.model(torch.ones(12, 9)).backward()
    training.model.discard_step()


def with_an_infinity() -> Tensor:
    """In one matrix row; the rest is only large."""
    gradient = torch.full((12, 9), 1e8)
    gradient[3, 4] = torch.inf
    return gradient


def has_an_infinity(training: Training) -> None:
    training.backward(with_an_infinity() if training.rank == 0 else torch.full((12, 9), 1e8))
    assert training.model.found_inf() == 1.0


def cannot_be_clipped(training: Training) -> None:
    training.backward(with_an_infinity())
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        fastddp.clip_grad_norm_(training.model, 1.0, error_if_nonfinite=True)


def is_skipped_by_a_scaler(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameters = [parameter.clone() for parameter in training.model.parameters()]
    training.backward(with_an_infinity(), scale=scaler.scale(torch.ones(())).item())
    scaler.step(training.optimizer)
    scaler.update()
    assert all(map(torch.equal, training.model.parameters(), parameters))


def is_skipped_by_the_optimizer_itself(training: Training) -> None:
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=True)
    is_skipped_by_a_scaler(training)


ZEROING: dict[str, Callable[[nn.Parameter], object]] = {
    "none": lambda parameter: setattr(parameter, "grad", None),
    "zero_": lambda parameter: parameter.grad.zero_(),
    "zeros_like": lambda parameter: setattr(parameter, "grad", torch.zeros_like(parameter)),
}
"""Loops throw gradients away in these ways, or by zero_grad of something, and call nothing of ours."""


def throws_gradients_away(training: Training, way: str) -> None:
    """Two windows, because their norm was too large, say."""
    for _ in range(2):
        training.backward(1e8 * torch.randn(12, 9))
        training.zeroes = False
    if way in ZEROING:
        for parameter in training.model.parameters():
            ZEROING[way](parameter)
    else:
        {"model": training.model, "optimizer": training.optimizer}[way].zero_grad(set_to_none=False)


HOOKS = ["int8_compress_hook", "fp8_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"]
VOID: list[Callable[[Training], None]] = [
    raises_after_a_change,
    raises_after_what_is_not_finite,
    is_discarded_with_two_more_backwards,
    has_an_infinity,
    cannot_be_clipped,
    is_skipped_by_a_scaler,
]


def traces(rank: int, hook: str, void: Callable[[Training], None]) -> None:
    """Of a step that is void none is found in what a training has then that another one without it has not."""
    without, trained = Training(rank, hook), Training(rank, hook)
    before = trained.remembered()
    assert any(bool(error.abs().max() > 1e-4) for error in before)
    void(trained)
    assert all(map(torch.equal, trained.remembered(), before)), "at once"
    assert_goes_on_like(trained, without)


def assert_goes_on_like(one: Training, other: Training) -> None:
    assert all(map(torch.equal, one.next_gradients(), other.next_gradients()))
    assert all(map(torch.equal, one.remembered(), other.remembered()))


@pytest.mark.parametrize(
    ("hook", "void"),
    [
        *((hook, void) for void in VOID for hook in HOOKS),
        ("int8_compress_hook", is_skipped_by_the_optimizer_itself),
        *(("int8_compress_hook, sharded", void) for void in VOID),
        *((f"{HOOKS[number]}, two levels", void) for number in (0, 2) for void in (VOID[0], VOID[2])),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_step_that_is_not_taken_leaves_no_trace(ranks: RankPool, hook: str, void: Callable[..., None]) -> None:
    ranks.run(traces, 4 if "two levels" in hook else 2, hook, void)


@pytest.mark.parametrize("hook", [*HOOKS[:2], "powerSGD_hook"])
@on_ranks(2)
def test_errors_change_places_in_each_step_and_are_not_copied(rank: int, hook: str) -> None:
    training = Training(rank, hook)

    def places() -> list[int]:
        return [error.data_ptr() for error in training.state.errors.values()]

    first = places()
    training.next_gradients()
    second = places()
    assert set(first).isdisjoint(second)
    for _ in range(2):  # of the same step
        training.model(torch.ones(12, 9)).backward()
    assert places() == second
    training.optimizer.step()
    training.next_gradients()
    assert places() == first
    training.model.discard_step()
    assert places() == second


@pytest.mark.parametrize("way", [*ZEROING, "model", "optimizer"])
@pytest.mark.parametrize("hook", ["int8_compress_hook", "powerSGD_hook", "int8_compress_hook, sharded"])
@on_ranks(2)
def test_gradients_that_are_zeroed_without_a_step_leave_no_trace(rank: int, hook: str, way: str) -> None:
    without, trained = Training(rank, hook), Training(rank, hook)
    throws_gradients_away(trained, way)
    if "power" in hook:  # whose random numbers depend on how many windows there were
        throws_gradients_away(without, way)
        without.model.discard_step()
    assert_goes_on_like(trained, without)


@pytest.mark.parametrize("hook", HOOKS[:2])
@on_ranks(2)
def test_nor_do_they_where_the_next_step_begins_with_a_local_backward(rank: int, hook: str) -> None:
    without, trained = Training(rank, hook), Training(rank, hook)
    throws_gradients_away(trained, "zero_")
    for training in (without, trained):
        training.zeroes = training is without
        with training.model.no_sync():
            training.backward(torch.ones(12, 9))
        training.zeroes = False
    assert_goes_on_like(trained, without)


@pytest.mark.parametrize("hook", HOOKS[:2])
@on_ranks(2)
def test_gradients_that_are_changed_without_a_step_are_still_there(rank: int, hook: str) -> None:
    """So what was left out of them will be made up for."""
    changed, left_alone = Training(rank, hook), Training(rank, hook)
    gradient = torch.full((12, 9), 0.37).cumsum(0)
    for training in (changed, left_alone):
        training.backward(gradient)
        training.zeroes = False
    for parameter in changed.model.parameters():
        parameter.grad.mul_(1.0)
    assert_goes_on_like(changed, left_alone)


@pytest.mark.parametrize("hook", HOOKS[:2])
@on_ranks(2)
def test_where_no_optimizer_is_seen_gradients_that_are_zeroed_have_been_used(rank: int, hook: str) -> None:
    found = []
    for in_place in (False, True):
        model, state = fastddp.DistributedDataParallel(Pair(), bucket_cap_mb=0), BlockState(block_size=128, fp8="e5m2")
        model.register_comm_hook(state, getattr(comm_hooks, hook))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            model(torch.randn(12, 9, generator=generator)).backward()
            model.zero_grad(set_to_none=not in_place)
        found.append([error.clone() for error in state.errors.values()])
    assert all(map(torch.equal, *found))
    assert all(error.any() for error in found[0])


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(2)
def test_nor_does_a_backward_that_raises_before_the_model_is_dropped(rank: int, hook: str) -> None:
    training = Training(rank, hook)
    before = training.remembered()
    raises(training, 1e6 * torch.ones(12, 9), by=(0, 1))
    training.model = None  # type: ignore[assignment]
    gc.collect()
    assert all(map(torch.equal, training.remembered(), before))


@pytest.mark.parametrize("hook", HOOKS[:2])
@on_ranks(2)
def test_nor_does_the_first_step_over_which_buckets_are_rebuilt(rank: int, hook: str) -> None:
    """Two windows of a step that nobody takes."""
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
    assert len(state.errors) == 2
    assert not any(bool(error.any()) for error in state.errors.values())
