"""Embeddings with sparse gradients: the gradients of torch's DDP, as sparse tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from fastddp import comm_hooks
from ranks import RankPool


class Words(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(20, 4, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(10, 4, mode="sum", sparse=True, dtype=dtype)
        self.head = nn.Linear(4, 2, dtype=dtype)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words) + self.bags(words.view(-1, 1) % 10))


def inputs(rank: int, step: int) -> Tensor:
    return torch.randint(0, 20, (3 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module, rank: int, steps: int, accumulate: bool = False) -> list[Tensor]:
    seen = []
    for step in range(steps):
        model.zero_grad()
        if accumulate:
            with model.no_sync():
                model(inputs(rank, step + 50)).square().sum().backward()
        model(inputs(rank, step)).square().sum().backward()
        seen += [parameter.grad.clone() for parameter in model.parameters()]
    return seen


def differences(rank: int, accumulate: bool, dtype: torch.dtype, options: dict[str, Any]) -> list[str]:
    found = []
    ours = gradients(fastddp.DistributedDataParallel(Words(dtype), **options), rank, 3, accumulate)
    theirs = gradients(TorchDDP(Words(dtype), **options), rank, 3, accumulate)
    for number, (mine, torchs) in enumerate(zip(ours, theirs, strict=True)):
        if (mine.layout, mine.shape, mine.dtype) != (torchs.layout, torchs.shape, torchs.dtype):
            found.append(f"gradient {number} is {mine.layout}, {mine.shape}, {mine.dtype}")
        elif not torch.allclose(mine.to_dense(), torchs.to_dense(), rtol=1e-5, atol=1e-6):
            found.append(f"gradient {number} is {mine.to_dense()}, not {torchs.to_dense()}")
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {}),
        (torch.float32, {"gradient_as_bucket_view": True}),
        (torch.float32, {"find_unused_parameters": True}),
    ],
    ids=str,
)
def test_gradients_are_those_of_torchs_ddp(
    ranks: RankPool, world_size: int, accumulate: bool, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert ranks.run(differences, world_size, accumulate, dtype, options) == [[]] * world_size


def factor_and_hook(rank: int) -> tuple[list[float], list[float], int]:
    """A sum over ranks; each rank's own under a hook without communication; and the entries of the first."""
    words = torch.tensor([1, 1, 2] if rank == 0 else [2, 2])
    total = fastddp.DistributedDataParallel(nn.Embedding(3, 1, sparse=True), gradient_average="sum")
    alone = fastddp.DistributedDataParallel(nn.Embedding(3, 1, sparse=True))
    alone.register_comm_hook(None, comm_hooks.noop_hook)
    for model in (total, alone):
        model(words).sum().backward()
    first, second = total.module.weight.grad, alone.module.weight.grad
    return first.to_dense().flatten().tolist(), second.to_dense().flatten().tolist(), first._nnz()


def test_rows_are_weighted_like_gradients_and_each_is_there_once(ranks: RankPool) -> None:
    """Also in a model that has nothing else."""
    total = [0.0, 2.0, 3.0]
    assert ranks.run(factor_and_hook, 2) == [(total, [0.0, 2.0, 1.0], 2), (total, [0.0, 0.0, 2.0], 2)]


def with_hook(rank: int) -> tuple[bool, float]:
    model = fastddp.DistributedDataParallel(Words())
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    pairs = zip(gradients(model, rank, 2), gradients(fastddp.DistributedDataParallel(Words()), rank, 2), strict=True)
    same = all(torch.equal(mine.to_dense(), exact.to_dense()) for mine, exact in pairs if mine.is_sparse)
    norm = torch.nn.utils.get_total_norm([parameter.grad.to_dense() for parameter in model.parameters()])
    return same, (model.last_grad_norm() / norm).item()


def test_hooks_leave_sparse_gradients_alone_and_the_norm_counts_them(ranks: RankPool) -> None:
    assert ranks.run(with_hook, 2) == [(True, pytest.approx(1.0, rel=1e-5))] * 2


def looked_up(rank: int, lookups: list[list[list[int] | None]]) -> list[list[float] | None]:
    """The gradient after each window, never zeroed; ``lookups[window][rank]``: rows of a table, or None: not used."""
    model = fastddp.DistributedDataParallel(
        nn.ModuleList([nn.Embedding(3, 1, sparse=True), nn.Linear(1, 1, bias=False)]), find_unused_parameters=True
    )
    table, head = model.module
    model.module.forward = lambda rows: head(torch.ones(1)).sum() + (0 if rows is None else table(rows).sum())
    seen = []
    for window in lookups:
        rows = window[rank]
        model(rows if rows is None else torch.tensor(rows, dtype=torch.long)).backward()
        gradient = table.weight.grad
        seen.append(None if gradient is None else gradient.to_dense().flatten().tolist())
    return seen


@pytest.mark.parametrize(
    ("lookups", "expected"),
    [
        # All ranks have a gradient or none has, even if it has no rows.
        ([[None, None], [None, []]], [None, [0.0, 0.0, 0.0]]),
        ([[None, None], [None, [1]]], [None, [0.0, 0.5, 0.0]]),
        # A rank that did not use the table contributes what its gradient holds, as if it were dense.
        ([[[0], [2]], [None, [1]]], [[0.5, 0.0, 0.5], [0.5, 0.5, 0.5]]),
    ],
)
def test_ranks_need_not_use_the_same_tables(ranks: RankPool, lookups: list[Any], expected: list[Any]) -> None:
    assert ranks.run(looked_up, 2, lookups) == [expected] * 2


def used_densely_too(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    (model(torch.tensor([1])).sum() + model.module.weight.sum()).backward()


def test_a_dense_gradient_of_a_sparse_module_is_an_error_that_names_it(ranks: RankPool) -> None:
    for error in ranks.errors(used_densely_too, 2):
        assert "parameter weight (number 0, sparse) got a dense gradient" in error.message
