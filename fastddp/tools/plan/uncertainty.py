"""How wrong predictions were, and so between what a predicted time lies.

Note [Where the interval comes from]. Predicted steps were compared with measured ones twice, over gloo on CPUs. From
profiles of 2 ranks, steps on 4 were predicted 3 % too short to 5 % too long. On 8 ranks that 200 Mbit/s join, a step
was predicted 35 % too short: gloo's ring reached 60 % of the wire there, and near 100 % with 2 ranks. Two things are
made of it.

*Noise*: any step may take from 1 / 1.05 to 1 / 0.97 of what is predicted.

*The share of the wire* that a ring reaches falls as its ranks grow. From 2 ranks to 8, four times as many, it fell to
0.6. Nothing more is known, so it is taken to fall by the same factor wherever ranks grow fourfold: to 0.77 where they
double, to 0.28 at 64 of 2, to 0.10 at 1,024 of 2. One end of an interval has the whole share, the other one this. So
intervals contain what was measured, have only their noise where as many ranks are predicted as were measured, and grow
with the distance from there. Beyond 8 ranks they are extrapolated. NCCL's rings may do better: that was not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastddp.planning.model import Link

# Note [Where the interval comes from].
_SHORTEST, _LONGEST = 1 / 1.05, 1 / 0.97
_SHARE, _GROWTH = 0.6, 4
_FALL = math.log(_SHARE) / math.log(_GROWTH)

WHOLE_WIRE = 2
"""Ranks, of which gloo's ring reached near 100 % of the wire."""

HOW_WRONG = (
    "Intervals are as wide as predictions were wrong (over gloo, on CPUs): those for 4 ranks from 2 were -3 to +5 % "
    "off, and one for 8 ranks at 200 Mbit/s was -35 % off, because gloo's ring reached 60 % of the wire there. Beyond "
    "8 ranks intervals are extrapolated."
)


@dataclass(frozen=True)
class Interval:
    """What lies between two numbers."""

    low: float
    high: float


def links_between(link: Link, ranks: int, measured: int) -> tuple[Link, Link]:
    """The fastest and the slowest that collectives of ``ranks`` may find.

    Args:
        link: what they find if as large a share of the wire is reached as by ``measured`` ranks.
        ranks: for which ``link`` is.
        measured: ranks that reached the share which ``link`` has.
    """
    share = (ranks / measured) ** _FALL
    fast, slow = max(share, 1.0), min(share, 1.0)
    return Link(link.latency, link.bandwidth * fast), Link(link.latency, link.bandwidth * slow)


def with_noise(fast: float, slow: float) -> Interval:
    """Seconds, from those of the fastest and of the slowest link."""
    return Interval(fast * _SHORTEST, slow * _LONGEST)
