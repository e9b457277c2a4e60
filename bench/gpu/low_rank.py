"""PowerSGD's kernels on the GPU: `bench.low_rank`."""

from __future__ import annotations

from bench.gpu.kernels import measure_family
from bench.gpu.results import Run
from bench.low_rank import FAMILY


def measure(run: Run) -> None:
    """Adds a row for each operation and contestant."""
    measure_family(run, FAMILY)
