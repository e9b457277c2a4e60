"""More than one way to the other ranks, where a process group alone cannot use them fully."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fastddp.exchange.backends import backend_of
from fastddp.exchange.groups import forget_gone, make_group, ranks_name_groups_alike

_LANES = 2
_ENOUGH_BYTES = 50 * 2**20
_LARGE_BUCKET_BYTES = 8 * 2**20


def lanes_pay(bucket_bytes: Sequence[int]) -> bool:
    """Whether buckets of these sizes travel faster over several lanes.

    What a second lane gains is time in which a large transfer waits. Small ones only disturb backward twice as often;
    ``make demo``, whose buckets have 1 MiB, showed it.
    """
    total = sum(bucket_bytes)
    return total >= _ENOUGH_BYTES and total >= len(bucket_bytes) * _LARGE_BUCKET_BYTES


# Note [Lanes over NCCL]
# A communicator of NCCL runs one collective at a time, and may leave a part of the network idle, between nodes above
# all. Whether a second one uses it depends on NICs, channels and sizes, and each takes GPU memory for its buffers and
# multiprocessors from backward. So no size of buckets is a reason for one: there is one where it was measured to end
# sooner, with bucket_cap_mb="auto". In two levels each rank of a node has a communicator to other nodes anyway. All
# ranks start collectives in the same order, on whichever lane, as several communicators of NCCL at a time demand.


def lanes_for(
    process_group: dist.ProcessGroup, device: torch.device, *, measured: bool = False
) -> list[dist.ProcessGroup]:
    """Process groups of the same ranks to deal collectives over; the first is ``process_group``.

    A gloo group moves all its bytes on one thread, which waits for the other side much of the time; a second group
    fills the gaps. Where NCCL carries tensors of ``device`` there are several lanes if their times are ``measured``
    (Note [Lanes over NCCL]), and with other backends there is one. A collective: all ranks of ``process_group`` call it
    together. Groups are made once and kept for as long as torch keeps ``process_group``; where ranks are in different
    numbers of groups there is one lane.
    """
    carrier = backend_of(process_group, device)
    can_be_several = carrier == dist.Backend.GLOO or (measured and carrier == dist.Backend.NCCL)
    if not can_be_several or process_group.size() == 1:
        return [process_group]
    forget_gone(_made)
    if process_group not in _made:
        everyone = [range(process_group.size())]
        numbers = range(2, _LANES + 1) if ranks_name_groups_alike(process_group, device) else ()
        _made[process_group] = [
            make_group(process_group, device, everyone, f"lane {number} of {_LANES}") for number in numbers
        ]
    return [process_group, *_made[process_group]]


_made: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}
