"""Two network namespaces joined by a cable of a given rate: what `bench.step --rate` has ranks in.

    with netns.pair("1gbit") as (left, right):
        left.enter()  # in a process of its own: sockets that it makes from here on are at the left end

The cable is a veth pair, and a token bucket filter (`tc qdisc ... tbf`) at each end limits what that end sends. Nothing
of it is seen outside the two namespaces. They are removed on every way out: the end of the block, an exception, SIGINT,
SIGTERM and SIGHUP. Those of a run that was killed are removed by the next one, which knows by their names that their
owner is gone.

It takes root, and `ip` and `tc` of iproute2: `unavailable()` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# The name of the network device at either end, for GLOO_SOCKET_IFNAME.
DEVICE = "wire"

_NETWORK, _ADDRESSES = "10.77.0.0/24", ("10.77.0.1", "10.77.0.2")
_FOLDER = Path("/run/netns")  # where `ip netns` keeps them
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_PREFIX = "fastddp-bench"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\d+-[01]")  # owner's pid, when that process started, serial number, end
_serial = itertools.count()

_CLONE_NEWNET = 0x40000000
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}

# Linux' default. Under BBR, which some kernels start with, single steps took three times as long.
_CONGESTION_CONTROL = "cubic"

# What an end may send at once after a pause: little, or short messages would never meet the limit.
_BURST_SECONDS = 0.002
_SMALLEST_BURST = 16 * 1024  # ten frames

Pair = tuple["End", "End"]


class NetworkError(RuntimeError):
    """The kernel, `ip` or `tc` refused; the message is theirs."""


@dataclass(frozen=True)
class End:
    """One end of the cable: a namespace, and the address of the device in it."""

    name: str
    address: str

    def enter(self) -> None:
        """Move the calling thread into the namespace, and with it all threads that it starts from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (_FOLDER / self.name).open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.name}")

    def run(self, function: Callable[[], None]) -> None:
        """Call a function in the namespace; the caller stays outside."""
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                self.enter()
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def socket(self) -> socket.socket:
        """A TCP socket that stays in this namespace, whoever uses it. It times out after a minute."""
        made: list[socket.socket] = []
        self.run(lambda: made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM)))
        made[0].settimeout(60)
        return made[0]


def bits_per_second(rate: str) -> float:
    """What a rate in the words of `tc` comes to.

    >>> bits_per_second("100mbit"), bits_per_second("2.5gbit")
    (100000000.0, 2500000000.0)
    """
    match = _RATE.fullmatch(rate.lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{rate!r} is not a rate such as 100mbit, 1gbit or 2.5gbit")
    return float(match[1]) * _UNITS[match[2]]


def unavailable() -> str | None:
    """Why there can be no pair on this machine, or None if there can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} (iproute2) on this machine"
    try:
        with pair("1gbit"):
            return None
    except NetworkError as error:
        # A container without the right to, a kernel without veth or tbf. Anything else is an error of this file.
        if re.search("not permitted|denied|unknown|not supported|read-only", str(error), re.IGNORECASE):
            return str(error)
        raise


@contextmanager
def pair(rate: str) -> Iterator[Pair]:
    """Two joined namespaces for as long as the block lasts; processes that are still in them are killed then."""
    rate_bits = bits_per_second(rate)
    stem = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}"
    left, right = End(f"{stem}-0", _ADDRESSES[0]), End(f"{stem}-1", _ADDRESSES[1])
    with _signals_as_exceptions() as hold_signals:
        try:
            remove_leftovers()
            _make(left, right, rate_bits)
            yield left, right
        finally:
            hold_signals()
            for end in (left, right):
                _remove(end.name)


def _make(left: End, right: End, rate_bits: float) -> None:
    _call("ip", "netns", "add", left.name)
    _call("ip", "netns", "add", right.name)
    lay_cable(left, right, DEVICE)
    for end in (left, right):
        limit(end, rate_bits)
        _call("ip", "-n", end.name, "link", "set", "lo", "up")
        if _CONGESTION_CONTROL in _AVAILABLE.read_text().split():
            # By route: the namespace's own setting may not be changed on every machine.
            route = ("replace", _NETWORK, "dev", DEVICE, "src", end.address, "congctl", _CONGESTION_CONTROL)
            _call("ip", "-n", end.name, "route", *route)


def lay_cable(left: End, right: End, device: str) -> None:
    """Join two namespaces by a cable without a limit, a device of that name at each end, with the ends' addresses."""
    # Made where they belong: no device of these names ever exists outside.
    peer = ("type", "veth", "peer", "name", device, "netns", right.name)
    _call("ip", "link", "add", device, "netns", left.name, *peer)
    for end in (left, right):
        _call("ip", "-n", end.name, "address", "add", f"{end.address}/24", "dev", device)
        _call("ip", "-n", end.name, "link", "set", device, "up")


def limit(end: End, rate_bits: float) -> None:
    """Let an end send no more than so many bits a second over `DEVICE`; at once, also where it had another limit."""
    burst = max(_SMALLEST_BURST, round(rate_bits / 8 * _BURST_SECONDS))
    bucket = ("tbf", "rate", f"{rate_bits:.0f}bit", "burst", str(burst), "latency", "50ms")
    _call("tc", "-n", end.name, "qdisc", "replace", "dev", DEVICE, "root", *bucket)


def cut(end: End) -> None:
    """Lose all that an end sends over `DEVICE`, without a word; until there is a limit again."""
    _call("tc", "-n", end.name, "qdisc", "replace", "dev", DEVICE, "root", "blackhole")


def remove_leftovers() -> None:
    """Remove the namespaces of runs that ended without being able to, and kill what still runs in them."""
    for name in _namespaces():
        owner = _NAME.fullmatch(name)
        if owner and _start_time(int(owner[1])) != int(owner[2]):
            _remove(name)


@dataclass(frozen=True)
class Transfer:
    """What became of bytes that were sent over a fresh TCP connection."""

    seconds: float
    congestion_control: str  # what the connection used


def send(sender: End, receiver: End, size: int) -> Transfer:
    """Send that many bytes from one end to the other, from the first one to the arrival of the last."""
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(receiver.socket())
        listening.bind((receiver.address, 0))
        listening.listen()
        outgoing = sockets.enter_context(sender.socket())
        outgoing.connect(listening.getsockname())
        incoming = sockets.enter_context(listening.accept()[0])
        incoming.settimeout(60)
        chunk = memoryview(bytes(1 << 20))

        def send_all() -> None:
            for sent in range(0, size, len(chunk)):
                outgoing.sendall(chunk[: size - sent])

        sending = threading.Thread(target=send_all)
        start = time.perf_counter()
        sending.start()
        missing = size
        while missing:
            received = len(incoming.recv(len(chunk)))
            if not received:
                raise NetworkError(f"the connection ended {missing} bytes early")
            missing -= received
        seconds = time.perf_counter() - start
        sending.join()
        algorithm = outgoing.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return Transfer(seconds, algorithm.rstrip(b"\0").decode())


def _namespaces() -> list[str]:
    # Not what `ip netns list` prints: its format depends on what else it knows of a namespace.
    return sorted(entry.name for entry in _FOLDER.iterdir()) if _FOLDER.is_dir() else []


def _remove(name: str) -> None:
    """Remove a namespace, if it is there; the cable disappears with either end."""
    if name not in _namespaces():
        return
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, start_new_session=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _call("ip", "netns", "delete", name)


def _call(*command: str) -> None:
    # In a session of its own: Ctrl-C is for this process, which may be removing a namespace because of it.
    ended = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if ended.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {ended.stderr.strip() or f'exited with {ended.returncode}'}")


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since the machine did: with its pid, its identity. None: there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[19])


@contextmanager
def _signals_as_exceptions() -> Iterator[Callable[[], None]]:
    """Signals that would end the process raise an exception in the block, unless what this yields has been called.

    Then, and while the first one's exception is on its way, they are only remembered, and come after the block.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield lambda: None
        return
    held: list[int] = []
    is_holding = False

    def hold() -> None:
        nonlocal is_holding
        is_holding = True

    def handle(number: int, frame: FrameType | None) -> None:
        if is_holding:
            held.append(number)
            return
        hold()  # what the exception leads to is not to be interrupted
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {
        number: signal.signal(number, handle)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield hold
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in held:
            signal.raise_signal(late)
