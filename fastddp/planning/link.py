"""What a collective of a process group costs, measured as the reducer will use it.

Note [What supports a bandwidth]. A bandwidth says how much longer large collectives take than small ones. If they take
no longer, or only as much longer as times of one size vary, a fit may give any number, such as 10¹⁵ bytes a second. A
plan made of that is worse than none. So there is a bandwidth only if the largest size takes longer than each smaller
size by their medians, and also in nine of ten pairs of a sample of the largest size and a sample of a smaller one.
Pairs are used because a few samples that something else on the machine disturbed must neither make nor refuse a fit. If
sizes do not differ, five samples against fifteen or twenty pass this test by chance once in 300 times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.planning.model import Link
from fastddp.ranks.agreement import greatest
from fastddp.ranks.together import finish

_SIZES = [4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20]
_BEYOND_ON_DEVICES = [64 * 2**20]  # devices' networks reach full speed only there
_ENOUGH = 2 * 2**20  # bytes; measured for small models too, since smaller collectives tell little of bandwidths
_FEWEST = 2  # sizes: a line takes two points
_TOO_LONG = 0.1  # seconds more than the shortest collective; over a slow network small collectives say enough
_ROUNDS = 5
_SURE = 0.9  # of all pairs
_BACK_TO_BACK = 4  # allreduces that are timed together on a device
_HEAD_START = 0.005  # seconds: several times what a host needs to start them
_PASSES = 4  # that are timed together
_SHORTEST_PASS = 2e-5  # seconds: no device adds up so many numbers in less


def measure_link(lanes: Sequence[dist.ProcessGroup], device: torch.device, largest: int) -> Link | str:
    """Time allreduces of several sizes, in turn, and fit ``latency + size / bandwidth`` to them (:func:`fit`).

    A collective: all ranks call it together, and all get the same result. With several lanes (groups of the same ranks:
    :mod:`fastddp.ranks.lanes`) one allreduce runs on each at the same time, and each costs its share of the time.
    Unless gradients live on the CPU, their device's time is taken, and sizes go further. Collectives of more than
    ``largest`` bytes need not be measured.
    """
    sizes = [size for size in _sizes_on(device) if size <= max(largest, _ENOUGH)]
    wires = [torch.zeros(sizes[-1] // 4, device=device) for _ in lanes]
    sizes = _short_enough(lanes, wires, sizes)
    rounds = [[_seconds(lanes, wires, size) for size in sizes] for _ in range(_ROUNDS)]
    agreed = greatest([second for samples in rounds for second in samples], lanes[0], device)
    return fit(sizes, [agreed[place :: len(sizes)] for place in range(len(sizes))])


def largest_bucket(link: Link, device: torch.device) -> float:
    """Bytes up to which a bucket may grow: the largest measured size, or more if latency still counts there.

    Larger buckets were not measured, and over gloo cost more than the line says.
    """
    return max(_sizes_on(device)[-1], link.long_bytes)


def _sizes_on(device: torch.device) -> list[int]:
    return _SIZES if device.type == "cpu" else _SIZES + _BEYOND_ON_DEVICES


def fit(sizes: Sequence[int], samples: Sequence[Sequence[float]]) -> Link | str:
    """The line through the largest size's point, with the least squares of relative errors at the other points.

    A network may let a burst of some KiB pass faster than what follows, and a step sends much more than that. So the
    largest size tells the bandwidth. The other sizes tell the latency, which is not negative.

    ``sizes`` are in bytes, from the smallest to the largest; ``samples`` in seconds, several for each size, of which
    the medians count. If they support no line (Note [What supports a bandwidth]), this says in words what they were.
    """
    medians = [statistics.median(seconds) for seconds in samples]
    if not _supports_a_bandwidth(samples, medians):
        took = ", ".join(f"{_named(size)} {1e3 * s:.4g} ms" for size, s in zip(sizes, medians, strict=True))
        return f"allreduces took: {took} (medians of {len(samples[0])})"
    largest, whole = sizes[-1], medians[-1]
    shares = [(size / largest, second) for size, second in zip(sizes[:-1], medians[:-1], strict=True)]
    above = sum((1 - share) * (second - share * whole) / second**2 for share, second in shares)
    latency = max(above / sum((1 - share) ** 2 / second**2 for share, second in shares), 0.0)
    return Link(latency, largest / (whole - latency))


def _supports_a_bandwidth(samples: Sequence[Sequence[float]], medians: Sequence[float]) -> bool:
    """Note [What supports a bandwidth]. If True, the latency that :func:`fit` finds is below the last median."""
    if len(samples) < _FEWEST or max(medians[:-1]) >= medians[-1]:
        return False
    pairs = [(large, small) for seconds in samples[:-1] for large, small in product(samples[-1], seconds)]
    return sum(large > small for large, small in pairs) >= _SURE * len(pairs)


def _named(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def _short_enough(lanes: Sequence[dist.ProcessGroup], wires: Sequence[Tensor], sizes: Sequence[int]) -> list[int]:
    """The sizes, from the smallest on, that do not take too long beyond the shortest time, whatever the latency is."""
    kept: list[int] = []
    shortest = float("inf")
    for size in sizes:
        # The shorter of two, since the first may have something to set up.
        tries = greatest([_seconds(lanes, wires, size) for _ in range(2)], lanes[0], wires[0].device)
        shortest = min(shortest, *tries)
        if min(tries) > shortest + _TOO_LONG and len(kept) >= _FEWEST:
            break
        kept.append(size)
    return kept


def _seconds(lanes: Sequence[dist.ProcessGroup], wires: Sequence[Tensor], size: int) -> float:
    """The time of one allreduce of ``size`` bytes: its share, if one runs on each lane at once."""
    device = wires[0].device
    if device.type != "cpu":
        return _seconds_of_device(lanes, wires, size, device) / len(lanes)
    begin = time.perf_counter()
    _all_reduce(lanes, wires, size)
    return (time.perf_counter() - begin) / len(lanes)


def _seconds_of_device(
    lanes: Sequence[dist.ProcessGroup], wires: Sequence[Tensor], size: int, device: torch.device
) -> float:
    """The mean of several rounds in succession.

    Note [What a device takes]. In training the host is ahead: it starts new work before the device is done with earlier
    work. A measurement that begins on an idle device shows how fast the host starts work, not how long the device
    takes. So the device gets something to do first: sums along a table of two columns, by one thread a column, which
    take long and leave memory and multiprocessors to what follows. The table has integers, since torch refuses such a
    sum of floats where users ask for deterministic algorithms.
    """
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    _add_up(math.ceil(_HEAD_START / _seconds_of_a_pass(device)), device)
    # Hosts are ahead of their devices by different times. The first round ends on all at once, and is not timed.
    _all_reduce(lanes, wires, size)
    stream = torch.accelerator.current_stream(device)
    begin.record(stream)
    for _ in range(_BACK_TO_BACK):
        _all_reduce(lanes, wires, size)
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _BACK_TO_BACK


def _add_up(passes: int, device: torch.device) -> None:
    table = torch.zeros((4096, 2), dtype=torch.long, device=device)
    sums = torch.empty_like(table)
    for _ in range(passes):
        torch.cumsum(table, 0, out=sums)


@cache
def _seconds_of_a_pass(device: torch.device) -> float:
    seconds = []
    for _ in range(3):
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        stream = torch.accelerator.current_stream(device)
        begin.record(stream)
        _add_up(_PASSES, device)
        end.record(stream)
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / _PASSES)
    return max(min(seconds), _SHORTEST_PASS)


def _all_reduce(lanes: Sequence[dist.ProcessGroup], wires: Sequence[Tensor], size: int) -> None:
    works = [dist.all_reduce(w[: size // 4], group=lane, async_op=True) for lane, w in zip(lanes, wires, strict=True)]
    for work, lane in zip(works, lanes, strict=True):
        finish(work, lane)
