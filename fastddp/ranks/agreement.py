"""Compares what ranks have: settings of a hook, numbers, and how their process group averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastddp.ranks.listing import listed
from fastddp.ranks.together import of_all_ranks, together


def gather_numbers(
    numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype = torch.float64
) -> list[list[Any]]:
    """The numbers of each rank of ``group``, as many on each, in one all-gather."""
    return of_all_ranks(torch.tensor(numbers, dtype=dtype, device=device), group).tolist()


def difference(names: Sequence[str], by_rank: Sequence[Sequence[float]]) -> str | None:
    """The first name for which ranks have different numbers, with these numbers; None: there is none.

    >>> difference(["iter"], [[3.0], [4.0], [3.0]])
    'iter is 3 on rank 0, 2; 4 on rank 1'
    """
    for name, values in zip(names, zip(*by_rank, strict=True), strict=True):
        if len(set(values)) == 1:
            continue
        ranks_of: dict[float, list[int]] = {}
        for rank, value in enumerate(values):
            ranks_of.setdefault(value, []).append(rank)
        return f"{name} is " + "; ".join(f"{value:.17g} on rank {listed(ranks)}" for value, ranks in ranks_of.items())
    return None


def greatest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Of each value the greatest of all ranks of ``group``, a collective; of no values none, without one."""
    if not values:
        return []
    wire = torch.tensor(values, dtype=torch.float64, device=device)
    together(dist.all_reduce, wire, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in wire.tolist()]


def divides_first(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``ReduceOp.AVG`` multiplies what each rank sends by 1 / ranks, and then adds, as NCCL does.

    Numbers near the largest fp32 show this: their sum is infinite, the sum of their shares is not. False where there is
    no average, and for one rank: NCCL runs a kernel for its average, but none for its sum.

    A collective: all ranks of ``process_group`` call it together, and all get the same answer.
    """
    if process_group.size() == 1:
        return False
    number = torch.full((1,), 0.9 * torch.finfo(torch.float32).max, device=device)
    average = number.clone()
    try:
        together(dist.all_reduce, average, dist.ReduceOp.AVG, group=process_group)
    except RuntimeError:
        return False
    return bool(torch.isclose(average, number, rtol=1e-5))
