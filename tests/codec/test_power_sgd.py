"""PowerSGD on random models against the algorithm in plain torch, and where it has to agree with everything else."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp.comm_hooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from fastddp.compression.power_sgd import is_compressed, matrix_shape
from on_ranks import on_ranks
from program_execution import new_memory_is_nan
from ranks import RankPool


def hooked(module: nn.Module, state: Any, hook: Any = powerSGD_hook, **options: Any) -> fastddp.DistributedDataParallel:
    model = fastddp.DistributedDataParallel(module, **{"bucket_cap_mb": 0.03} | options)
    model.register_comm_hook(state, hook)
    return model


# ------------------------------------------------------------------------------------------- random models and options


class Reference:
    """The algorithm for one parameter, with one allreduce for P and one for Q."""

    def __init__(self, parameter: Tensor, q: Tensor, error: Tensor | None) -> None:
        self.shape = matrix_shape(parameter)
        self.q = q.clone().double()
        self.error = torch.zeros(self.shape, dtype=torch.float64)
        if error is not None:
            self.error.copy_(error)

    def step(self, gradient: Tensor) -> Tensor:
        matrix = gradient.double().view(self.shape) + self.error
        p = orthonormal(mean(matrix @ self.q.T))
        q = mean(p.T @ matrix)
        result = p @ q
        self.error = matrix - result
        self.q = orthonormal(q.T).T
        return result


def mean(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def orthonormal(vectors: Tensor) -> Tensor:
    """Gram-Schmidt's: the QR factorisation whose R has a positive diagonal."""
    q, r = torch.linalg.qr(vectors)
    return q * r.diagonal().sign()


@dataclass(frozen=True)
class Program:
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    rank: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool
    bucket_cap_mb: float
    view: bool
    channels_last: bool
    seed: int

    def gradients(self, rank: int, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 100 * step + rank)
        wide = torch.promote_types(self.dtype, torch.float32)
        return [torch.randn(shape, generator=generator, dtype=wide).to(self.dtype) for shape in self.shapes]


SHAPES = st.one_of(
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
    st.just(()),
    st.just((0, 5)),
)
PROGRAMS = st.builds(
    Program,  # the others are booleans
    shapes=st.lists(SHAPES, min_size=1, max_size=6).map(tuple).filter(lambda shapes: any(map(math.prod, shapes))),
    dtype=st.sampled_from([torch.float32] * 3 + [torch.float64, torch.float16, torch.bfloat16, torch.complex64]),
    rank=st.integers(1, 6),
    min_compression_rate=st.sampled_from([0.1, 1.0, 2.0]),
    bucket_cap_mb=st.sampled_from([0.0, 0.001, 25.0]),
    seed=st.integers(0, 1000),
)
# Of the largest element.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.float16: 0.1, torch.bfloat16: 0.5, torch.complex64: 1e-6}


class Given(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        tensors = [torch.zeros(shape, dtype=program.dtype) for shape in program.shapes]
        if program.channels_last:
            tensors = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
        self.weights = nn.ParameterList(tensors)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(a * b.conj()).sum() for a, b in zip(self.weights, gradients, strict=True)]).sum().real


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements as they lie in memory that is laid out like ``like``."""
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor).as_strided((like.numel(),), (1,))


def wrapped(program: Program) -> tuple[fastddp.DistributedDataParallel, PowerSGDState]:
    state = PowerSGDState(
        None,
        program.rank,
        start_powerSGD_iter=2 if program.error_feedback or program.warm_start else 0,
        use_error_feedback=program.error_feedback,
        warm_start=program.warm_start,
        min_compression_rate=program.min_compression_rate,
    )
    options: dict[str, Any] = {"bucket_cap_mb": program.bucket_cap_mb, "gradient_as_bucket_view": program.view}
    return hooked(Given(program), state, **options), state


@new_memory_is_nan()
def differences(rank: int, program: Program) -> list[str]:
    model, state = wrapped(program)
    start, found, tolerance = state.start_powerSGD_iter, [], TOLERANCE[program.dtype]

    def compare(what: str, ours: Tensor, theirs: Tensor, largest: float) -> None:
        off = float((ours - theirs).abs().max() / max(largest, 1e-30)) if ours.numel() else 0.0
        if not off <= tolerance:
            found.append(f"step {step}, {what} {tuple(ours.shape)}: {off:.2g}")

    for step in range(5):
        of_window = program.gradients(rank, step)
        model.zero_grad()
        loss = model(of_window)
        references, expected, sizes = {}, {}, {}
        for name, parameter in model.module.named_parameters():
            gradient = in_memory_order(of_window.pop(0), parameter).to(torch.promote_types(program.dtype, torch.double))
            is_low_rank = step >= start and is_compressed(parameter, program.rank, program.min_compression_rate)
            assert step <= start or is_low_rank == (name in state.qs)
            if is_low_rank and step == 0:
                continue  # Q is drawn in its backward
            if is_low_rank:
                references[name] = Reference(parameter, state.qs[name], state.errors.get(name))
                expected[name] = references[name].step(gradient).flatten()
            else:
                expected[name] = mean(gradient)
                sizes[name] = float(mean(gradient.abs()).max()) if parameter.numel() else 0.0  # ranks' may cancel out
        loss.backward()
        for name, wanted in expected.items():
            parameter = model.module.get_parameter(name)
            largest = sizes.get(name, float(wanted.abs().max()) if parameter.numel() else 0.0)
            compare(name, in_memory_order(parameter.grad, parameter), wanted, largest)
        for name, reference in references.items():
            if program.error_feedback:
                largest = max(float(reference.error.abs().max()), float(expected[name].abs().max()))
                compare(f"error of {name}", state.errors[name], reference.error, largest)
            off = float((state.qs[name] - reference.q).abs().max())
            if 2 * program.rank < min(reference.shape):
                is_right = off <= tolerance if program.warm_start else off > 1e-3  # as it was drawn anew
                found += [] if is_right else [f"step {step}, Q of {name}: {off:.2g}"]
    return found


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("world_size", "number"),
    [(2, 25), (3, 10), (4, 5), *(pytest.param(size, 150, marks=pytest.mark.tier("nightly")) for size in (2, 3, 4))],
)
def test_every_step_is_that_of_the_algorithm(ranks: RankPool, world_size: int, number: int) -> None:
    @settings(max_examples=number, phases=[Phase.generate], deadline=None, derandomize=True)
    @given(program=PROGRAMS)
    def check(program: Program) -> None:
        assert ranks.run(differences, world_size, program) == [[]] * world_size

    check()


@pytest.mark.parametrize(
    ("parameter", "rank", "rate", "compressed"),
    [
        (torch.empty(40, 40), 1, 2, True),
        (torch.empty(40, 40), 10, 2, False),
        (torch.empty(2, 1000), 8, 0.5, True),
        (torch.empty(40, 40), 4, 5, False),
        (torch.empty(1000), 1, 2, False),
        (torch.empty(16, 3, 3, 3), 1, 2, True),
        (torch.empty(0, 40), 1, 2, False),
        (torch.empty(40, 40, dtype=torch.complex64), 1, 2, False),
        (torch.empty(40, 1).expand(40, 40), 1, 2, False),
        (torch.empty(40, 40).t(), 1, 2, True),
    ],
)
def test_what_is_compressed(parameter: Tensor, rank: int, rate: float, compressed: bool) -> None:
    assert is_compressed(parameter, rank, rate) == compressed


# ------------------------------------------------------------------------------------------------------ a real network


def network() -> nn.Module:
    """Matrices of several shapes, a convolution, vectors, and one matrix that is too small to gain anything."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 40),
        nn.Tanh(),
        nn.Linear(40, 40),
        nn.Tanh(),
        nn.Linear(40, 2),
    )


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(8, 48, generator=generator)).square().mean()


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    loss(model, rank, step).backward()


@pytest.mark.parametrize("approximation", [1, 4])
@on_ranks(2)
def test_in_one_bucket_gradients_are_those_of_torchs_hook(rank: int, approximation: int) -> None:
    """Which works in one; from the same Q."""
    options = {"matrix_approximation_rank": approximation, "start_powerSGD_iter": 2}
    state = PowerSGDState(None, **options)
    ours = hooked(network(), state, bucket_cap_mb=100)
    theirs = TorchDDP(network(), bucket_cap_mb=100)
    torchs_state = torchs.PowerSGDState(None, orthogonalization_epsilon=1e-30, **options)
    theirs.register_comm_hook(torchs_state, torchs.powerSGD_hook)
    generator = torch.Generator().manual_seed(int(copy.deepcopy(torchs_state.rng).randint(1_000_000_000)))
    for step in range(22):
        ours.zero_grad()
        backward(theirs, rank, step)
        output = loss(ours, rank, step)
        if step == 2:  # torch lays the first Q of all matrices out one after the other, in the order of the bucket
            names = [parameter.name for parameter in ours.bucket_plan().buckets[0].parameters]
            for q in (state.qs[name] for name in names if name in state.qs):
                q.copy_(orthonormal(torch.randn(q.shape[1], q.shape[0], generator=generator).double()).T)
        output.backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (one.grad - other.grad).abs().max() < 2e-2 * other.grad.abs().max()


@pytest.mark.parametrize(("iteration", "compressed"), [(6, 2), (5, 1), (0, 0)])
@on_ranks(2)
def test_to_set_the_iteration_moves_the_start_of_compression(rank: int, iteration: int, compressed: int) -> None:
    """Compressed gradients have the rank that travels."""
    state = PowerSGDState(None, start_powerSGD_iter=6)
    with pytest.raises(ValueError, match="iter is a number of synchronisations, not -1"):
        state.iter = -1
    model = hooked(network(), state)
    for step in range(5):
        if step == 3:
            state.iter = iteration
        backward(model, rank, step)
        assert (torch.linalg.matrix_rank(model.module[6].weight.grad) == 1) == (step >= 5 - compressed)
    assert state.iter == iteration + 2
    assert (state.compression_stats()[0] > 0) == (iteration >= 5)


@on_ranks(2)
def test_p_q_and_what_is_not_compressed_share_collectives_74148(rank: int) -> None:
    """P of a bucket travels with Q of the one before; torch's hook has three collectives a bucket."""
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model = hooked(layers, PowerSGDState(None, start_powerSGD_iter=2), bucket_cap_mb=32 * 32 * 4 / 2**20)
    for _ in range(4):
        model.zero_grad()
        value = model(torch.ones(2, 32)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            value.backward()
    assert len(model.bucket_plan().buckets) == 4
    # The status of the window rides with the last Q.
    assert sum(event.name == "gloo:all_reduce" for event in profile.events()) == 5


def gradients_given(given: list[Tensor]) -> list[Tensor]:
    """What arrives of gradients that are the same on all ranks, after two windows without compression."""
    module = nn.Linear(9, 12, bias=False)
    model = hooked(module, PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.1))
    arrived = []
    for gradient in [*given[:1] * 2, *given]:
        model.zero_grad()
        (model(torch.eye(9)) * gradient.T).sum().backward()
        arrived.append(module.weight.grad.clone())
    return arrived[2:]


@on_ranks(2)
def test_gradients_of_the_rank_that_travels_arrive_whole_though_earlier_ones_had_less(rank: int) -> None:
    zeros, ones, pair = torch.zeros(12, 9), torch.ones(12, 9), torch.randn(12, 2) @ torch.randn(2, 9)
    nothing, *later = gradients_given([zeros, ones, ones])
    assert torch.equal(nothing, zeros)
    assert all(torch.allclose(arrived, ones, atol=1e-5) for arrived in later)
    assert torch.allclose(gradients_given([ones, pair, pair, pair, pair])[-1], pair, atol=1e-3)


@pytest.mark.parametrize("approximation", [1, 7])
@on_ranks(2)
def test_each_parameters_part_of_a_batched_error_is_what_its_own_gradient_has_lost(
    rank: int, approximation: int
) -> None:
    """In the first compressed step."""
    module = nn.Linear(7, 5)  # neither bias nor weight ends at a multiple of 16 bytes
    exact = copy.deepcopy(module)
    state = PowerSGDState(None, approximation, start_powerSGD_iter=2)
    model = hooked(module, state, batched_powerSGD_hook)
    for step in range(3):
        inputs = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        for each in (model, exact):
            each.zero_grad()
            each(inputs).square().sum().backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad.clone() for parameter in module.parameters()])
    torch.testing.assert_close(model.last_grad_norm().float(), norm)
    for (name, arrived), own in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert (own.grad - arrived.grad).abs().max() > 0.1
        assert torch.allclose(state.errors[name].view_as(own), own.grad - arrived.grad, atol=1e-4)
        if approximation == 7:  # a square of full rank arrives whole
            true_mean = mean(own.grad.clone())
            assert torch.allclose(arrived.grad, true_mean, rtol=0, atol=1e-5 * float(true_mean.abs().max()))
