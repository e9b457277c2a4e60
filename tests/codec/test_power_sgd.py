"""PowerSGD against the algorithm in plain torch, step by step, and where it has to agree with everything else."""

from __future__ import annotations

import copy
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
from models import RaisesOnRank
from ranks import RankPool

SMALL_BUCKETS = {"bucket_cap_mb": 0.03}
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])


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


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 48, generator=generator).to(dtype)


def loss(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(batch(rank, step, dtype)).square().mean()


class Reference:
    """The algorithm for one parameter, with one allreduce for P and one for Q."""

    def __init__(self, parameter: Tensor, q: Tensor, state: PowerSGDState) -> None:
        self.rows, self.columns = matrix_shape(parameter)
        self.q = q.clone().double()
        self.p = torch.empty(0)
        self.error = torch.zeros(self.rows, self.columns, dtype=torch.float64)
        self.state = state

    def step(self, gradient: Tensor) -> Tensor:
        matrix = gradient.double().view(self.rows, self.columns)
        if self.state.use_error_feedback:
            matrix = matrix + self.error
        self.p = orthonormal(mean(matrix @ self.q.T))
        q = mean(self.p.T @ matrix)
        result = self.p @ q
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
    return float((ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def against_the_reference(
    rank: int, steps: int, options: dict[str, Any], view: bool, dtype: torch.dtype, caps: float, tolerance: float
) -> dict[str, float]:
    """The largest difference of gradients, errors and factors, over all steps and parameters."""
    state = PowerSGDState(None, start_powerSGD_iter=2, **options)
    model = fastddp.DistributedDataParallel(network(dtype), bucket_cap_mb=caps, gradient_as_bucket_view=view)
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
    options = {"matrix_approximation_rank": rank}
    for worst in ranks.run(against_the_reference, world_size, 24, options, False, torch.float32, 0.03, 1e-3):
        assert max(worst.values()) < 1e-3


@VIEWS
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("caps", [0.0, 25.0], ids=["a bucket each", "one bucket"])
def test_so_it_is_whatever_the_buckets_and_options(ranks: RankPool, feedback: bool, view: bool, caps: float) -> None:
    options = {"matrix_approximation_rank": 3, "use_error_feedback": feedback}
    for worst in ranks.run(against_the_reference, 2, 8, options, view, torch.float32, caps, 1e-3):
        assert max(worst.values()) < 1e-3


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float16, 0.1), (torch.bfloat16, 0.5)], ids=str
)
def test_so_it_is_for_other_dtypes(ranks: RankPool, dtype: torch.dtype, tolerance: float) -> None:
    for worst in ranks.run(
        against_the_reference, 2, 6, {"matrix_approximation_rank": 1}, False, dtype, 0.03, tolerance
    ):
        assert worst["gradient"] < tolerance


def as_torchs_hook(rank: int, approximation: int, steps: int) -> float:
    """In one bucket, where torch's hook works; from the same Q."""
    settings = {"matrix_approximation_rank": approximation, "start_powerSGD_iter": 2}
    state = PowerSGDState(None, **settings)
    torchs_state = torchs.PowerSGDState(None, orthogonalization_epsilon=1e-30, **settings)
    ours = fastddp.DistributedDataParallel(network(), bucket_cap_mb=100)
    theirs = TorchDDP(network(), bucket_cap_mb=100)
    ours.register_comm_hook(state, powerSGD_hook)
    theirs.register_comm_hook(torchs_state, torchs.powerSGD_hook)
    worst = 0.0
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        loss(theirs, rank, step).backward()
        output = loss(ours, rank, step)
        if step == 2:  # torch lays the first Q of all matrices out one behind the other, in the order of the bucket
            generator = torch.Generator().manual_seed(torchs_seed(torchs_state))
            for q in torchs_order(ours, state):
                q.copy_(orthonormal(torch.randn(q.shape[1], q.shape[0], generator=generator).double()).T)
        output.backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            worst = max(worst, difference(one.grad, other.grad.double()))
    return worst


def torchs_seed(state: torchs.PowerSGDState) -> int:
    import numpy as np

    return int(np.random.RandomState(0).randint(1_000_000_000))


def torchs_order(model: fastddp.DistributedDataParallel, state: PowerSGDState) -> list[Tensor]:
    names = model._parameters_to_reduce.names
    return [state.qs[names[index]] for index in model._setting.plan[0] if names[index] in state.qs]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_in_one_bucket_gradients_are_those_of_torchs_hook(ranks: RankPool, rank: int) -> None:
    assert max(ranks.run(as_torchs_hook, 2, rank, 22)) < 2e-2


def bits(rank: int, hook: str, options: dict[str, Any], steps: int) -> Tensor:
    """Everything that has to be equal on all ranks after some steps of training."""
    state = PowerSGDState(None, start_powerSGD_iter=2, **options)
    model = fastddp.DistributedDataParallel(network(), **SMALL_BUCKETS)
    model.register_comm_hook(state, getattr(comm_hooks, hook))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return torch.cat([tensor.detach().flatten().double() for tensor in [*model.parameters(), *state.qs.values()]])


def with_iterations_set(rank: int, iteration: int) -> list[int]:
    """Of each window, whether it was compressed: then gradients have the rank that travels."""
    state = PowerSGDState(None, start_powerSGD_iter=6)
    model = fastddp.DistributedDataParallel(network(), **SMALL_BUCKETS)
    model.register_comm_hook(state, powerSGD_hook)
    ranks_of_gradients = []
    for step in range(5):
        if step == 3:
            state.iter = iteration
        model.zero_grad()
        loss(model, rank, step).backward()
        ranks_of_gradients.append(int(torch.linalg.matrix_rank(model.module[6].weight.grad)))
    assert state.iter == iteration + 2
    assert (state.compression_stats()[0] > 0) == (iteration >= 5)
    return [number == 1 for number in ranks_of_gradients]


def test_to_set_the_iteration_moves_the_start_of_compression(ranks: RankPool) -> None:
    assert ranks.run(with_iterations_set, 2, 6) == [[False, False, False, True, True]] * 2
    assert ranks.run(with_iterations_set, 2, 5) == [[False, False, False, False, True]] * 2
    assert ranks.run(with_iterations_set, 2, 0) == [[False] * 5] * 2
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        PowerSGDState(None).iter = 2.5


def more_vectors(rank: int) -> list[bool]:
    """By the remedy that the error names, a full-rank approximation: what plain averaging gives."""
    with pytest.raises(ValueError, match=r"give powerSGD_hook a fastddp\.comm_hooks\.TorchPowerSGDState"):
        PowerSGDState(None, matrix_approximation_rank=33)
    settings = {"start_powerSGD_iter": 2, "min_compression_rate": 0.1}
    compressed, plain = (fastddp.DistributedDataParallel(network()) for _ in range(2))
    compressed.register_comm_hook(comm_hooks.TorchPowerSGDState(None, 40, **settings), powerSGD_hook)
    for model in (compressed, plain):
        for step in range(4):
            model.zero_grad()
            loss(model, rank, step).backward()
    pairs = zip(compressed.parameters(), plain.parameters(), strict=True)
    return [torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5) for a, b in pairs]


def test_more_vectors_than_fit_travel_by_torchs_hook(ranks: RankPool) -> None:
    for same in ranks.run(more_vectors, 2):
        assert all(same)


def without_warm_start(rank: int) -> list[bool]:
    """Whether Q is another one in each window."""
    state = PowerSGDState(None, start_powerSGD_iter=2, warm_start=False)
    model = fastddp.DistributedDataParallel(network(), **SMALL_BUCKETS)
    model.register_comm_hook(state, powerSGD_hook)
    seen: list[Tensor] = []
    for step in range(6):
        loss(model, rank, 0).backward()
        model.zero_grad()
        if step >= 2:
            seen.append(state.qs["4.weight"].clone())
    return [torch.allclose(a, b) for i, a in enumerate(seen) for b in seen[:i]]


def test_without_warm_start_each_window_begins_with_another_q(ranks: RankPool) -> None:
    assert not any(ranks.run(without_warm_start, 1)[0])


class Square(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(value))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradients_given(rank: int, given: list[Tensor], approximation: int) -> list[Tensor]:
    """What arrives of gradients that are the same on all ranks, after two windows without compression."""
    model = fastddp.DistributedDataParallel(Square(given[0]))
    state = PowerSGDState(None, approximation, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, powerSGD_hook)
    arrived = []
    for gradient in [*given[:1] * 2, *given]:
        model.zero_grad()
        model(gradient).backward()
        arrived.append(model.module.weight.grad.clone())
    return arrived[2:]


def test_a_zero_gradient_stays_zero_and_later_ones_arrive(ranks: RankPool) -> None:
    gradient = torch.randn(12, 1) @ torch.randn(1, 9)
    for zero, first, second in ranks.run(gradients_given, 2, [torch.zeros(12, 9), gradient, gradient], 2):
        assert torch.equal(zero, torch.zeros(12, 9))
        assert torch.allclose(first, gradient, atol=1e-5)
        assert torch.allclose(second, gradient, atol=1e-5)


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


def after_a_failure(rank: int, where: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rank 0 raises in the backward of window 3, before the gradients of layers below `where`."""
    model = fastddp.DistributedDataParallel(network(), bucket_cap_mb=0)
    state = PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    step = 0
    model.module[where].register_forward_hook(lambda _, __, output: RaisesOnRank.apply(output, step == 3 and rank == 0))
    for step in range(6):
        model.zero_grad()
        value = loss(model, rank, step)
        if step == 3:
            with pytest.raises((ValueError, RuntimeError), match=r"on purpose|failed on rank 0"):
                value.backward()
        else:
            value.backward()
        if step == 4:
            kept = torch.cat([error.flatten() for error in state.errors.values()])
    return (
        torch.cat([parameter.grad.flatten() for parameter in model.parameters()]),
        torch.cat([q.flatten() for q in state.qs.values()]),
        kept,
    )


@pytest.mark.parametrize("where", [2, 5, 7])
def test_after_a_failed_window_factors_are_equal_again_and_nothing_is_lost(ranks: RankPool, where: int) -> None:
    (first, first_q, kept), (second, second_q, other_kept) = ranks.run(after_a_failure, 2, where)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert torch.equal(first_q, second_q)
    assert torch.isfinite(kept).all()
    assert torch.isfinite(other_kept).all()


def collectives_of_a_step(rank: int) -> int:
    """With four buckets of a matrix and a vector each."""
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model = fastddp.DistributedDataParallel(layers, bucket_cap_mb=32 * 32 * 4 / 2**20)
    model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
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


def accumulated(rank: int, view: bool) -> float:
    """Two backward passes under no_sync and one that synchronises against one with all three losses."""
    results = []
    for windows in ([0, 1, 2], [2]):
        model = fastddp.DistributedDataParallel(network(), gradient_as_bucket_view=view, **SMALL_BUCKETS)
        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
        for step in range(5):
            model.zero_grad()
            for part in windows[:-1]:
                with model.no_sync():
                    loss(model, rank, 10 * step + part).backward()
            rest = [0, 1, 2][len(windows) - 1 :]
            inputs = [batch(rank, 10 * step + part) for part in rest]
            sum(output.square().mean() for output in model(torch.cat(inputs)).split(8)).backward()
        results.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return difference(results[0], results[1].double())


@VIEWS
def test_gradients_accumulated_under_no_sync_are_compressed_as_one(ranks: RankPool, view: bool) -> None:
    assert max(ranks.run(accumulated, 2, view)) < 1e-3


def wrapped(rank: int, wrapper: str) -> tuple[float, str]:
    """Factors that travel in 16 bits, against those in fp32."""
    results = []
    for hook in (powerSGD_hook, getattr(comm_hooks, wrapper)(powerSGD_hook)):
        model = fastddp.DistributedDataParallel(network(), **SMALL_BUCKETS)
        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), hook)
        for step in range(4):
            model.zero_grad()
            loss(model, rank, step).backward()
        results.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return difference(results[1], results[0].double()), str(getattr(model._exchange, "wire", None))


@pytest.mark.parametrize(("wrapper", "dtype", "tolerance"), [("fp16", "float16", 5e-3), ("bf16", "bfloat16", 5e-2)])
def test_wrapped_its_factors_travel_in_16_bits(ranks: RankPool, wrapper: str, dtype: str, tolerance: float) -> None:
    for error, wire in ranks.run(wrapped, 2, f"{wrapper}_compress_wrapper"):
        assert wire == f"torch.{dtype}"
        assert 0 < error < tolerance


def strided(rank: int) -> float:
    """A model in channels_last, whose convolutions are matrices in the order of their memory, and odd gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=False))
    module = module.to(memory_format=torch.channels_last)
    module[0].weight.register_hook(lambda gradient: gradient.contiguous())  # unlike its parameter
    exact = copy.deepcopy(module)
    model = fastddp.DistributedDataParallel(module)
    state = PowerSGDState(None, 16, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        exact.zero_grad()
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(images).square().sum().backward()
        exact(images).square().sum().backward()
    assert set(state.qs) == {"0.weight", "2.weight"}
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return max(difference(ours.grad, theirs.grad.double()) for ours, theirs in pairs)


def test_matrices_of_full_rank_arrive_whole_whatever_their_strides(ranks: RankPool) -> None:
    assert max(ranks.run(strided, 2)) < 1e-4


def batched_exact(rank: int) -> tuple[float, float, float]:
    """A bucket as a square of full rank is not compressed at all: the mean, its norm, and no error."""
    module = nn.Linear(7, 5)
    exact = copy.deepcopy(module)
    model = fastddp.DistributedDataParallel(module)
    state = PowerSGDState(None, 7, start_powerSGD_iter=2)
    model.register_comm_hook(state, batched_powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        exact.zero_grad()
        for peer in range(2):
            inputs = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + peer))
            exact(inputs).square().sum().backward()
            if peer == rank:
                model(inputs).square().sum().backward()
    error = max(float(e.abs().max()) for e in state.errors.values())
    norm = torch.nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()])
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    worst = max(difference(ours.grad, theirs.grad.double() / 2) for ours, theirs in pairs)
    return worst, float(model.last_grad_norm() / norm), error


def batched_errors(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Of each parameter: the error after the first compressed step, and its gradient less what became of it."""
    module = nn.Linear(7, 5)  # neither bias nor weight ends at a multiple of 16 bytes
    exact = copy.deepcopy(module)
    model = fastddp.DistributedDataParallel(module)
    state = PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, batched_powerSGD_hook)
    for step in range(3):
        inputs = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        for each in (model, exact):
            each.zero_grad()
            each(inputs).square().sum().backward()
    pairs = zip(module.named_parameters(), exact.parameters(), strict=True)
    return [(state.errors[name].view_as(own), other.grad - own.grad) for (name, own), other in pairs]


def test_each_parameters_part_of_a_batched_error_is_what_its_own_gradient_has_lost(ranks: RankPool) -> None:
    for errors in ranks.run(batched_errors, 2):
        for error, lost in errors:
            assert lost.abs().max() > 0.1
            assert torch.allclose(error, lost, atol=1e-4)


def test_a_batched_square_of_full_rank_arrives_whole(ranks: RankPool) -> None:
    for worst, norm, error in ranks.run(batched_exact, 2):
        assert worst < 1e-5
        assert norm == pytest.approx(1, rel=1e-6)
        assert error < 50  # on each rank it is its distance from the mean


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
