"""Gradients of 8 bits in training: averages within the bound of the format, nothing lost for good, every option."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

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
NUMBERS = pytest.mark.parametrize("number", HOOKS)


def state_for(number: str, **settings: Any) -> BlockState:
    return BlockState(fp8="e5m2" if number == "e5m2" else "e4m3", **settings)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 70), nn.ReLU(), nn.Linear(70, 300), nn.ReLU(), nn.Linear(300, 5)).to(dtype)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Another input on each rank, in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(8, 60, generator=generator).to(dtype)).float().square().mean()


class Training:
    """A model that trains with 8 bits over several buckets, and the true means of its gradients in fp64."""

    def __init__(
        self,
        rank: int,
        number: str,
        settings: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.state = state_for(number, **settings or {})
        self.model = fastddp.DistributedDataParallel(network(dtype), **{"bucket_cap_mb": 0.02} | options)
        self.model.register_comm_hook(self.state, HOOKS[number])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.ranks = self.model.process_group.size()

    def own_gradients(self, step: int) -> list[Tensor]:
        """Of this rank alone, as autograd makes them."""
        alone = copy.deepcopy(self.model.module)
        alone.zero_grad()
        loss(alone, self.rank, step).backward()
        return [parameter.grad for parameter in alone.parameters()]

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss(self.model, self.rank, step).backward()

    def run(self, steps: range) -> None:
        for step in steps:
            self.step(step)
            self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def errors(self) -> list[Tensor]:
        """Of whole parameters: zeros where this rank exchanges nothing."""
        whole = {name: torch.zeros(parameter.numel()) for name, parameter in self.model.module.named_parameters()}
        for part, error in self.state.errors.items():
            name, _, span = part.partition("[")
            begin, end = map(int, span[:-1].split(":")) if span else (0, whole[name].numel())
            whole[name][begin:end] = error
        return list(whole.values())


def summed(tensor: Tensor) -> Tensor:
    total = tensor.double().clone()
    dist.all_reduce(total)
    return total


# --------------------------------------------------------------------------------------------------- how far it is off


def largest_in_blocks(gradient: Tensor, block: int) -> Tensor:
    """For each element the largest magnitude in its block."""
    flat = gradient.reshape(-1).double().abs()
    padded = nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: flat.numel()]


def off_and_bound(rank: int, number: str, block: int, stochastic: bool) -> tuple[float, float]:
    """The largest error of an element, as a part of what it may be; and of half of that."""
    training = Training(rank, number, {"block_size": block, "stochastic_rounding": stochastic, "error_feedback": False})
    worst = 0.0
    for step in range(3):
        own = training.own_gradients(step)
        training.step(step)
        for gradient, found in zip(own, training.gradients(), strict=True):
            # Each rank's rounding, and that of the sum, whose block is at most as large as all of these together.
            of_ranks = summed(largest_in_blocks(gradient, block)) / training.ranks
            part = HALF[number] * (2 if stochastic else 1)
            bound = part * (2 + part) * of_ranks * (1 + 1e-5)
            off = (found.double() - summed(gradient) / training.ranks).abs().view(-1)
            worst = max(worst, (off / bound.clamp(min=1e-30)).max().item())
        training.optimizer.step()
    return worst, worst


@pytest.mark.tier("slow", but_one_in=5)
@NUMBERS
@pytest.mark.parametrize(
    ("block", "stochastic", "world_size"), list(itertools.product([128, 256], [False, True], [2, 3, 4, 8]))
)
def test_an_average_is_within_the_bound_of_the_format(
    ranks: RankPool, number: str, block: int, stochastic: bool, world_size: int
) -> None:
    for worst, _ in ranks.run(off_and_bound, world_size, number, block, stochastic):
        assert 0.1 < worst <= 1.0


def left_over(
    rank: int, number: str, world_size: int, settings: dict[str, Any], options: dict[str, Any], first: int = 0
) -> float:
    """By how much averages from step `first` on, and errors, miss the true means; as a part of the largest mean."""
    training = Training(rank, number, settings, **options)
    training.run(range(first))
    before = training.errors() if first > 0 else [torch.zeros(())] * 6
    found: list[Any] = [0.0] * 6
    true: list[Any] = [0.0] * 6
    for step in range(first, 8):
        own = training.own_gradients(step)
        training.step(step)
        found = [total + gradient.double() for total, gradient in zip(found, training.gradients(), strict=True)]
        true = [total + summed(gradient) / world_size for total, gradient in zip(true, own, strict=True)]
        training.optimizer.step()
    errors = [summed(error - earlier) for error, earlier in zip(training.errors(), before, strict=True)]
    assert max(error.abs().max() for error in errors) > 1e-5
    misses = [
        ((total.view(-1) + error - mean.view(-1)).abs().max() / mean.abs().max()).item()
        for total, error, mean in zip(found, errors, true, strict=True)
    ]
    return max(misses)


@pytest.mark.tier("slow", but_one_in=3)
@NUMBERS
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stochastic", [False, True])
def test_what_averages_lack_is_in_the_errors(ranks: RankPool, number: str, world_size: int, stochastic: bool) -> None:
    settings = {"stochastic_rounding": stochastic}
    for miss in ranks.run(left_over, world_size, number, world_size, settings, {}):
        assert miss < 1e-5


def test_errors_move_to_the_buckets_that_are_rebuilt(ranks: RankPool) -> None:
    # Small buckets of another order from the second window on, whose gradients begin with other blocks.
    for miss in ranks.run(left_over, 2, "int8", 2, {}, {"bucket_cap_mb": 0.001}):
        assert miss < 1e-5


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_main_gradients_are_read_and_written_in_fp32(ranks: RankPool, dtype: torch.dtype) -> None:
    # Behind a rounding to 16 bits averages and errors would miss the means by a thousandth.
    for miss in ranks.run(left_over, 2, "int8", 2, {}, {"dtype": dtype, "gradient_dtype": torch.float32}):
        assert miss < 1e-5


def left_over_in_two_levels(rank: int, number: str) -> float:
    # Buckets are rebuilt behind the first step: what a rank had left out of a slice may be another rank's slice then.
    return left_over(rank, number, 4, {}, {"hierarchy": init_device_mesh("cpu", (2, 2))}, first=2)


@NUMBERS
def test_in_two_levels_it_is_in_the_errors_of_those_who_exchange_it(ranks: RankPool, number: str) -> None:
    for miss in ranks.run(left_over_in_two_levels, 4, number):
        assert miss < 1e-5


def errors_of_one_rounding(rank: int, is_alike: bool) -> Tensor:
    """What one window of stochastic rounding leaves; gradients are this rank's own, or those of rank 0."""
    state = BlockState(stochastic_rounding=True)
    model = fastddp.DistributedDataParallel(Weights())
    model.register_comm_hook(state, comm_hooks.int8_compress_hook)
    given = torch.randn(Weights.COUNT, generator=torch.Generator().manual_seed(0 if is_alike else rank))
    model(given).backward()
    return state.errors["weights"].clone()


class Weights(nn.Module):
    COUNT = 2**15

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(self.COUNT))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weights * given).sum()


def test_ranks_draw_for_themselves(ranks: RankPool) -> None:
    first, second = ranks.run(errors_of_one_rounding, 2, True)
    # Where both round up, or both down, they have the same error.
    assert 0.2 < (first != second).double().mean() < 0.9


def test_the_two_roundings_draw_for_themselves(ranks: RankPool) -> None:
    first, _ = ranks.run(errors_of_one_rounding, 2, False)
    # Rank 0 adds up the first half. Two gradients' sum has twice the square of one, and so has its rounding: 1 + 2.
    # Had both roundings drawn the same, errors of one sign would meet: about 4.4.
    own, other = first.double().square().view(2, -1).mean(1)
    assert 2.6 < own / other < 3.4


def replicas(rank: int, number: str, settings: dict[str, Any], options: dict[str, Any]) -> list[bytes]:
    training = Training(rank, number, settings, **options)
    training.run(range(5))
    return [parameter.detach().float().numpy().tobytes() for parameter in training.model.parameters()]


def test_a_rerun_with_one_seed_is_the_same_and_another_seed_is_another(ranks: RankPool) -> None:
    runs = [
        ranks.run(replicas, 2, "e4m3", {"stochastic_rounding": True, "random_seed": seed}, {}) for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


class Layouts(nn.Module):
    """Parameters that do not lie row by row, one that is complex, one that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(30, 20).t())
        self.complex = nn.Parameter(torch.randn(40, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        total = self.conv(x).square().mean() + (self.transposed * x.mean()).square().sum() + self.empty.sum()
        return total + (self.complex * x.mean()).abs().square().sum()


def gradients_of_layouts(rank: int) -> list[float]:
    model = fastddp.DistributedDataParallel(Layouts())
    model.register_comm_hook(None, comm_hooks.int8_compress_hook)
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(rank)) + 1.0
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    alone = Layouts()
    alone(x).backward()
    off = []
    for ours, own in zip(model.module.parameters(), alone.parameters(), strict=True):
        if own.numel() > 0:
            mean = torch.view_as_real(own.grad.resolve_conj()) if own.is_complex() else own.grad
            mean = summed(mean) / 2
            found = torch.view_as_real(ours.grad) if own.is_complex() else ours.grad
            off.append(((found - mean).abs().max() / mean.abs().max()).item())
    return off


def test_any_layout_travels(ranks: RankPool) -> None:
    for off in ranks.run(gradients_of_layouts, 2):
        assert len(off) == 4
        assert max(off) < 0.04


# --------------------------------------------------------------------------------------------------- not a number


def with_nan(rank: int, number: str) -> tuple[list[bool], bool, bool]:
    """Rank 1's second gradient is NaN in one element of the first layer, in one step."""
    training = Training(rank, number)
    training.run(range(2))
    training.optimizer.zero_grad()
    handle = training.model.module[0].weight.register_hook(
        lambda gradient: (
            gradient.clone().index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(torch.nan))
            if rank == 1
            else gradient
        )
    )
    loss(training.model, rank, 2).backward()
    handle.remove()
    gradients = training.gradients()
    found = bool(training.model.found_inf())
    errors = torch.cat([error.view(-1) for error in training.errors()])
    training.run(range(3, 5))
    after = torch.cat([gradient.view(-1) for gradient in training.gradients()])
    return gradients[0].view(-1).isnan().tolist(), found, bool(errors.isfinite().all() and after.isfinite().all())


@NUMBERS
def test_nan_makes_its_block_nan_on_all_ranks_for_that_step(ranks: RankPool, number: str) -> None:
    for nans, found, all_well in ranks.run(with_nan, 2, number):
        assert nans == [True] * 256 + [False] * (60 * 70 - 256)
        assert found
        assert all_well


# -------------------------------------------------------------------------------------------------- windows that fail


# ------------------------------------------------------------------------------------------------ what is remembered


def saved_by_torch(checkpoint: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(rank: int, settings: dict[str, Any], options: dict[str, Any], warm_up: int) -> bool:
    """Six steps, against three, a checkpoint, and three by another training that did `warm_up` steps of its own."""
    whole = Training(rank, "e4m3", settings)
    whole.run(range(6))
    first = Training(rank, "e4m3", settings)
    first.run(range(3))
    checkpoint = saved_by_torch({"model": first.model.state_dict(), "state": first.state.state_dict()})
    second = Training(rank, "e4m3", settings, **options)
    second.run(range(10, 10 + warm_up))
    second.model.load_state_dict(checkpoint["model"])
    second.state.load_state_dict(checkpoint["state"])
    assert second.state.iter == 3
    second.run(range(3, 6))
    assert second.state.iter == 6
    pairs = zip(whole.model.parameters(), second.model.parameters(), strict=True)
    return all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


def errors_in_other_buckets(rank: int) -> bool:
    first = Training(rank, "e4m3")
    first.run(range(3))
    second = Training(rank, "e4m3", {"block_size": 128}, bucket_cap_mb=0.1)
    second.run(range(2))
    second.state.load_state_dict(saved_by_torch(first.state.state_dict()))
    pairs = zip(first.errors(), second.errors(), strict=True)
    return all(torch.equal(one, other) and bool(one.any()) for one, other in pairs)


def test_a_checkpoint_fits_other_buckets_and_blocks(ranks: RankPool) -> None:
    assert ranks.run(errors_in_other_buckets, 2) == [True, True]


def test_stochastic_rounding_goes_on_too(ranks: RankPool) -> None:
    # In the buckets that were rebuilt, as at the moment of the checkpoint.
    assert ranks.run(resumed, 2, {"stochastic_rounding": True}, {}, 4) == [True, True]


def refusals(rank: int) -> list[str]:
    training = Training(rank, "int8")
    training.run(range(2))
    good = training.state.state_dict()
    name = "0.weight"
    errors = good["errors"][f"rank {rank}"]
    before = {name: error.clone() for name, error in errors.items()}
    bad = [
        3,
        good | {"format": 2},
        {name: part for name, part in good.items() if name != "iter"},
        good | {"world_size": 0},
        good | {"shapes": good["shapes"] | {name: [1, 2]}},
        good | {"errors": {f"rank {rank}": errors | {name: torch.zeros(3)}}},
        good | {"errors": {f"rank {rank}": errors | {name: errors[name].double()}}},
        good | {"errors": {f"rank {rank}": {"other": errors[name]}}},
        good | {"errors": {f"rank {rank}": errors | {name: 1.0}}},
    ]
    said = []
    for state in bad:
        with pytest.raises(ValueError) as raised:
            training.state.load_state_dict(state)
        said.append(str(raised.value))
    assert all(torch.equal(error, before[name]) for name, error in training.state.errors.items())
    assert training.state.iter == 2
    return said


def test_a_state_that_makes_no_sense_is_refused_and_changes_nothing(ranks: RankPool) -> None:
    first, _ = ranks.run(refusals, 2)
    words = [
        "state must be",
        "format 1",
        "no 'iter'",
        "world_size",
        "0.weight",
        "of shape",
        "float32",
        "'other'",
        "a tensor",
    ]
    for said, word in zip(first, words, strict=True):
        assert word in said


def pickled(rank: int) -> bool:
    training = Training(rank, "int8")
    training.run(range(2))
    loaded = pickle.loads(pickle.dumps(training.state))
    assert loaded.iter == training.state.iter
    other = fastddp.DistributedDataParallel(copy.deepcopy(training.model.module), bucket_cap_mb=0.02)
    other.register_comm_hook(loaded, comm_hooks.int8_compress_hook)
    training.step(2)
    loss(other, rank, 2).backward()
    pairs = zip(training.gradients(), other.parameters(), strict=True)
    return all(torch.allclose(gradient, parameter.grad, atol=1e-7) for gradient, parameter in pairs)


def test_a_state_can_be_pickled(ranks: RankPool) -> None:
    assert ranks.run(pickled, 2) == [True, True]


# ------------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"block_size": 64}, "block_size"), ({"fp8": "e3m4"}, "fp8"), ({"random_seed": -1}, "random_seed")],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        BlockState(**settings)


def other_hooks(rank: int, what: str) -> str:
    model = fastddp.DistributedDataParallel(nn.Linear(8, 8))
    hook, state = comm_hooks.int8_compress_hook, BlockState()
    if what == "number" and rank == 1:
        hook = comm_hooks.fp8_compress_hook
    if what == "block_size" and rank == 1:
        state = BlockState(block_size=128)
    model.register_comm_hook(state, hook)
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(1, 8))
    return str(raised.value)


@pytest.mark.parametrize("what", ["number", "block_size"])
def test_ranks_that_compress_differently_are_stopped(ranks: RankPool, what: str) -> None:
    for said in ranks.run(other_hooks, 2, what):
        assert f"{what} is" in said
        assert "same hook on all ranks" in said


def refused_by(rank: int) -> list[str]:
    said = []
    register: list[Callable[[fastddp.DistributedDataParallel], Any]] = [
        lambda model: model.register_comm_hook(3, comm_hooks.int8_compress_hook),
        lambda model: model.register_comm_hook(None, comm_hooks.bf16_compress_wrapper(comm_hooks.int8_compress_hook)),
        lambda model: comm_hooks.fp8_compress_hook(None, None),
    ]
    for call in register:
        model = fastddp.DistributedDataParallel(nn.Linear(8, 8))
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            call(model)
        said.append(str(raised.value))
        model(torch.ones(1, 8)).sum().backward()  # which is well
    state = BlockState()
    fastddp.DistributedDataParallel(nn.Linear(8, 8)).register_comm_hook(state, comm_hooks.int8_compress_hook)
    with pytest.raises(ValueError) as raised:
        fastddp.DistributedDataParallel(nn.Linear(9, 8)).register_comm_hook(state, comm_hooks.int8_compress_hook)
    return [*said, str(raised.value)]


def test_what_makes_no_sense_is_refused_with_a_sentence(ranks: RankPool) -> None:
    first, _ = ranks.run(refused_by, 2)
    words = ["not a builtins.int", "8 bits already", "cannot be called for a bucket", "Make a new BlockState"]
    for said, word in zip(first, words, strict=True):
        assert word in said
