"""Which ranks of a process group share a machine."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from fastddp.exchange.groups import once_a_group


@once_a_group
def nodes_of(process_group: dist.ProcessGroup) -> tuple[int, ...]:
    """The number of each rank's machine; machines are numbered in the order of their first ranks.

    A collective: all ranks of ``process_group`` call it together. They ask each other once, for as long as torch keeps
    the group. One or two ranks do not ask, and count as on machines of their own. So do ranks that see different
    network devices, as in two containers.
    """
    ranks = process_group.size()
    if ranks <= 2:  # machines make no difference to so few ranks
        return tuple(range(ranks))
    mine = torch.tensor([machine_of_this_rank()], device="cpu")
    machines = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(machines, mine, group=process_group)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(int(machine), len(numbers)) for machine in machines)


def machine_of_this_rank() -> int:
    """A number of 64 bits, the same for ranks of one machine that see the same network devices."""
    return int.from_bytes(_this_machine(), signed=True)


def _this_machine() -> bytes:
    """A hash of its name, its last start (several machines may have one name) and the network that this rank sees."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # this and the next file exist only under Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/thread-self/ns/net").readlink()))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest()
