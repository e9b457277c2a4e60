"""Which ranks of a process group share a machine, and may read each other's memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fastddp import _C
from fastddp.ranks.agreement import gather_numbers
from fastddp.ranks.backends import backend_of
from fastddp.ranks.groups import once_a_group

_CPU = torch.device("cpu")
_ENOUGH_BYTES = 4 * 2**20


def reads_pay(bucket_bytes: Sequence[int]) -> bool:
    """Whether ranks that read each other's gradients, of buckets of these sizes, are done before an allreduce.

    An allreduce of the last bucket has room for the status, which otherwise takes a collective of its own
    (Note [Room for the status], ``csrc/trip/driver.h``). With 2 MiB of gradients that outweighs what reads save.
    """
    return sum(bucket_bytes) >= _ENOUGH_BYTES


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
    machines = gather_numbers([machine_of_this_rank()], process_group, _CPU, torch.int64)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(machine, len(numbers)) for (machine,) in machines)


def processes_of(process_group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """The process of each rank whose memory this rank may read, else 0 (Note [Reads], ``csrc/transport/reads.h``).

    A collective: all ranks of ``process_group`` call it together. Ranks of one machine may all read each other, or
    none may. Nobody reads memory of a GPU, nor over another backend than gloo, whose messages they replace.
    """
    if device.type != "cpu" or backend_of(process_group, device) != dist.Backend.GLOO or process_group.size() == 1:
        return ()
    return _processes(process_group)


def reads_beat_allreduces(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks may read each other's memory, and have no core left for the thread of an allreduce.

    Reads take less time of the processor, but that of the thread that runs backward. Where cores idle during backward,
    gloo's thread has the time for nothing. A collective, as :func:`processes_of`.
    """
    processes = processes_of(process_group, device)
    return len(processes) > 1 and all(processes) and _cores_are_taken(process_group)


@once_a_group
def _cores_are_taken(process_group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a machine have as many threads as cores. Two ranks have the same cores, or no common one."""
    cores = sorted(os.sched_getaffinity(0))
    row = [torch.get_num_threads(), len(cores), zlib.crc32(repr(cores).encode())]
    ranks = gather_numbers(row, process_group, _CPU, torch.int64)
    return sum(rank[0] for rank in ranks) >= sum({which: count for _, count, which in ranks}.values())


@once_a_group
def _processes(process_group: dist.ProcessGroup) -> tuple[int, ...]:
    _C.let_siblings_read()
    sample = os.urandom(8)  # of this process alone: its number may mean another process where another rank looks
    memory = torch.frombuffer(bytearray(sample), dtype=torch.uint8)
    number = int.from_bytes(sample, signed=True)
    row = [machine_of_this_rank(), os.getpid(), memory.data_ptr(), number]
    ranks = gather_numbers(row, process_group, _CPU, torch.int64)
    reads_all = all(
        _C.has_bytes(process, address, number.to_bytes(8, signed=True))
        for machine, process, address, number in ranks
        if machine == row[0]
    )
    answers = gather_numbers([reads_all], process_group, _CPU, torch.int64)
    is_here = [rank[0] == row[0] for rank in ranks]
    may_read = all(answer for (answer,), here in zip(answers, is_here, strict=True) if here)
    return tuple(rank[1] if here and may_read else 0 for rank, here in zip(ranks, is_here, strict=True))


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
