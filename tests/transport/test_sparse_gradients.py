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


def gradients(model: nn.Module, rank: int, steps: int, accumulate: bool) -> list[Tensor]:
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
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_gradients_are_those_of_torchs_ddp(
    ranks: RankPool, world_size: int, accumulate: bool, options: dict[str, Any]
) -> None:
    assert ranks.run(differences, world_size, accumulate, torch.float32, options) == [[]] * world_size


def test_double_precision_too(ranks: RankPool) -> None:
    assert ranks.run(differences, 2, False, torch.float64, {}) == [[], []]


def factor_and_hook(rank: int) -> tuple[list[float], list[float], int]:
    """A sum over ranks; each rank's own under a hook without communication; and the entries of the first."""
    words = torch.tensor([1, 1, 2] if rank == 0 else [2, 2])
    total = fastddp.DistributedDataParallel(nn.Embedding(3, 1, sparse=True), gradient_average="sum")
    alone = fastddp.DistributedDataParallel(nn.Embedding(3, 1, sparse=True))
    alone.register_comm_hook(None, comm_hooks.noop_hook)
    for model in (total, alone):
        model(words).sum().backward()
    gradient = total.module.weight.grad
    return (
        gradient.to_dense().flatten().tolist(),
        alone.module.weight.grad.to_dense().flatten().tolist(),
        gradient._nnz(),
    )


def test_rows_are_weighted_like_gradients_and_each_is_there_once(ranks: RankPool) -> None:
    (first, own, entries), (second, others_own, _) = ranks.run(factor_and_hook, 2)
    assert first == second == [0.0, 2.0, 3.0]
    assert entries == 2
    assert (own, others_own) == ([0.0, 2.0, 1.0], [0.0, 0.0, 2.0])


def only_sparse(rank: int) -> list[float]:
    model = fastddp.DistributedDataParallel(nn.Embedding(4, 1, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([rank])).sum().backward()
        optimizer.step()
    return model.module.weight.grad.to_dense().flatten().tolist()


def test_a_model_may_have_nothing_but_sparse_gradients(ranks: RankPool) -> None:
    assert ranks.run(only_sparse, 2) == [[0.5, 0.5, 0.0, 0.0]] * 2


def with_hook(rank: int) -> list[Any]:
    model = fastddp.DistributedDataParallel(Words())
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    seen = gradients(model, rank, 2, False)
    reference = gradients(fastddp.DistributedDataParallel(Words()), rank, 2, False)
    sparse = [(mine, exact) for mine, exact in zip(seen, reference, strict=True) if mine.is_sparse]
    norms = [torch.nn.utils.get_total_norm([parameter.grad.to_dense() for parameter in model.parameters()])]
    return [all(torch.equal(a.to_dense(), b.to_dense()) for a, b in sparse), (model.last_grad_norm() / norms[0]).item()]


def test_hooks_leave_sparse_gradients_alone_and_the_norm_counts_them(ranks: RankPool) -> None:
    for same, ratio in ranks.run(with_hook, 2):
        assert same
        assert ratio == pytest.approx(1.0, rel=1e-5)


def unused_on_one(rank: int) -> tuple[list[float], None]:
    model = fastddp.DistributedDataParallel(
        nn.ModuleList([nn.Embedding(3, 1, sparse=True), nn.Embedding(3, 1, sparse=True), nn.Linear(1, 1)]),
        find_unused_parameters=True,
    )
    first, second, head = model.module
    model.module.forward = lambda use: head(first(torch.tensor([rank])) if use else torch.zeros(1, 1)).sum()
    for _ in range(2):
        model.zero_grad()
        model(rank == 1).backward()
    return first.weight.grad.to_dense().flatten().tolist(), second.weight.grad


def test_ranks_without_rows_contribute_none(ranks: RankPool) -> None:
    for gradient, unused in ranks.run(unused_on_one, 2):
        assert gradient[0] == gradient[2] == 0.0
        assert gradient[1] != 0.0
        assert unused is None


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


def test_all_ranks_have_a_gradient_or_none_has_even_if_it_has_no_rows(ranks: RankPool) -> None:
    assert ranks.run(looked_up, 2, [[None, None], [None, []]]) == [[None, [0.0, 0.0, 0.0]]] * 2


def test_a_rank_that_did_not_use_a_table_contributes_what_its_gradient_holds_as_if_it_were_dense(
    ranks: RankPool,
) -> None:
    assert ranks.run(looked_up, 2, [[[0], [2]], [None, [1]]]) == [[[0.5, 0.0, 0.5], [0.5, 0.5, 0.5]]] * 2


def used_densely_too(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    (model(torch.tensor([1])).sum() + model.module.weight.sum()).backward()


def test_a_dense_gradient_of_a_sparse_module_is_an_error_that_names_it(ranks: RankPool) -> None:
    for error in ranks.errors(used_densely_too, 2):
        assert "parameter weight (number 0, sparse) got a dense gradient" in error.message


def failed_backward(rank: int) -> list[float]:
    model = fastddp.DistributedDataParallel(Words())
    if rank == 0:
        model.module.words.weight.register_hook(lambda gradient: 1 / 0)
    loss = model(inputs(rank, 0)).sum()
    with pytest.raises(ZeroDivisionError if rank == 0 else RuntimeError):
        loss.backward()
    if rank == 0:
        model.module.words.weight._backward_hooks.clear()
    model.zero_grad()
    model(inputs(rank, 1)).sum().backward()
    return model.module.words.weight.grad.to_dense().flatten().tolist()


def test_where_one_rank_fails_all_do_and_the_next_step_is_right(ranks: RankPool) -> None:
    gradient, other = ranks.run(failed_backward, 2)
    assert gradient == other
