"""Block8's kernels on the GPU: `bench.block8`."""

from __future__ import annotations

from bench.block8 import FAMILY
from bench.gpu.kernels import measure_family
from bench.gpu.results import Run


def measure(run: Run) -> None:
    """Adds a row for each operation and contestant."""
    measure_family(run, FAMILY)
