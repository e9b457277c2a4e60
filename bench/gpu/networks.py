"""How long collectives take on networks that are not there: the model behind the section `wire`.

All numbers are assumptions, none was measured: nominal rates, so the networks are as good as they could be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """A collective's time: a part of its own, and one for each byte of its tensor."""

    latency_ns: float
    ns_per_byte: float

    def milliseconds(self, size: int) -> float:
        """Of a tensor of so many bytes."""
        return (self.latency_ns + self.ns_per_byte * size) / 1e6


@dataclass(frozen=True)
class Network:
    """What connects ranks; each has a link of its own, as fast in both directions at once."""

    name: str
    gb_per_s: float  # of each rank's link, in one direction
    start_us: float  # of a collective, before the first byte moves
    hop_us: float  # from one rank to the next

    def all_reduce(self, ranks: int) -> Cost:
        """A ring's bandwidth: every byte leaves each rank 2 (n - 1) / n times. A tree's latency: its depth, twice.

        >>> Network("", gb_per_s=10, start_us=5, hop_us=1).all_reduce(8)
        Cost(latency_ns=11000.0, ns_per_byte=0.175)
        """
        latency_us = self.start_us + 2 * math.ceil(math.log2(ranks)) * self.hop_us
        return Cost(1e3 * latency_us, 2 * (ranks - 1) / ranks / self.gb_per_s)

    def broadcast(self, ranks: int) -> Cost:
        """A pipeline's bandwidth, every byte once; a tree's latency.

        >>> Network("", gb_per_s=10, start_us=5, hop_us=1).broadcast(8)
        Cost(latency_ns=8000.0, ns_per_byte=0.1)
        """
        latency_us = self.start_us + math.ceil(math.log2(ranks)) * self.hop_us
        return Cost(1e3 * latency_us, 1 / self.gb_per_s)


# Takes no time at all: what a step costs but for the waiting.
INSTANT = Network("instant", gb_per_s=math.inf, start_us=0, hop_us=0)
NVLINK = Network("NVLink 450 GB/s", gb_per_s=450, start_us=10, hop_us=1)
FAST = Network("400 Gbit/s", gb_per_s=50, start_us=10, hop_us=5)
SLOW = Network("100 Gbit/s", gb_per_s=12.5, start_us=10, hop_us=5)

# Powers of two, so that a division by the number of ranks and the sum over them give each gradient back bit by bit. The
# order is that of measurement: what matters most comes first.
_RANKS = (64, 1024, 8, 256)
CONFIGURATIONS = ((INSTANT, 8), (NVLINK, 8), *((network, ranks) for ranks in _RANKS for network in (FAST, SLOW)))
