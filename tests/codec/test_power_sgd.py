"""PowerSGD against the algorithm in plain torch, step by step, and where it has to agree with everything else."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from fastddp.exchange.power_sgd import is_compressed, matrix_shape
from ranks import RankPool


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
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
    ).to(dtype)


def loss(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(8, 48, generator=generator).to(dtype)).square().mean()


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    loss(model, rank, step).backward()


def hooked(
    module: nn.Module, state: Any, hook: Any = powerSGD_hook, bucket_cap_mb: float = 0.03
) -> fastddp.DistributedDataParallel:
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
    model.register_comm_hook(state, hook)
    return model


# ------------------------------------------------------------------------------------------------------- references


class Reference:
    """The algorithm for one parameter, with one allreduce for P and one for Q."""

    def __init__(self, parameter: Tensor, q: Tensor, state: PowerSGDState) -> None:
        self.rows, self.columns = matrix_shape(parameter)
        self.q = q.clone().double()
        self.error = torch.zeros(self.rows, self.columns, dtype=torch.float64)
        self.state = state

    def step(self, gradient: Tensor) -> Tensor:
        matrix = gradient.double().view(self.rows, self.columns)
        if self.state.use_error_feedback:
            matrix = matrix + self.error
        p = orthonormal(mean(matrix @ self.q.T))
        q = mean(p.T @ matrix)
        result = p @ q
        self.error = matrix - result
        self.q = orthonormal(q.T).T.contiguous()
        return result.view(gradient.shape)


def mean(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def orthonormal(vectors: Tensor) -> Tensor:
    """Gram-Schmidt's: the QR factorisation whose R has a positive diagonal."""
    q, r = torch.linalg.qr(vectors)
    return q * r.diagonal().sign()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest element."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=1e-30))


def of_gradients(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(difference(one.grad, other.grad) for one, other in pairs)


def against_the_reference(
    rank: int, steps: int, settings: dict[str, Any], options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> dict[str, float]:
    """The largest difference of gradients, errors and factors, over all steps and parameters."""
    state = PowerSGDState(None, start_powerSGD_iter=2, **settings)
    model = fastddp.DistributedDataParallel(network(dtype), **{"bucket_cap_mb": 0.03} | options)
    model.register_comm_hook(state, powerSGD_hook)
    local = copy.deepcopy(model.module)
    references: dict[str, Reference] = {}
    worst = {"gradient": 0.0, "uncompressed": 0.0, "error": 0.0, "q": 0.0}
    for step in range(steps):
        model.zero_grad()
        local.zero_grad()
        loss(local, rank, step, dtype).backward()
        output = loss(model, rank, step, dtype)
        if step == 2:  # Q is drawn when the first compressed window begins
            parameters = dict(local.named_parameters())
            references = {name: Reference(parameters[name], q, state) for name, q in state.qs.items()}
        for name, reference in references.items():  # from what fastddp remembers: roundings of 20 steps do not add up
            assert torch.allclose(reference.q, state.qs[name].double(), atol=tolerance)
            reference.q.copy_(state.qs[name])
            if state.use_error_feedback:
                reference.error.copy_(state.errors[name])
        output.backward()
        for (name, ours), theirs in zip(model.module.named_parameters(), local.parameters(), strict=True):
            reference = references.get(name)
            if reference is None:
                worst["uncompressed"] = max(worst["uncompressed"], difference(ours.grad, mean(theirs.grad.double())))
                continue
            worst["gradient"] = max(worst["gradient"], difference(ours.grad, reference.step(theirs.grad)))
            worst["q"] = max(worst["q"], float((state.qs[name].double() - reference.q).abs().max()))
            if state.use_error_feedback:
                worst["error"] = max(worst["error"], difference(state.errors[name], reference.error))
    assert len(references) == 3
    return worst


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_every_step_is_that_of_the_algorithm(ranks: RankPool, world_size: int, rank: int) -> None:
    settings = {"matrix_approximation_rank": rank}
    for worst in ranks.run(against_the_reference, world_size, 24, settings, {}, torch.float32, 1e-3):
        assert max(worst.values()) < 1e-3


@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("caps", [0.0, 25.0], ids=["a bucket each", "one bucket"])
def test_so_it_is_whatever_the_buckets_and_options(ranks: RankPool, feedback: bool, view: bool, caps: float) -> None:
    settings = {"matrix_approximation_rank": 3, "use_error_feedback": feedback}
    options = {"bucket_cap_mb": caps, "gradient_as_bucket_view": view}
    for worst in ranks.run(against_the_reference, 2, 8, settings, options, torch.float32, 1e-3):
        assert max(worst.values()) < 1e-3


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float16, 0.1), (torch.bfloat16, 0.5)], ids=str
)
def test_so_it_is_for_other_dtypes(ranks: RankPool, dtype: torch.dtype, tolerance: float) -> None:
    for worst in ranks.run(against_the_reference, 2, 6, {"matrix_approximation_rank": 1}, {}, dtype, tolerance):
        assert worst["gradient"] < tolerance


def as_torchs_hook(rank: int, approximation: int, steps: int) -> float:
    """In one bucket, where torch's hook works; from the same Q."""
    settings = {"matrix_approximation_rank": approximation, "start_powerSGD_iter": 2}
    state = PowerSGDState(None, **settings)
    ours = hooked(network(), state, bucket_cap_mb=100)
    theirs = TorchDDP(network(), bucket_cap_mb=100)
    torchs_state = torchs.PowerSGDState(None, orthogonalization_epsilon=1e-30, **settings)
    theirs.register_comm_hook(torchs_state, torchs.powerSGD_hook)
    torchs_seed = int(copy.deepcopy(torchs_state.rng).randint(1_000_000_000))
    worst = 0.0
    for step in range(steps):
        ours.zero_grad()
        backward(theirs, rank, step)
        output = loss(ours, rank, step)
        if step == 2:  # torch lays the first Q of all matrices out one behind the other, in the order of the bucket
            generator = torch.Generator().manual_seed(torchs_seed)
            names = [parameter.name for parameter in ours.bucket_plan().buckets[0].parameters]
            for q in (state.qs[name] for name in names if name in state.qs):
                q.copy_(orthonormal(torch.randn(q.shape[1], q.shape[0], generator=generator).double()).T)
        output.backward()
        worst = max(worst, of_gradients(ours, theirs))
    return worst


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_in_one_bucket_gradients_are_those_of_torchs_hook(ranks: RankPool, rank: int) -> None:
    assert max(ranks.run(as_torchs_hook, 2, rank, 22)) < 2e-2


# ----------------------------------------------------------------------------------------------------- when, and how


def with_iterations_set(rank: int, iteration: int) -> list[bool]:
    """Of each window, whether it was compressed: then gradients have the rank that travels."""
    state = PowerSGDState(None, start_powerSGD_iter=6)
    model = hooked(network(), state)
    compressed = []
    for step in range(5):
        if step == 3:
            state.iter = iteration
        backward(model, rank, step)
        compressed.append(int(torch.linalg.matrix_rank(model.module[6].weight.grad)) == 1)
    assert state.iter == iteration + 2
    assert (state.compression_stats()[0] > 0) == (iteration >= 5)
    return compressed


@pytest.mark.parametrize(("iteration", "compressed"), [(6, 2), (5, 1), (0, 0)])
def test_to_set_the_iteration_moves_the_start_of_compression(ranks: RankPool, iteration: int, compressed: int) -> None:
    assert ranks.run(with_iterations_set, 2, iteration) == [[False] * (5 - compressed) + [True] * compressed] * 2


def more_vectors(rank: int) -> float:
    """By the remedy that the error names, a full-rank approximation: what plain averaging gives."""
    settings = {"start_powerSGD_iter": 2, "min_compression_rate": 0.1}
    compressed = hooked(network(), comm_hooks.TorchPowerSGDState(None, 40, **settings), bucket_cap_mb=25)
    plain = fastddp.DistributedDataParallel(network())
    for step in range(4):
        backward(compressed, rank, step)
        backward(plain, rank, step)
    return of_gradients(compressed, plain)


def test_more_vectors_than_fit_travel_by_torchs_hook(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"give powerSGD_hook a fastddp\.comm_hooks\.TorchPowerSGDState"):
        PowerSGDState(None, matrix_approximation_rank=33)
    assert max(ranks.run(more_vectors, 2)) < 1e-3


def without_warm_start(rank: int) -> list[Tensor]:
    """Q of each window."""
    state = PowerSGDState(None, start_powerSGD_iter=2, warm_start=False)
    model = hooked(network(), state)
    seen = []
    for _ in range(6):
        backward(model, rank, 0)
        seen.append(state.qs["4.weight"].clone() if "4.weight" in state.qs else torch.empty(0))
    return seen[2:]


def test_without_warm_start_each_window_begins_with_another_q(ranks: RankPool) -> None:
    (qs,) = ranks.run(without_warm_start, 1)
    assert not any(torch.allclose(one, other) for one, other in itertools.combinations(qs, 2))


def collectives_of_a_step(rank: int) -> int:
    """With four buckets of a matrix and a vector each."""
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model = hooked(layers, PowerSGDState(None, start_powerSGD_iter=2), bucket_cap_mb=32 * 32 * 4 / 2**20)
    for _ in range(4):
        model.zero_grad()
        value = model(torch.ones(2, 32)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            value.backward()
    assert len(model.bucket_plan().buckets) == 4
    return sum(event.name == "gloo:all_reduce" for event in profile.events())


def test_p_q_and_what_is_not_compressed_share_collectives_74148(ranks: RankPool) -> None:
    """P of a bucket travels with Q of the one before; torch's hook has three collectives a bucket."""
    assert ranks.run(collectives_of_a_step, 2) == [6, 6]  # the status of the window is the last one


def wrapped(rank: int, wrapper: str) -> float:
    """Factors that travel in 16 bits, against those in fp32."""
    hooks = powerSGD_hook, getattr(comm_hooks, wrapper)(powerSGD_hook)
    whole, cast = (hooked(network(), PowerSGDState(None, start_powerSGD_iter=2), hook) for hook in hooks)
    for step in range(4):
        backward(whole, rank, step)
        backward(cast, rank, step)
    return of_gradients(cast, whole)


@pytest.mark.parametrize(("wrapper", "tolerance"), [("fp16_compress_wrapper", 5e-3), ("bf16_compress_wrapper", 5e-2)])
def test_wrapped_its_factors_travel_in_16_bits(ranks: RankPool, wrapper: str, tolerance: float) -> None:
    for error in ranks.run(wrapped, 2, wrapper):
        assert tolerance / 1000 < error < tolerance


# ------------------------------------------------------------------------------------------------------- what arrives


class Square(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(value))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradients_given(rank: int, given: list[Tensor], approximation: int) -> list[Tensor]:
    """What arrives of gradients that are the same on all ranks, after two windows without compression."""
    state = PowerSGDState(None, approximation, start_powerSGD_iter=2, min_compression_rate=0.1)
    model = hooked(Square(given[0]), state)
    arrived = []
    for gradient in [*given[:1] * 2, *given]:
        model.zero_grad()
        model(gradient).backward()
        arrived.append(model.module.weight.grad.clone())
    return arrived[2:]


def test_a_zero_gradient_stays_zero_and_later_ones_arrive(ranks: RankPool) -> None:
    gradient = torch.randn(12, 1) @ torch.randn(1, 9)
    for zero, *later in ranks.run(gradients_given, 2, [torch.zeros(12, 9), gradient, gradient], 2):
        assert torch.equal(zero, torch.zeros(12, 9))
        assert all(torch.allclose(arrived, gradient, atol=1e-5) for arrived in later)


def test_gradients_of_the_rank_that_travels_arrive_whole_though_earlier_ones_had_less(ranks: RankPool) -> None:
    ones, pair = torch.ones(12, 9), torch.randn(12, 2) @ torch.randn(2, 9)
    for arrived in ranks.run(gradients_given, 2, [ones, pair, pair, pair, pair], 2):
        assert torch.allclose(arrived[0], ones, atol=1e-5)
        assert torch.allclose(arrived[-1], pair, atol=1e-3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_overflowed_leaves_no_trace(ranks: RankPool, bad: float) -> None:
    gradient = torch.randn(12, 1) @ torch.randn(1, 9)
    overflowed = gradient.clone()
    overflowed[3, 4] = bad
    for arrived in ranks.run(gradients_given, 2, [gradient, overflowed, gradient, gradient], 1):
        assert not torch.isfinite(arrived[1]).all()
        assert torch.allclose(arrived[-1], gradient, atol=1e-4)


def strided(rank: int) -> float:
    """A model in channels_last, whose convolutions are matrices in the order of their memory, and odd gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=False))
    module = module.to(memory_format=torch.channels_last)
    module[0].weight.register_hook(lambda gradient: gradient.contiguous())  # unlike its parameter
    exact = copy.deepcopy(module)
    state = PowerSGDState(None, 16, start_powerSGD_iter=2, min_compression_rate=0.1)
    model = hooked(module, state)
    for step in range(4):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        for each in (model, exact):
            each.zero_grad()
            each(images).square().sum().backward()
    assert set(state.qs) == {"0.weight", "2.weight"}
    return of_gradients(model, exact)


def test_matrices_of_full_rank_arrive_whole_whatever_their_strides(ranks: RankPool) -> None:
    assert max(ranks.run(strided, 2)) < 1e-4


def batched(rank: int, approximation: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each parameter: this rank's gradient, the mean, what arrives, and the error, in the first compressed step."""
    module = nn.Linear(7, 5)  # neither bias nor weight ends at a multiple of 16 bytes
    exact = copy.deepcopy(module)
    state = PowerSGDState(None, approximation, start_powerSGD_iter=2)
    model = hooked(module, state, batched_powerSGD_hook)
    for step in range(3):
        inputs = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        for each in (model, exact):
            each.zero_grad()
            each(inputs).square().sum().backward()
    pairs = zip(module.named_parameters(), exact.parameters(), strict=True)
    norm = torch.nn.utils.get_total_norm([parameter.grad.clone() for parameter in module.parameters()])
    assert float(model.last_grad_norm() / norm) == pytest.approx(1, rel=1e-6)
    return [(one.grad, mean(one.grad.clone()), own.grad, state.errors[name].view_as(own)) for (name, own), one in pairs]


@pytest.mark.parametrize("rank", [1, 7])
def test_each_parameters_part_of_a_batched_error_is_what_its_own_gradient_has_lost(ranks: RankPool, rank: int) -> None:
    for given, true_mean, arrived, error in itertools.chain(*ranks.run(batched, 2, rank)):
        assert (given - arrived).abs().max() > 0.1
        assert torch.allclose(error, given - arrived, atol=1e-4)
        if rank == 7:  # a square of full rank arrives whole
            assert difference(arrived, true_mean) < 1e-5


@pytest.mark.parametrize(
    ("parameter", "rank", "rate", "compressed"),
    [
        (torch.empty(40, 40), 1, 2, True),
        (torch.empty(40, 40), 10, 2, False),
        (torch.empty(4, 4), 1, 2, False),
        (torch.empty(40, 40), 4, 5, False),
        (torch.empty(1000), 1, 2, False),
        (torch.empty(16, 3, 3, 3), 1, 2, True),
        (torch.empty(0, 40), 1, 2, False),
        (torch.empty(()), 1, 2, False),
        (torch.empty(40, 40, dtype=torch.complex64), 1, 2, False),
        (torch.empty(40, 1).expand(40, 40), 1, 2, False),
        (torch.empty(40, 40).t(), 1, 2, True),
    ],
)
def test_what_is_compressed(parameter: Tensor, rank: int, rate: float, compressed: bool) -> None:
    assert is_compressed(parameter, rank, rate) == compressed
