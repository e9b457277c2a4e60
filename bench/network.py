"""Ranks on a network of a given rate, on one machine: `--rate 1gbit` of `bench.step` and `bench.pays`.

Ranks sit in two network namespaces, and a cable of that rate is all there is between them (`bench.netns`). So the wire
is a real one for gloo and TCP, with the time that it takes, and ranks still share the machine's cores. Each namespace
may hold several ranks, as a machine with several processes does: they reach each other without the cable. It takes
root; without, or where the kernel does not have what it takes, nothing is measured and the exit status is 0.

Rows then have `ranks_per_node`, `rate`, `rate_gbit_s`, `tcp_gbit_s` (what one plain TCP connection got, in one
direction, before the rounds: frames have headers, so 0.96 of the rate at best) and `congestion_control` (TCP's).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench import harness, netns

LOOPBACK = "loopback"  # in place of a rate: no cable, which takes no root


@dataclass(frozen=True)
class _Seat:
    """Puts each rank at its end of the cable: the first ones at the left."""

    ends: netns.Pair
    ranks_per_node: int

    def __call__(self, rank: int) -> None:
        self.ends[rank // self.ranks_per_node].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = netns.DEVICE


def bits_per_second(rate: str) -> float:
    """Of a cable, or of none."""
    return float("inf") if rate == LOOPBACK else netns.bits_per_second(rate)


def check_rates(parser: argparse.ArgumentParser, rates: Collection[str]) -> None:
    """Ends the program where one is none."""
    try:
        for rate in rates:
            bits_per_second(rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")


def is_skipped(module: str, rates: Collection[str]) -> bool:
    """Whether there can be no such network, which is then said."""
    reason = None if set(rates) <= {LOOPBACK} else netns.unavailable()
    if reason is not None:
        print(f"{module} was skipped: {reason}.")
    return reason is not None


@contextmanager
def cable(rate: str, ranks_per_node: int) -> Iterator[tuple[Callable[[int], None] | None, harness.Row]]:
    """For as long as the block lasts: how a rank gets to its end of the cable, and what rows say of the network."""
    facts: harness.Row = {"ranks_per_node": ranks_per_node, "rate": rate}
    if rate == LOOPBACK:
        yield None, facts | dict.fromkeys(("rate_gbit_s", "tcp_gbit_s", "congestion_control"))
        return
    bits = netns.bits_per_second(rate)
    with netns.pair(rate) as ends:
        size = int(bits / 8 * 0.5)  # half a second
        transfer = netns.send(*ends, size)
        facts |= {
            "rate_gbit_s": bits / 1e9,
            "tcp_gbit_s": round(8 * size / transfer.seconds / 1e9, 3),
            "congestion_control": transfer.congestion_control,
        }
        yield _Seat(ends, ranks_per_node), facts
