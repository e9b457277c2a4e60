"""Compares the ranks' settings of a hook, so that ranks with different ones stop before they exchange gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fastddp.ranks.listing import listed
from fastddp.ranks.together import together


def gather_numbers(numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[list[float]]:
    """The numbers of each rank of ``group``, in one all-gather."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    everywhere = [torch.empty_like(mine) for _ in range(group.size())]
    together(dist.all_gather, everywhere, mine, group=group)
    return [of_rank.tolist() for of_rank in everywhere]


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
