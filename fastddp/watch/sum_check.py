"""Was a sum right? Part of one wire is added up a second time, by another way and in more digits, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp._C import SumAudit, WireLayout

REGION_BYTES = 2**18  # of a wire that is checked at once: small beside a bucket, because it travels once more


@dataclass(frozen=True)
class Region:
    """Elements [begin, end) of the wire of a bucket."""

    bucket: int
    begin: int
    end: int


def regions(layouts: Sequence[WireLayout]) -> list[Region]:
    """The wires of all buckets, in regions."""
    found = []
    for bucket, layout in enumerate(layouts):
        begin, count = layout.members[-1]
        extent = begin + count
        step = REGION_BYTES // layout.dtype.itemsize
        found += [Region(bucket, begin, min(extent, begin + step)) for begin in range(0, extent, step)]
    return found


class SecondSum:
    """A region that travels once more: from each rank to each, a shard for every one to add up.

    Args:
        audit: what has looked on in the window that is over.
        region: what it was asked for.
        group: the ranks of the sum; all of them do this together, in the same order.
        layout: of the wire.

    A rank without copies (its window failed, or it had no part in it) sends NaN, and nothing is judged that has one.
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
        # Bytes: backends need not know the dtype.
        self._work = dist.all_to_all_single(
            self._everyones.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=True
        )

    def judge(self) -> Tensor:
        """[2], int64, on the device: how many elements of this rank's shard are wrong, and the first of them.

        As a place in the wire; for the device, no host waits.
        """
        self._work.wait()
        first = self._group.rank() * self._shard
        came = None if self.came is None else self.came[first : first + self._shard]
        if came is None or not len(came):  # a region may have fewer elements than there are ranks
            return torch.zeros(2, dtype=torch.int64, device=self._sent.device)
        wrong = wrong_elements(self._everyones.view(self._group.size(), -1)[:, : len(came)], came, self._factor)
        place = wrong.to(torch.uint8).argmax() + (self.region.begin + first)
        return torch.stack([wrong.sum(), place])


def wrong_elements(everyones: Tensor, came: Tensor, factor: float) -> Tensor:
    """Which elements of ``came`` cannot be the sum of ``everyones``, however it was rounded.

    Adding up W numbers in any order takes at most W - 1 roundings of partial sums, none of which is larger than the sum
    of magnitudes m; where a collective averages, each number is rounded once before, and so may its factor be; where 16
    bits are added up in fp32, results are rounded up to three times. So the result is within (W + 2) u m of the exact
    one, u half the distance from 1 to the next number; and within W times the smallest normal number where devices take
    smaller ones for 0. What overflows, or has a term that is not finite, is not judged.

    >>> x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    >>> wrong_elements(x, torch.tensor([3.0, 3.1]), 1.0)
    tensor([False,  True])

    Args:
        everyones: [ranks, elements], what each rank has sent.
        came: [elements], of the same dtype.
        factor: by which the collective has multiplied the sum.

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
    """The number, in its bucket, of the gradient that has this element of the wire, or ends before it."""
    return max(number for number, (begin, _) in enumerate(layout.members) if begin <= element)
