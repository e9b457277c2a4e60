"""What the time of a step was for.

The definitions follow HolisticTraceAnalysis. On each rank the intervals of all compute activities are merged, and so
are the intervals of all communication. Compute is a device's kernels; on the CPU, operators. Waiting for a collective
is neither compute nor communication. Fastddp's pack and unpack are compute.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """A step's time in ms; the five parts add up to it. A step report has no idle time and no copies."""

    compute: float
    """Compute, and no communication."""
    overlapped: float
    """Both."""
    exposed: float
    """Communication, and no compute: what the step would save if communication took no time."""
    idle: float
    """None of the others."""
    copy: float = 0.0
    """Neither compute nor communication, but a copy or a memset on the device."""

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.overlapped + self.exposed + self.copy + self.idle

    @property
    def communication(self) -> float:
        """The time in which at least one collective was under way."""
        return self.overlapped + self.exposed
