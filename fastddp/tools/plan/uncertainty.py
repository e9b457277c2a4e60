"""How wrong predictions were, and so the interval of a predicted time.

Note [Where the interval comes from]. Predicted steps were compared with measured ones twice, over gloo on CPUs. From
profiles of 2 ranks, steps on 4 were predicted 3 % too short to 5 % too long. On 8 ranks at 200 Mbit/s, a step was
predicted 35 % too short: gloo's ring reached 60 % of the wire there, and near 100 % with 2 ranks. So intervals have
two parts.

*Noise*: any step may take from 1 / 1.05 to 1 / 0.97 of the prediction.

*The share of the wire* that a ring reaches falls as its ranks grow. From 2 ranks to 8, four times as many, it fell to
0.6. Nothing more is known, so we assume this factor for each fourfold growth: 0.77 from 2 ranks to 4, 0.28 to 64, 0.10
to 1,024. One end of an interval has the whole share, the other end the smaller one. So intervals contain what was
measured. They have only noise if as many ranks are predicted as were measured, and grow with the distance from there.
Beyond 8 ranks they are extrapolated. NCCL's rings may do better: that was not measured.
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
"""Ranks with which gloo's ring reached near 100 % of the wire."""

HOW_WRONG = (
    "Intervals are as wide as predictions were wrong (over gloo, on CPUs): those for 4 ranks from 2 were -3 to +5 % "
    "off, and one for 8 ranks at 200 Mbit/s was -35 % off, because gloo's ring reached 60 % of the wire there. Beyond "
    "8 ranks intervals are extrapolated."
)


@dataclass(frozen=True)
class Interval:
    """From one number to another."""

    low: float
    high: float


def links_between(link: Link, ranks: int, measured: int) -> tuple[Link, Link]:
    """The fastest and the slowest link that collectives of ``ranks`` may have.

    Args:
        link: theirs, if they reach the same share of the wire as ``measured`` ranks.
        ranks: of the collectives.
        measured: ranks that reached ``link``'s share of the wire.
    """
    share = (ranks / measured) ** _FALL
    fast, slow = max(share, 1.0), min(share, 1.0)
    return Link(link.latency, link.bandwidth * fast), Link(link.latency, link.bandwidth * slow)


def with_noise(fast: float, slow: float) -> Interval:
    """Seconds, from those over the fastest and the slowest link."""
    return Interval(fast * _SHORTEST, slow * _LONGEST)
