"""Lanes: several process groups of the same ranks, where one group alone does not use the network fully."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fastddp.ranks.backends import backend_of
from fastddp.ranks.groups import NCCL, make_group, once_a_group, ranks_name_groups_alike

_LANES = 2
_ENOUGH_BYTES = 50 * 2**20
_LARGE_BUCKET_BYTES = 8 * 2**20


def lanes_pay(bucket_bytes: Sequence[int]) -> bool:
    """Whether buckets of these sizes travel faster over several lanes.

    A second lane uses the time in which a large transfer waits. With small buckets it only disturbs backward twice as
    often, as ``make demo`` showed, whose buckets have 1 MiB.
    """
    total = sum(bucket_bytes)
    return total >= _ENOUGH_BYTES and total >= len(bucket_bytes) * _LARGE_BUCKET_BYTES


# Note [Lanes over NCCL]
# An NCCL communicator runs one collective at a time, and may leave a part of the network idle, above all between nodes.
# Whether a second communicator uses that part depends on NICs, channels and sizes. Each communicator takes GPU memory
# for buffers, and multiprocessors from backward. So the size of buckets alone is no reason for a second lane. It is
# used only where it was measured to end sooner, with bucket_cap_mb="auto". In two levels each rank of a node has its
# own communicator to other nodes anyway. All ranks start collectives in the same order across lanes, as NCCL demands
# of several communicators at a time.


def lanes_for(
    process_group: dist.ProcessGroup, device: torch.device, *, measured: bool = False
) -> list[dist.ProcessGroup]:
    """Process groups of the same ranks to deal collectives over; the first is ``process_group``.

    A gloo group moves all its bytes on one thread, which waits for the other side much of the time, and a second group
    fills the gaps. Over NCCL there are several lanes only if their times are ``measured`` (Note [Lanes over NCCL]).
    Other backends have one lane, and so have ranks that are in different numbers of groups. Groups are made once, and
    kept for as long as torch keeps ``process_group``. A collective: all its ranks call this together.
    """
    carrier = backend_of(process_group, device)
    can_be_several = carrier == dist.Backend.GLOO or (measured and carrier in NCCL)
    if not can_be_several or process_group.size() == 1:
        return [process_group]
    return [process_group, *_more_lanes(process_group, device)]


@once_a_group
def _more_lanes(process_group: dist.ProcessGroup, device: torch.device) -> list[dist.ProcessGroup]:
    everyone = [range(process_group.size())]
    numbers = range(2, _LANES + 1) if ranks_name_groups_alike(process_group, device) else ()
    return [make_group(process_group, device, everyone, f"lane {number} of {_LANES}") for number in numbers]
