"""Checks sums: part of a wire is added up a second time, by another way and with more digits, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp._C import SumAudit, WireLayout
from fastddp.together import finish

REGION_BYTES = 2**18  # of a wire, checked at once; much smaller than a bucket, because it travels again


@dataclass(frozen=True)
class Region:
    """Elements [begin, end) of the wire of a bucket."""

    bucket: int
    begin: int
    end: int


def regions(layouts: Sequence[WireLayout]) -> list[Region]:
    """All buckets' wires, cut into regions."""
    found = []
    for bucket, layout in enumerate(layouts):
        begin, count = layout.members[-1]
        extent = begin + count
        step = REGION_BYTES // layout.dtype.itemsize
        found += [Region(bucket, begin, min(extent, begin + step)) for begin in range(0, extent, step)]
    return found


class SecondSum:
    """A region that travels again: each rank gets one shard of it from every rank, to add up.

    Args:
        audit: has the copies from the window that is over.
        region: what it was asked for.
        group: the ranks of the sum; all of them do this together, in the same order.
        layout: of the wire.

    A rank without copies (its window failed, or it had no part in it) sends NaN. Elements with a NaN are not judged.
    """

    def __init__(self, audit: SumAudit, region: Region, group: dist.ProcessGroup, layout: WireLayout) -> None:
        self.region = region
        self._group = group
        elements = region.end - region.begin
        self._shard = -(-elements // group.size())
        copies = audit.take()
        sent = torch.full((self._shard * group.size(),), float("nan"), dtype=layout.dtype, device=layout.device)
        self.came: Tensor | None = None
        if copies is not None:
            sent_copy, self.came, self._factor = copies
            sent[:elements] = sent_copy
        self._everyones = torch.empty_like(sent)
        self._sent = sent
        # As bytes: backends may not know the dtype.
        self._work = dist.all_to_all_single(
            self._everyones.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=True
        )

    def judge(self) -> Tensor:
        """[2], int64, on the device: how many elements of this rank's shard are wrong, and the first of them.

        The latter is a place in the wire. On a device with streams no host waits.
        """
        finish(self._work, self._group)
        first = self._group.rank() * self._shard
        came = None if self.came is None else self.came[first : first + self._shard]
        if came is None or not len(came):  # a region may have fewer elements than there are ranks
            return torch.zeros(2, dtype=torch.int64, device=self._sent.device)
        wrong = wrong_elements(self._everyones.view(self._group.size(), -1)[:, : len(came)], came, self._factor)
        place = wrong.to(torch.uint8).argmax() + (self.region.begin + first)
        return torch.stack([wrong.sum(), place])


def wrong_elements(everyones: Tensor, came: Tensor, factor: float) -> Tensor:
    """Which elements of ``came`` cannot be the sum of ``everyones``, however it was rounded.

    Adding W numbers in any order rounds at most W - 1 partial sums, none larger than the sum of magnitudes m. A
    collective that averages rounds each number once before, and may round its factor. One that adds 16-bit numbers in
    fp32 rounds a result up to three times. So the result is within (W + 2) u m of the exact one, where u is half the
    distance from 1 to the next number. Devices that flush numbers below the smallest normal one to 0 add W times that
    number. An element that overflows, or has a term that is not finite, is not judged.

    >>> x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    >>> wrong_elements(x, torch.tensor([3.0, 3.1]), 1.0)
    tensor([False,  True])

    Args:
        everyones: [ranks, elements], what each rank has sent.
        came: [elements], the result, of the same dtype.
        factor: by which the collective multiplied the sum.

    Returns:
        [elements], bool.
    """
    ranks = len(everyones)
    limits = torch.finfo(came.dtype)
    terms = everyones.to(torch.float64)
    exact = terms.sum(0).mul_(factor)
    magnitude = terms.abs().sum(0)
    relative = (ranks + 2) * limits.eps / 2
    if came.dtype == torch.float64:  # then the second sum rounds as often as the first
        relative *= 2
    difference = (came.to(torch.float64) - exact).abs_()
    within = difference <= magnitude * (abs(factor) * relative) + ranks * limits.tiny
    return (magnitude * (1 + relative) < limits.max) & ~within


def member_at(layout: WireLayout, element: int) -> int:
    """The member of the bucket that has this element of the wire, or ends before it."""
    return max(number for number, (begin, _) in enumerate(layout.members) if begin <= element)
