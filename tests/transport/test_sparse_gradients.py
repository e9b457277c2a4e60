"""Embeddings with sparse gradients. Those of torch's DDP, in any program: tests/reducer/test_programs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from on_ranks import on_ranks


class Words(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.bags = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words) + self.bags(words.view(-1, 1) % 10))


def gradients(model: nn.Module, rank: int) -> list[Tensor]:
    seen = []
    for step in range(2):
        model.zero_grad()
        inputs = torch.randint(0, 20, (3 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).square().sum().backward()
        seen += [parameter.grad.clone() for parameter in model.parameters()]
    return seen


@pytest.mark.parametrize("is_sum", [True, False], ids=["a sum over ranks", "a hook without communication"])
@on_ranks(2)
def test_rows_are_weighted_like_gradients_and_each_is_there_once(rank: int, is_sum: bool) -> None:
    """Also in a model that has nothing else."""
    options: dict[str, Any] = {"gradient_average": "sum"} if is_sum else {}
    model = fastddp.DistributedDataParallel(nn.Embedding(3, 1, sparse=True), **options)
    if not is_sum:
        model.register_comm_hook(None, comm_hooks.noop_hook)
    model(torch.tensor([1, 1, 2] if rank == 0 else [2, 2])).sum().backward()
    found = model.module.weight.grad
    own = [[0.0, 2.0, 1.0], [0.0, 0.0, 2.0]]
    assert found.to_dense().flatten().tolist() == ([0.0, 2.0, 3.0] if is_sum else own[rank])
    assert not is_sum or found._nnz() == 2


@on_ranks(2)
def test_hooks_leave_sparse_gradients_alone_and_the_norm_counts_them(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Words())
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    exact = gradients(fastddp.DistributedDataParallel(Words()), rank)
    for mine, expected in zip(gradients(model, rank), exact, strict=True):
        assert not mine.is_sparse or torch.equal(mine.to_dense(), expected.to_dense())
    norm = torch.nn.utils.get_total_norm([parameter.grad.to_dense() for parameter in model.parameters()])
    torch.testing.assert_close(model.last_grad_norm().float(), norm, rtol=1e-5, atol=0)


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
@on_ranks(2)
def test_ranks_need_not_use_the_same_tables(rank: int, lookups: list[Any], expected: list[Any]) -> None:
    """``lookups[window][rank]``: rows of a table, or None: not used. Gradients are never zeroed."""
    model = fastddp.DistributedDataParallel(
        nn.ModuleList([nn.Embedding(3, 1, sparse=True), nn.Linear(1, 1, bias=False)]), find_unused_parameters=True
    )
    table, head = model.module
    model.module.forward = lambda rows: head(torch.ones(1)).sum() + (0 if rows is None else table(rows).sum())
    for window, gradient in zip(lookups, expected, strict=True):
        rows = window[rank]
        model(rows if rows is None else torch.tensor(rows, dtype=torch.long)).backward()
        found = table.weight.grad
        assert (None if found is None else found.to_dense().flatten().tolist()) == gradient


@on_ranks(2)
def test_a_dense_gradient_of_a_sparse_module_is_an_error_that_names_it(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    loss = model(torch.tensor([1])).sum() + model.module.weight.sum()
    with pytest.raises(RuntimeError, match=r"parameter weight \(number 0, sparse\) got a dense gradient"):
        loss.backward()
