"""What the time of a step was for.

Definitions, after HolisticTraceAnalysis: on each rank, the intervals of all compute activities are merged, and so are
those of all communication. Within a step, the time in which there is

- compute and no communication is *compute only*,
- both is *overlapped*,
- communication and no compute is *exposed*: what the step would save if communication took no time,
- neither, but a copy or a memset of the device's is *copies*,
- none of them is *idle*.

The five add up to the step. Compute is what a device's kernels do; on the CPU, what operators do. Waiting for a
collective is neither, and fastddp's pack and unpack are compute.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """A step's time in ms."""

    compute: float
    overlapped: float
    exposed: float
    idle: float
    copy: float = 0.0

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.overlapped + self.exposed + self.copy + self.idle

    @property
    def communication(self) -> float:
        """In which at least one collective was under way."""
        return self.overlapped + self.exposed
