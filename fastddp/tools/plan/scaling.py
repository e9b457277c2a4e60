"""Predicts steps on other numbers of ranks and other networks from a profile.

An allreduce of b bytes over n ranks moves 2 (n - 1) / n · b bytes over each rank's link, with any good algorithm. Its
latency is that of messages that wait for each other: 2 (n - 1) of them around a ring, 2 log2(n) up and down a tree
(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; NCCL has both).
Latency and bandwidth of one message are either given, or derived from what was measured. Times are intervals, as wide
as predictions were wrong (:mod:`fastddp.tools.plan.uncertainty`).
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastddp.bucket_plan import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, Buckets
from fastddp.planning.model import Link, best_plan, compute_end, end_of
from fastddp.planning.profile import MOST_RANKS, Profile, ProfiledGradient
from fastddp.tools.plan.uncertainty import WHOLE_WIRE, Interval, links_between, with_noise

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True)
class Network:
    """The network between ranks; each rank has its own link."""

    latency: float
    """Seconds from sending a short message to having it."""
    bandwidth: float
    """Bytes a second that a rank sends, and receives at the same time."""
    algorithm: Algorithm
    measured_on: int = WHOLE_WIRE
    """Ranks that reach this bandwidth; more may reach less of it."""

    @classmethod
    def of(cls, profile: Profile, algorithm: Algorithm, latency: float | None, bandwidth: float | None) -> Network:
        """The measured network, except for what is given.

        Raises:
            ValueError: the profile says nothing of a network, and latency and bandwidth are not both given.
        """
        if latency is not None and bandwidth is not None:
            return cls(latency, bandwidth, algorithm)
        if profile.ranks == 1 or profile.link is None:
            what = "is of one rank, which" if profile.ranks == 1 else "knows no bandwidth: what was measured for it"
            raise ValueError(f"the profile {what} says nothing of a network: give --link and --latency")
        if latency is None:
            latency = profile.link.latency / messages(profile.ranks, algorithm)
        if bandwidth is not None:
            return cls(latency, bandwidth, algorithm)
        return cls(latency, profile.link.bandwidth * traffic(profile.ranks), algorithm, profile.ranks)

    def link(self, ranks: int) -> Link:
        """The cost of collectives of ``ranks``; of one rank, nothing."""
        if ranks == 1:
            return Link(0.0, math.inf)
        return Link(self.latency * messages(ranks, self.algorithm), self.bandwidth / traffic(ranks))


def messages(ranks: int, algorithm: Algorithm) -> float:
    """An allreduce's, that wait for each other.

    >>> messages(8, "ring"), messages(8, "tree")
    (14, 6.0)
    """
    return 2 * (ranks - 1) if algorithm == "ring" else 2 * math.log2(ranks)


def traffic(ranks: int) -> float:
    """Bytes that each rank sends in an allreduce of one byte."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Prediction:
    """Forward and backward, with all communication, for a number of ranks. Times are seconds."""

    ranks: int
    link: Link
    plan: Buckets
    """The best one for ``link``: indices into the profile's gradients."""
    step: Interval
    """Under that plan."""
    step_at_default: Interval
    """With buckets of 25 MiB, as they are by default."""
    compute: float
    """Of ``step``: its length if communication takes no time."""

    @property
    def exposed(self) -> Interval:
        """Of ``step``: communication that nothing hides."""
        return Interval(max(self.step.low - self.compute, 0.0), max(self.step.high - self.compute, 0.0))

    @property
    def latency(self) -> float:
        """Of all communication, hidden or not: what it would take if no bytes travelled."""
        return len(self.plan) * self.link.latency

    @property
    def speed(self) -> Interval:
        """As a share of one rank's, whose step is ``compute``."""

        def at(step: float) -> float:
            return self.compute / step if step > self.compute else 1.0

        return Interval(at(self.step.high), at(self.step.low))


def predict(profile: Profile, network: Network, ranks: int) -> Prediction:
    """The step of ``profile`` on ``ranks`` ranks, each with the same work as a measured rank."""
    gradients = profile.model_gradients()
    link = network.link(ranks)
    plan = best_plan(gradients, link)
    compute = compute_end(gradients)
    fixed = _default_plan(profile.gradients)
    if ranks == 1:  # nothing travels: as measured
        return Prediction(ranks, link, plan, Interval(compute, compute), Interval(compute, compute), compute)
    links = links_between(link, ranks, network.measured_on)
    step, step_at_default = (with_noise(*(end_of(p, gradients, link) for link in links)) for p in (plan, fixed))
    return Prediction(ranks, link, plan, step, step_at_default, compute)


def _default_plan(gradients: Sequence[ProfiledGradient]) -> Buckets:
    """The default plan of :func:`fastddp.bucket_plan.plan_buckets`, in the order in which gradients get ready."""
    unfinished: dict[object, list[int]] = {}
    begun: set[object] = set()  # kinds whose first bucket is closed
    plan: Buckets = []
    for index in sorted(range(len(gradients)), key=lambda index: gradients[index].ready):
        kind = (gradients[index].dtype, gradients[index].device)
        bucket = unfinished.setdefault(kind, [])
        bucket.append(index)
        is_first = kind not in begun and not gradients[index].device.startswith("cpu")
        cap = FIRST_BUCKET_BYTES if is_first else DEFAULT_BUCKET_BYTES
        if sum(gradients[member].parameter_bytes for member in bucket) >= cap:
            plan.append(unfinished.pop(kind))
            begun.add(kind)
    return [*plan, *unfinished.values()]


_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_A_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3, "s": 1.0}  # two letters look like a mu
_LONGEST = 3600.0
_RATES = (1 / 8, 1e18)  # a bit a second, and more than any link has


def numbers_of_ranks(text: str) -> list[int]:
    """From a list in text.

    >>> numbers_of_ranks("8, 64")
    [8, 64]
    """
    numbers = [number.strip().lstrip("0") for number in text.split(",")]
    # By their lengths first: Python refuses to convert thousands of digits.
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers):
        what = f"{reprlib.repr(text)} is not a list of numbers of ranks"
        raise ValueError(f"{what} such as 8,64,256, each from 1 to {MOST_RANKS}")
    return [int(number) for number in numbers]


def bytes_per_second(rate: str) -> float:
    """From a rate in bits.

    >>> bytes_per_second("400gbit")
    50000000000.0
    >>> bytes_per_second("400 Gbps")
    50000000000.0
    """
    # A large B would be bytes.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT])(?:(?i:bit)(?:/s)?|b(?:ps|/s))", rate.strip())
    found = float(match[1]) * _UNITS[match[2].lower()] / 8 if match is not None else 0.0
    if not _RATES[0] <= found <= _RATES[1]:
        raise ValueError(f"{reprlib.repr(rate)} is not a rate in bits such as 100mbit, 10gbit or 400Gbps")
    return found


def seconds(time: str) -> float:
    """From a time in text.

    >>> seconds("5us")
    5e-06
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_A_SECOND)})", time.strip().lower())
    found = float(match[1]) / _A_SECOND[match[2]] if match is not None else math.inf
    if found > _LONGEST:
        raise ValueError(f"{reprlib.repr(time)} is not a time such as 5us or 0.1ms")
    return found
