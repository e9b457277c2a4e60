"""How fast ranks exchange, by allreduces of a few sizes, and whether results are right."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastddp.listing import ranks
from fastddp.tools.doctor.findings import Finding, remark, wrong

REPETITIONS = {8: 20, 2**20: 5, 25 * 2**20: 1, 100 * 2**20: 1}
"""Bytes → how often in a round."""
ROUNDS = 5
_SLOW = 0.25  # of what a GPU's NVLinks carry


@dataclass(frozen=True)
class Timing:
    """One rank's view of one size."""

    bytes: int
    seconds: float  # median
    is_right: bool


@dataclass(frozen=True)
class AllReduce:
    """All ranks' view of one size."""

    bytes: int
    seconds: float  # the slowest rank's median
    bus_gb_per_s: float  # 10⁹ bytes a second; an allreduce moves 2 (n - 1) / n of its bytes over the bus


@dataclass(frozen=True)
class Exchange:
    """What was measured."""

    backend: str
    ranks: int
    all_reduces: tuple[AllReduce, ...]


def measure(
    backend: str,
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    seconds: float,
    tell: Callable[[int, str], None],
    repetitions: Mapping[int, int] = REPETITIONS,
) -> list[Timing]:
    """Join a process group of all ranks and time its allreduces.

    Sizes take turns, so that a slow moment does not hit only one of them. Before each timed call, ranks meet in one
    that is not timed.

    Args:
        backend: of the process group.
        store: through which ranks meet.
        rank: of this process.
        size: ranks in all.
        device: on which the backend works.
        seconds: after this time a waiting collective raises.
        tell: called before each step with a growing number and words, the same on all ranks.
        repetitions: bytes, a multiple of 4 → how often each is timed in each of :data:`ROUNDS` rounds.
    """
    tell(0, f"joining the process group ({backend})")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds)
    )
    buffer = torch.zeros(max(repetitions) // 4, device=device)
    meeting = torch.zeros(1, device=device)
    right = {}
    for number, count in enumerate(repetitions, 1):
        tell(number, f"the first allreduce of {in_words(count)}")
        tensor = buffer[: count // 4].fill_(rank + 1)
        dist.all_reduce(tensor)
        right[count] = bool((tensor == size * (size + 1) / 2).all())
    buffer.zero_()  # sums of sums would overflow
    samples: dict[int, list[float]] = {count: [] for count in repetitions}
    number = len(repetitions)
    for round_number in range(1, ROUNDS + 1):
        for count, times in repetitions.items():
            number += 1
            tell(number, f"allreduces of {in_words(count)}, round {round_number}")
            for _ in range(times):
                dist.all_reduce(meeting)
                _wait_for(device)
                begin = time.perf_counter()
                dist.all_reduce(buffer[: count // 4])
                _wait_for(device)
                samples[count].append(time.perf_counter() - begin)
    return [Timing(count, statistics.median(samples[count]), right[count]) for count in repetitions]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_words(count: int) -> str:
    """Bytes.

    >>> in_words(8), in_words(25 * 2**20)
    ('8 B', '25 MiB')
    """
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count} B"


def put_together(backend: str, by_rank: Mapping[int, Sequence[Timing]]) -> Exchange:
    """All ranks' view, from their own."""
    size = len(by_rank)
    rows = []
    for timings in zip(*by_rank.values(), strict=True):
        seconds, count = max(timing.seconds for timing in timings), timings[0].bytes
        rows.append(AllReduce(count, seconds, 2 * (size - 1) / size * count / seconds / 1e9))
    return Exchange(backend, size, tuple(rows))


def choose_backend(gpu_of_rank: Mapping[int, tuple[str, str] | None], has_nccl: bool) -> str:
    """NCCL if each rank has its own GPU, else gloo.

    Args:
        gpu_of_rank: for each rank the machine and the UUID of the GPU that it would use; None: it has none.
        has_nccl: whether torch has it, on all ranks.
    """
    gpus = list(gpu_of_rank.values())
    return "nccl" if has_nccl and None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def backend_findings(backend: str, gpu_of_rank: Mapping[int, tuple[str, str] | None], has_gpus: bool) -> list[Finding]:
    """Why NCCL was not used though machines have GPUs; arguments as for :func:`choose_backend`."""
    if backend != "gloo" or not has_gpus:
        return []
    sharing: dict[tuple[str, str], list[int]] = {}
    for rank, gpu in gpu_of_rank.items():
        if gpu is not None:
            sharing.setdefault(gpu, []).append(rank)
    shared = [ranks(numbers) for numbers in sharing.values() if len(numbers) > 1]
    if shared:
        what = f"More ranks than GPUs: {' and '.join(shared)} share one, and NCCL takes one rank a GPU."
        return [wrong("gloo", what, "Start one rank for each GPU: torchrun --nproc-per-node=gpu.")]
    what = "There are GPUs, and ranks exchanged over gloo, through the host's memory: the numbers are not NCCL's."
    return [remark("gloo", what, "Let torch see the GPUs (above), with a torch that has NCCL.")]


def findings(
    exchange: Exchange, by_rank: Mapping[int, Sequence[Timing]], nvlink_gb_per_s: float | None
) -> list[Finding]:
    """What looks wrong about the exchange.

    Args:
        exchange: what was measured.
        by_rank: the same, rank by rank.
        nvlink_gb_per_s: of a GPU's NVLinks in each direction, if only these lie between the ranks.
    """
    found = []
    wrong_on = [rank for rank, timings in by_rank.items() if not all(timing.is_right for timing in timings)]
    if wrong_on:
        check = f"Do not train: check the network and its drivers, and {exchange.backend}."
        found.append(wrong("allreduce", f"Sums are wrong on {ranks(wrong_on)}.", check))
    largest = exchange.all_reduces[-1]
    if exchange.backend == "nccl" and nvlink_gb_per_s and largest.bus_gb_per_s < _SLOW * nvlink_gb_per_s:
        what = (
            f"NVLinks that carry {nvlink_gb_per_s:.0f} GB/s join all GPUs, and {in_words(largest.bytes)} went at "
            f"{largest.bus_gb_per_s:.0f} GB/s."
        )
        look = (
            "Start with NCCL_DEBUG=INFO and see whether NCCL's channels go over P2P; NCCL_P2P_DISABLE must not be set."
        )
        found.append(remark("allreduce", what, look))
    return found
