"""Whether ranks can talk: an allreduce of the size of a bucket, its time, and whether its sum is right."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastddp.ranks.listing import ranks
from fastddp.tools.doctor.findings import Finding, remark, wrong

MIB = 25  # DDP's usual bucket
TIMES = 5


@dataclass(frozen=True)
class Timing:
    """One rank's view of the allreduce."""

    seconds: float  # median
    is_right: bool


@dataclass(frozen=True)
class Exchange:
    """All ranks' view of the allreduce."""

    backend: str
    ranks: int
    interface: str | None  # that the environment names; None: the backend's own choice
    mib: int
    seconds: float  # the slowest rank's median
    bus_gb_per_s: float  # 10⁹ bytes a second; an allreduce moves 2 (n - 1) / n of its bytes over the bus


def measure(
    backend: str,
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    seconds: float,
    tell: Callable[[int, str], None],
) -> Timing:
    """Join a process group of all ranks and time its allreduce. Before each timed one, ranks meet in a small one.

    After ``seconds``, a waiting collective raises. ``tell``: called before each step with a growing number above 0 and
    words, the same on all ranks.
    """
    tell(1, f"joining the process group ({backend})")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds)
    )
    tell(2, "the first allreduce")
    buffer = torch.full((MIB * 2**18,), rank + 1.0, device=device)
    dist.all_reduce(buffer)
    is_right = bool((buffer == size * (size + 1) / 2).all())
    buffer.zero_()  # sums of sums would overflow
    samples = []
    for number in range(2, 2 + TIMES):
        tell(number + 1, f"allreduce {number}")
        dist.all_reduce(torch.zeros(1, device=device))
        _wait_for(device)
        begin = time.perf_counter()
        dist.all_reduce(buffer)
        _wait_for(device)
        samples.append(time.perf_counter() - begin)
    return Timing(statistics.median(samples), is_right)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def put_together(backend: str, by_rank: Mapping[int, Timing]) -> Exchange:
    """All ranks' view, from their own."""
    size, seconds = len(by_rank), max(timing.seconds for timing in by_rank.values())
    interface = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    return Exchange(backend, size, interface, MIB, seconds, 2 * (size - 1) / size * MIB * 2**20 / seconds / 1e9)


def choose_backend(gpus: Sequence[str | None], has_nccl: bool) -> str:
    """NCCL if all ranks have it, and a GPU each (None: it has none); else gloo."""
    return "nccl" if has_nccl and None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def findings(backend: str, gpu_of_rank: Mapping[int, str | None], by_rank: Mapping[int, Timing]) -> list[Finding]:
    """Wrong sums, and why NCCL was not used though ranks have GPUs."""
    found = []
    wrong_on = [rank for rank, timing in by_rank.items() if not timing.is_right]
    if wrong_on:
        check = f"Do not train: check the network and its drivers, and {backend}."
        found.append(wrong("allreduce", f"Sums are wrong on {ranks(wrong_on)}.", check))
    gpus = [gpu for gpu in gpu_of_rank.values() if gpu is not None]
    sharing = [rank for rank, gpu in gpu_of_rank.items() if gpu is not None and gpus.count(gpu) > 1]
    if backend == "gloo" and sharing:
        what = f"More ranks than GPUs: {ranks(sharing)} share some, and NCCL takes one rank a GPU."
        found.append(wrong("gloo", what, "Start one rank for each GPU: torchrun --nproc-per-node=gpu."))
    elif backend == "gloo" and gpus:
        what = "There are GPUs, and ranks exchanged over gloo, through the host's memory: the time is not NCCL's."
        found.append(remark("gloo", what, "Let torch see GPUs on all ranks, with a torch that has NCCL."))
    return found
