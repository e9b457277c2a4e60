"""Gradients of 8 bits in training: averages within the bound of the format, nothing lost for good, saved states."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState
from ranks import RankPool
from test_block8 import HALF

HOOKS = {
    "int8": comm_hooks.int8_compress_hook,
    "e4m3": comm_hooks.fp8_compress_hook,
    "e5m2": comm_hooks.fp8_compress_hook,
}


def hooked(module: nn.Module, state: Any, hook: Any = HOOKS["int8"], **options: Any) -> fastddp.DistributedDataParallel:
    model = fastddp.DistributedDataParallel(module, **{"bucket_cap_mb": 0.02} | options)
    model.register_comm_hook(state, hook)
    return model


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Another input on each rank, in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.randn(8, 60, generator=generator)).square().mean()


class Training:
    """A model that trains with 8 bits over several buckets, and the true means of its gradients in fp64."""

    def __init__(self, rank: int, number: str, settings: dict[str, Any], **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(60, 70), nn.ReLU(), nn.Linear(70, 300), nn.ReLU(), nn.Linear(300, 5)]
        self.rank = rank
        self.state = BlockState(fp8="e5m2" if number == "e5m2" else "e4m3", **settings)
        self.model = hooked(nn.Sequential(*layers), self.state, HOOKS[number], **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)

    def own_gradients(self, step: int) -> list[Tensor]:
        """Of this rank alone, as autograd makes them."""
        alone = copy.deepcopy(self.model.module)
        alone.zero_grad()
        loss(alone, self.rank, step).backward()
        return [parameter.grad for parameter in alone.parameters()]

    def gradients(self, step: int) -> list[Tensor]:
        self.model.zero_grad()
        loss(self.model, self.rank, step).backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def run(self, *steps: int) -> Training:
        for step in steps:
            self.gradients(step)
            self.optimizer.step()
        return self

    def errors(self) -> list[Tensor]:
        return [self.state.errors[name].clone() for name, _ in self.model.module.named_parameters()]


def summed(tensor: Tensor) -> Tensor:
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total


def largest_in_blocks(gradient: Tensor, block: int) -> Tensor:
    """For each element the largest magnitude in its block."""
    flat = gradient.reshape(-1).double().abs()
    padded = nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: flat.numel()]


def off_by(rank: int, number: str, block: int, stochastic: bool) -> float:
    """The largest error of an element, as a part of what it may be."""
    settings = {"block_size": block, "stochastic_rounding": stochastic, "error_feedback": False}
    training, count = Training(rank, number, settings), dist.get_world_size()
    worst = 0.0
    for step in range(3):
        for own, found in zip(training.own_gradients(step), training.gradients(step), strict=True):
            # Each rank's rounding, and that of the sum, whose block is at most as large as all of these together.
            of_ranks = summed(largest_in_blocks(own, block)) / count
            part = HALF[number] * (2 if stochastic else 1)
            bound = part * (2 + part) * of_ranks * (1 + 1e-5)
            off = (found.double() - summed(own) / count).abs().view(-1)
            worst = max(worst, (off / bound.clamp(min=1e-30)).max().item())
        training.optimizer.step()
    return worst


@pytest.mark.tier("slow", but_one_in=11)
@pytest.mark.parametrize("number", HOOKS)
@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_an_average_is_within_the_bound_of_the_format(
    ranks: RankPool, number: str, block: int, stochastic: bool, world_size: int
) -> None:
    for worst in ranks.run(off_by, world_size, number, block, stochastic):
        assert 0.1 < worst <= 1.0


def left_over(rank: int, number: str) -> float:
    """By how much averages and errors miss the true means; as a part of the largest mean."""
    training = Training(rank, number, {"stochastic_rounding": True})
    found: list[Any] = [0.0] * 6
    true: list[Any] = [0.0] * 6
    for step in range(8):
        means = [summed(own) / dist.get_world_size() for own in training.own_gradients(step)]
        true = [total + mean for total, mean in zip(true, means, strict=True)]
        found = [total + gradient.double() for total, gradient in zip(found, training.gradients(step), strict=True)]
        training.optimizer.step()
    errors = [summed(error) for error in training.errors()]
    assert max(error.abs().max() for error in errors) > 1e-5
    return max(
        ((total.view(-1) + error - mean.view(-1)).abs().max() / mean.abs().max()).item()
        for total, error, mean in zip(found, errors, true, strict=True)
    )


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("number", HOOKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_averages_of_drawn_numbers_lack_is_in_the_errors(ranks: RankPool, number: str, world_size: int) -> None:
    """Others: tests/reducer/test_programs.py."""
    for miss in ranks.run(left_over, world_size, number):
        assert miss < 1e-5


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2**15))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weights * given).sum()


def errors_of_one_rounding(rank: int, is_alike: bool, seed: int = 0) -> Tensor:
    """What one window of stochastic rounding leaves; gradients are this rank's own, or those of rank 0."""
    state = BlockState(stochastic_rounding=True, random_seed=seed)
    model = hooked(Weights(), state)
    model(torch.randn(2**15, generator=torch.Generator().manual_seed(0 if is_alike else rank))).backward()
    return state.errors["weights"].clone()


def test_ranks_draw_for_themselves_by_the_seed(ranks: RankPool) -> None:
    first, second = ranks.run(errors_of_one_rounding, 2, True)
    # Where both round up, or both down, they have the same error.
    assert 0.2 < (first != second).double().mean() < 0.9
    again, other = (ranks.run(errors_of_one_rounding, 2, True, seed)[0] for seed in (0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_two_roundings_draw_for_themselves(ranks: RankPool) -> None:
    first, _ = ranks.run(errors_of_one_rounding, 2, False)
    # Rank 0 adds up the first half. Two gradients' sum has twice the square of one, and so has its rounding: 1 + 2.
    # Had both roundings drawn the same, errors of one sign would meet: about 4.4.
    own, other = first.double().square().view(2, -1).mean(1)
    assert 2.6 < own / other < 3.4


def resumed(rank: int) -> tuple[bool, bool, bool]:
    """Whether draws go on from a file; its errors fit other buckets and blocks; and a pickle goes on."""
    whole = Training(rank, "e4m3", {"stochastic_rounding": True}).run(*range(3))
    file = io.BytesIO()
    torch.save({"model": whole.model.state_dict(), "state": whole.state.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    errors = whole.errors()
    second = Training(rank, "e4m3", {"stochastic_rounding": True}).run(10, 11, 12, 13)
    second.model.load_state_dict(checkpoint["model"])
    second.state.load_state_dict(checkpoint["state"])
    assert second.state.iter == 3
    pairs = zip(whole.run(3, 4).gradients(5), second.run(3, 4).gradients(5), strict=True)
    goes_on = all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)
    other = Training(rank, "e4m3", {"block_size": 128}, bucket_cap_mb=0.1).run(0, 1)
    other.state.load_state_dict(checkpoint["state"])
    fits = all(torch.equal(one, two) and bool(one.any()) for one, two in zip(errors, other.errors(), strict=True))
    copied = pickle.loads(pickle.dumps(other.state))
    twin = hooked(copy.deepcopy(other.model.module), copied, HOOKS["e4m3"])
    loss(twin, rank, 6).backward()
    pairs = zip(twin.parameters(), other.gradients(6), strict=True)
    return goes_on, fits, copied.iter == 4 and all(torch.allclose(one.grad, two, atol=1e-7) for one, two in pairs)


def test_saved_states_go_on_and_their_errors_fit_other_buckets_and_blocks(ranks: RankPool) -> None:
    assert ranks.run(resumed, 2) == [(True, True, True)] * 2


def refusals(rank: int) -> dict[str, str]:
    """By words that have to be in them."""
    training = Training(rank, "int8", {}).run(0, 1)
    good, name, number = training.state.state_dict(), "0.weight", f"rank {rank}"
    errors = good["errors"][number]
    before = {name: error.clone() for name, error in errors.items()}
    bad = {
        "state must be": 3,
        "format 1": good | {"format": 2},
        "no 'iter'": {part: value for part, value in good.items() if part != "iter"},
        "world_size": good | {"world_size": 0},
        "0.weight": good | {"shapes": good["shapes"] | {name: [1, 2]}},
        "of shape": good | {"errors": {number: errors | {name: torch.zeros(3)}}},
        "float32": good | {"errors": {number: errors | {name: errors[name].double()}}},
        "'other'": good | {"errors": {number: {"other": errors[name]}}},
        "a tensor": good | {"errors": {number: errors | {name: 1.0}}},
    }
    said = {}
    for words, state in bad.items():
        with pytest.raises(ValueError) as raised:
            training.state.load_state_dict(state)
        said[words] = str(raised.value)
    assert all(torch.equal(error, before[name]) for name, error in training.state.errors.items())
    assert training.state.iter == 2
    of_another = BlockState()
    hooked(nn.Linear(8, 8), of_another)
    arguments = {
        "not a builtins.int": (nn.Linear(8, 8), 3),
        "8 bits already": (nn.Linear(8, 8), None, comm_hooks.bf16_compress_wrapper(HOOKS["int8"])),
        "Make a new BlockState": (nn.Linear(9, 8), of_another),
    }
    for words, given in arguments.items():
        with pytest.raises((TypeError, ValueError)) as refused:
            hooked(*given)
        said[words] = str(refused.value)
    return said


def test_what_makes_no_sense_is_refused_and_changes_nothing(ranks: RankPool) -> None:
    for words, text in ranks.run(refusals, 2)[0].items():
        assert words in text
    for name, value in {"block_size": 64, "fp8": "e3m4", "random_seed": -1}.items():
        with pytest.raises(ValueError, match=name):
            BlockState(**{name: value})
    with pytest.raises(RuntimeError, match="cannot be called for a bucket"):
        comm_hooks.fp8_compress_hook(None, None)


def other_hooks(rank: int, state: dict[str, Any], number: str) -> None:
    """Only on rank 1."""
    model = hooked(nn.Linear(8, 8), BlockState(**(state if rank == 1 else {})), HOOKS[number if rank == 1 else "int8"])
    model(torch.ones(1, 8))


@pytest.mark.parametrize(("state", "number"), [({}, "e4m3"), ({"block_size": 128}, "int8")])
def test_ranks_that_compress_differently_are_stopped(ranks: RankPool, state: dict[str, Any], number: str) -> None:
    for error in ranks.errors(other_hooks, 2, state, number):
        assert f"{'block_size' if state else 'number'} is" in error.message
        assert "same hook on all ranks" in error.message
