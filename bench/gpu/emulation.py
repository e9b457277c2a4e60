"""The pretended process group: built when it is needed, and torch's default group for as long as it is used."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu import networks

_FOLDER = Path(__file__).resolve().parent
_BACKEND = "emulated"

# As many multiprocessors as NCCL typically takes for an allreduce.
BLOCKS = 16


@functools.cache
def load_extension() -> Any:
    """The compiled process group. Takes nvcc and a C++ compiler, and the better part of a minute the first time."""
    from torch.utils import cpp_extension

    sources = [str(_FOLDER / f"emulated_wire.{suffix}") for suffix in ("cpp", "cu")]
    return cpp_extension.load("fastddp_emulated_wire", sources, extra_cflags=["-O2"], extra_cuda_cflags=["-O3"])


class EmulatedGroup:
    """Counts what the process group was asked for."""

    def __init__(self, wire: Any) -> None:
        self._wire = wire

    def counts(self) -> tuple[int, int, float]:
        """Collectives, their bytes, and the milliseconds that they took on the emulated network, up to now."""
        return self._wire.collectives, self._wire.bytes, self._wire.busy_ms


# What `_create` makes next: torch calls it with arguments of its own only.
_wanted: list[tuple[networks.Network, int]] = []
_created: list[Any] = []


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    network, ranks = _wanted.pop()
    extension = load_extension()
    reduction, copy = network.all_reduce(ranks), network.broadcast(ranks)
    wire = extension.EmulatedWire(
        rank,
        size,
        BLOCKS,
        reduction=extension.Cost(reduction.latency_ns, reduction.ns_per_byte),
        copy=extension.Cost(copy.latency_ns, copy.ns_per_byte),
    )
    _created.append(wire)
    return wire


@functools.cache
def _register(device_type: str) -> None:
    dist.Backend.register_backend(_BACKEND, _create, devices=[device_type])


@contextmanager
def emulated_group(network: networks.Network, ranks: int, device: torch.device) -> Iterator[EmulatedGroup]:
    """Makes this process rank 0 of so many, of which the others do not exist."""
    load_extension()
    _register(device.type)
    _wanted.append((network, ranks))
    # Nobody else will write to the store, and nobody waits for that: torch has no barrier here unless it is asked to.
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield EmulatedGroup(_created.pop())
    finally:
        dist.destroy_process_group()
