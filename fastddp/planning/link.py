"""What a collective of a process group costs, measured as the reducer will use it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.planning.model import Link

_SIZES = [4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20]
_FEWEST = 2  # sizes: a line has two points
_TOO_LONG = 0.1  # seconds; over a slow network small collectives say enough
_ROUNDS = 5
_FASTEST = 1e15  # bytes a second; where size makes no difference at all


def measure_link(lanes: Sequence[dist.ProcessGroup], device: torch.device, largest: int) -> Link:
    """Time allreduces of several sizes, in turn, and fit ``latency + size / bandwidth`` to the medians (:func:`fit`).

    A collective: all ranks call it together, and get the same.

    Args:
        lanes: groups of the same ranks over which collectives are dealt (:mod:`fastddp.lanes`). With several of them
            one allreduce runs on each at the same time, and what one costs is its share of the time.
        device: where gradients live.
        largest: bytes; no need to measure beyond.
    """
    sizes = [size for place, size in enumerate(_SIZES) if size <= largest or place < _FEWEST]
    wires = [torch.zeros(sizes[-1] // 4, device=device) for _ in lanes]
    first = _greatest([_seconds(lanes, wires, size) for size in sizes], lanes[0], device)
    sizes = [size for place, size in enumerate(sizes) if first[place] <= _TOO_LONG or place < _FEWEST]
    rounds = [[_seconds(lanes, wires, size) for size in sizes] for _ in range(_ROUNDS)]
    medians = [statistics.median(samples) for samples in zip(*rounds, strict=True)]
    return fit(sizes, _greatest(medians, lanes[0], device))


def largest_bucket(link: Link) -> float:
    """Bytes up to which a bucket may grow: a larger one was not measured, and over gloo costs more than the line says.

    Unless its latency would still count.
    """
    return max(_SIZES[-1], link.long_bytes)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The line through the last point, the largest size, whose relative errors at the others are least, by squares.

    What a step sends is long for a network that lets a burst of some KiB pass faster than it goes on, so the largest
    size says what the bandwidth is; the others say what the latency is, which is not negative.
    """
    largest, whole = sizes[-1], seconds[-1]
    shares = [(size / largest, second) for size, second in zip(sizes[:-1], seconds[:-1], strict=True)]
    above = sum((1 - share) * (second - share * whole) / second**2 for share, second in shares)
    latency = min(max(above / sum((1 - share) ** 2 / second**2 for share, second in shares), 0.0), whole)
    return Link(latency, 1 / max((whole - latency) / largest, 1 / _FASTEST))


def _seconds(lanes: Sequence[dist.ProcessGroup], wires: Sequence[Tensor], size: int) -> float:
    """What one allreduce of that many bytes takes, of as many at once as there are lanes."""
    begin = time.perf_counter()
    works = [dist.all_reduce(w[: size // 4], group=lane, async_op=True) for lane, w in zip(lanes, wires, strict=True)]
    for work in works:
        work.wait()
    if wires[0].device.type != "cpu":  # there the wait was the stream's
        torch.accelerator.current_stream(wires[0].device).synchronize()
    return (time.perf_counter() - begin) / len(lanes)


def _greatest(seconds: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Over ranks: a collective is over when it is for the last one."""
    wire = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=group)
    return [float(second) for second in wire.tolist()]
