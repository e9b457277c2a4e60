"""Uneven inputs: ranks that have no more of them (torch's Join)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import comm_hooks
from parts import Parts, wrapped
from ranks import RankPool
from releases import FORWARD_SYNC_BUFFERS


def train(wrap: Any, rank: int, batches: list[int], accumulate: bool, **join: Any) -> list[Tensor]:
    """Parameters and buffers after two epochs in which rank r has ``batches[r]`` batches."""
    torch.manual_seed(2)
    model = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        with model.join(**join):
            for batch in range(batches[rank]):
                generator = torch.Generator().manual_seed(100 * epoch + 10 * batch + rank)
                inputs = torch.randn(5, 3, generator=generator)
                if accumulate and batch % 2 == 0:
                    with model.no_sync():
                        model(inputs).square().sum().backward()
                    continue
                model(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def differences(
    rank: int, batches: list[int], options: dict[str, Any], accumulate: bool, join: dict[str, Any]
) -> float:
    ours = train(lambda m: fastddp.DistributedDataParallel(m, **options), rank, batches, accumulate, **join)
    theirs = train(lambda m: TorchDDP(m, **options), rank, batches, accumulate, **join)
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True))


BY_INPUTS = {"divide_by_initial_world_size": False}


@pytest.mark.parametrize(
    ("batches", "options", "accumulate", "join"),
    [
        *((batches, {}, False, join) for batches in ([2, 5], [5, 2], [0, 3], [3, 3]) for join in ({}, BY_INPUTS)),
        ([1, 4, 2], {"gradient_as_bucket_view": True}, False, {}),
        ([1, 4, 2], {"find_unused_parameters": True}, False, {}),
        ([1, 4, 2], {FORWARD_SYNC_BUFFERS: False}, False, {}),
        ([2, 6], {}, True, {}),
        ([3, 3], {}, False, {"enable": False}),
    ],
    ids=str,
)
def test_training_ends_as_under_torchs_ddp(
    ranks: RankPool, batches: list[int], options: dict[str, Any], accumulate: bool, join: dict[str, Any]
) -> None:
    assert max(ranks.run(differences, len(batches), batches, options, accumulate, join)) < 1e-6


class Words(Parts):
    """Parts, and a table of words whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__("ab")
        self.words = nn.Embedding(2, 1, sparse=True)

    def forward(self, x: Tensor, used: str | None = None, fails: bool = False) -> Tensor:
        return super().forward(x, used, fails) + self.words(torch.tensor([1])).sum()


def late_and_sparse(rank: int) -> list[tuple[float | None, list[float]]]:
    """Rank 1 uses b for the first time, behind its bucket, when rank 0 has no inputs any more."""
    model = wrapped(Words(), find_unused_parameters=True)
    seen = []
    with model.join():
        for used in ["a", "a"] if rank == 0 else ["a", "a", "ba", "a"]:
            model.zero_grad()
            model(torch.ones(3), used).backward()
            b = model.module.b.grad
            words = model.module.words.weight.grad.to_dense().flatten().tolist()
            seen.append((None if b is None else b[0].item(), words))
    return seen


def test_late_and_sparse_gradients_need_the_ranks_without_inputs_too(ranks: RankPool) -> None:
    first, second = ranks.run(late_and_sparse, 2)
    assert first == [(None, [0.0, 1.0])] * 2
    assert second == [(None, [0.0, 1.0])] * 2 + [(0.5, [0.0, 0.5]), (None, [0.0, 0.5])]


def of_inputs(rank: int, inputs: list[int], hook: str, join: dict[str, Any], **options: Any) -> list[float]:
    """The gradient of each of this rank's inputs, which gives rank + 1 by itself, and of one more for all behind it."""
    if options.get("gradient_average") == "rank + 1":
        options["gradient_average"] = lambda: rank + 1.0
    model = fastddp.DistributedDataParallel(nn.Linear(8, 8, bias=False), **options)
    if hook == "PowerSGD":
        state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    elif hook == "over pairs":
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model.register_comm_hook(pairs[rank // 2], comm_hooks.allreduce_hook)
    seen: list[float] = []

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 8), rank + 1.0)).sum().backward()
        gradient = model.module.weight.grad
        assert (gradient.max() - gradient.min()).abs() < 1e-5
        seen.append(gradient[0, 0].item())

    with model.join(**join):
        for _ in range(inputs[rank]):
            step()
    step()
    return seen


@pytest.mark.parametrize(
    ("inputs", "hook", "join", "options", "expected"),
    [
        ([1, 2, 3], "", BY_INPUTS, {}, [[2.0, 2.0], [2.0, 2.5, 2.0], [2.0, 2.5, 3.0, 2.0]]),
        # A rank without inputs has no weight.
        ([1, 3], "", {}, {"gradient_average": "rank + 1"}, [[5 / 3, 5 / 3], [5 / 3, 2.0, 2.0, 5 / 3]]),
        # The ranks with inputs are those of the exchange.
        ([1, 2, 2, 2], "over pairs", BY_INPUTS, {}, [[1.5, 1.5], [1.5, 2.0, 1.5], [3.5] * 3, [3.5] * 3]),
    ],
)
def test_the_mean_is_over_ranks_with_inputs_as_long_as_the_context_lasts(
    ranks: RankPool,
    inputs: list[int],
    hook: str,
    join: dict[str, Any],
    options: dict[str, Any],
    expected: list[list[float]],
) -> None:
    for seen, of_rank in zip(ranks.run(of_inputs, len(inputs), inputs, hook, join, **options), expected, strict=True):
        assert seen == pytest.approx(of_rank)


def test_under_powersgd_a_rank_without_inputs_adds_nothing(ranks: RankPool) -> None:
    """What the mean of both has left of the longer rank's gradients, -0.5 a step, travels with its next one."""
    longer, _ = ranks.run(of_inputs, 2, [7, 4], "PowerSGD", {})
    means = [1.5] * 4 + [(1 - 1) / 2, 1 / 2, (1 + 0.5) / 2]
    assert longer[:7] == pytest.approx(means, rel=1e-5, abs=1e-5)


def early_end(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    with model.join(throw_on_early_termination=True):
        for _ in range(2 + rank):
            model(torch.ones(1, 1)).sum().backward()


def test_an_early_end_is_an_error_on_all_ranks_if_asked_for(ranks: RankPool) -> None:
    for error in ranks.errors(early_end, 2):
        assert "exhausted" in error.message
