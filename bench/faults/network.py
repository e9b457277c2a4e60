"""Two machines out of one, and a cable between them that can be cut: for faults of the network.

A machine is a network namespace, a host name and a /dev/shm of its own. So its ranks see neither pages nor loopback of
the other one's. Ranks of the first half are on the left one, the rest on the right one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench import netns

# At a hundredth of it a bucket takes a second, a step longer than one is patient, and the store still answers.
RATE = "20mbit"
SLOW = 0.01

_STORE_DEVICE, _STORE_ADDRESSES = "store", ("10.78.0.1", "10.78.0.2")
_HOSTS = ("left", "right")
_CLONE_NEWNS, _CLONE_NEWUTS = 0x20000, 0x4000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


unavailable = netns.unavailable


@dataclass(frozen=True)
class Machine:
    """What a process has to know to be on one of them; of plain values, since it travels as JSON."""

    side: int  # 0 or 1
    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    store: str  # the address of the store, which is on the left one

    @property
    def ends(self) -> tuple[netns.End, netns.End]:
        """Those of the cable."""
        return netns.End(self.namespaces[0], self.addresses[0]), netns.End(self.namespaces[1], self.addresses[1])

    def become(self, folder: Path) -> None:
        """Move this process there for good, while it has one thread; `folder` is that of the run."""
        self.ends[self.side].enter()
        memory = folder / f"shm.{self.side}"
        memory.mkdir(exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS), "unshare")
        _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        _check(libc.mount(os.fsencode(memory), b"/dev/shm", None, _MS_BIND, None), "mount")
        socket.sethostname(_HOSTS[self.side])
        os.environ["GLOO_SOCKET_IFNAME"] = netns.DEVICE

    def cut(self) -> None:
        """Lose all that travels over the cable from now on."""
        for end in self.ends:
            netns.cut(end)

    def cut_for(self, seconds: float) -> None:
        """Lose it for so long."""
        self.cut()
        threading.Timer(seconds, self.limit, [1.0]).start()

    def limit(self, share: float) -> None:
        """Carry that share of the usual rate."""
        for end in self.ends:
            netns.limit(end, netns.bits_per_second(RATE) * share)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what} is refused")


@contextlib.contextmanager
def machines(store_apart: bool) -> Iterator[tuple[Machine, Machine]]:
    """Two, for as long as the block lasts. `store_apart`: the way to the store is another cable, which is never cut."""
    with netns.pair(RATE) as ends:
        addresses = (ends[0].address, ends[1].address)
        if store_apart:
            left, right = (replace(end, address=address) for end, address in zip(ends, _STORE_ADDRESSES, strict=True))
            netns.lay_cable(left, right, _STORE_DEVICE)
        store = _STORE_ADDRESSES[0] if store_apart else addresses[0]
        names = (ends[0].name, ends[1].name)
        yield Machine(0, names, addresses, store), Machine(1, names, addresses, store)
