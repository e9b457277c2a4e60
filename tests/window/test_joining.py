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
from ranks import RankPool
from releases import FORWARD_SYNC_BUFFERS


def module() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(wrap: Any, rank: int, batches: list[int], accumulate: bool, **join: Any) -> list[Tensor]:
    """Parameters and buffers after two epochs in which rank r has ``batches[r]`` batches."""
    model = wrap(module())
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
    rank: int, batches: list[int], accumulate: bool, options: dict[str, Any], join: dict[str, Any]
) -> float:
    ours = train(lambda m: fastddp.DistributedDataParallel(m, **options), rank, batches, accumulate, **join)
    theirs = train(lambda m: TorchDDP(m, **options), rank, batches, accumulate, **join)
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("batches", [[2, 5], [5, 2], [0, 3], [3, 3]], ids=str)
@pytest.mark.parametrize("by_all", [True, False], ids=["by all ranks", "by ranks with inputs"])
def test_training_ends_as_under_torchs_ddp(ranks: RankPool, batches: list[int], by_all: bool) -> None:
    join = {"divide_by_initial_world_size": by_all}
    for difference in ranks.run(differences, 2, batches, False, {}, join):
        assert difference < 1e-6


def gradients_by_ranks_with_inputs(rank: int) -> list[float]:
    """Rank r has r + 1 inputs, each of which gives the gradient r + 1; and then all have one more."""
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    seen = []

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
        seen.append(model.module.weight.grad.item())

    with model.join(divide_by_initial_world_size=False):
        for _ in range(rank + 1):
            step()
    step()
    return seen


def test_the_mean_is_over_ranks_with_inputs_as_long_as_the_context_lasts(ranks: RankPool) -> None:
    for rank, seen in enumerate(ranks.run(gradients_by_ranks_with_inputs, 3)):
        assert seen == pytest.approx([*[2.0, 2.5, 3.0][: rank + 1], 2.0])


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {FORWARD_SYNC_BUFFERS: False}],
    ids=str,
)
def test_with_options_too(ranks: RankPool, options: dict[str, Any]) -> None:
    for difference in ranks.run(differences, 3, [1, 4, 2], False, options, {}):
        assert difference < 1e-6


def test_with_accumulation_too(ranks: RankPool) -> None:
    for difference in ranks.run(differences, 2, [2, 6], True, {}, {}):
        assert difference < 1e-6


class Parts(nn.Module):
    """Two parameters, whose gradients are the input, and a table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1)) for _ in range(2))
        self.words = nn.Embedding(2, 1, sparse=True)

    def forward(self, x: float, used: str) -> Tensor:
        loss = sum((getattr(self, name) * x).sum() for name in used)
        return loss + self.words(torch.tensor([1])).sum()


def late_and_sparse(rank: int) -> list[tuple[float | None, list[float]]]:
    """Rank 1 uses b for the first time, behind its bucket, when rank 0 has no inputs any more."""
    model = fastddp.DistributedDataParallel(Parts(), find_unused_parameters=True, bucket_cap_mb=0)
    seen = []
    with model.join():
        for used in ["a", "a"] if rank == 0 else ["a", "a", "ba", "a"]:
            model.zero_grad()
            model(1.0, used).backward()
            b = model.module.b.grad
            seen.append((None if b is None else b.item(), model.module.words.weight.grad.to_dense().flatten().tolist()))
    return seen


def test_late_and_sparse_gradients_need_the_ranks_without_inputs_too(ranks: RankPool) -> None:
    first, second = ranks.run(late_and_sparse, 2)
    assert first == [(None, [0.0, 1.0])] * 2
    assert second == [(None, [0.0, 1.0])] * 2 + [(0.5, [0.0, 0.5]), (None, [0.0, 0.5])]


def under_power_sgd(rank: int) -> list[tuple[float, float]]:
    """The least and the greatest element of a gradient of rank one, which PowerSGD gets right, in each step."""
    model = fastddp.DistributedDataParallel(nn.Linear(8, 8, bias=False))
    state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, comm_hooks.powerSGD_hook)
    seen = []
    with model.join():
        for _ in range([7, 4][rank]):
            model.zero_grad()
            model(torch.full((1, 8), rank + 1.0)).sum().backward()
            seen.append((model.module.weight.grad.min().item(), model.module.weight.grad.max().item()))
    return seen


def test_under_powersgd_a_rank_without_inputs_adds_nothing(ranks: RankPool) -> None:
    """What the mean of both has left of the longer rank's gradients, -0.5 a step, travels with its next one."""
    longer, _ = ranks.run(under_power_sgd, 2)
    means = [1.5] * 4 + [(1 - 1) / 2, 1 / 2, (1 + 0.5) / 2]
    assert longer == [pytest.approx((mean, mean), rel=1e-5, abs=1e-5) for mean in means]


def weighted(rank: int) -> list[float]:
    """Rank 0 has one input, rank 1 three; rank r's weight is r + 1."""
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), gradient_average=lambda: rank + 1.0)
    seen = []
    with model.join():
        for _ in range(1 + 2 * rank):
            model.zero_grad()
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            seen.append(model.module.weight.grad.item())
    return seen


def test_a_rank_without_inputs_has_no_weight(ranks: RankPool) -> None:
    first, second = ranks.run(weighted, 2)
    assert first == pytest.approx([5 / 3])
    assert second == pytest.approx([5 / 3, 2.0, 2.0])


def over_pairs(rank: int) -> list[float]:
    """Ranks average in pairs; rank 0 has one input, the others two."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(pairs[rank // 2], comm_hooks.allreduce_hook)
    seen = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(min(rank + 1, 2)):
            model.zero_grad()
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            seen.append(model.module.weight.grad.item())
    return seen


def test_the_ranks_with_inputs_are_those_of_the_exchange(ranks: RankPool) -> None:
    assert ranks.run(over_pairs, 4) == [[1.5], [1.5, 2.0], [3.5, 3.5], [3.5, 3.5]]


def early_end(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1))
    with model.join(throw_on_early_termination=True):
        for _ in range(2 + rank):
            model(torch.ones(1, 1)).sum().backward()


def test_an_early_end_is_an_error_on_all_ranks_if_asked_for(ranks: RankPool) -> None:
    for error in ranks.errors(early_end, 2):
        assert "exhausted" in error.message


def disabled(rank: int) -> float:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.join(enable=False):
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()


def test_a_context_that_is_switched_off_changes_nothing(ranks: RankPool) -> None:
    assert ranks.run(disabled, 2) == [1.5, 1.5]
