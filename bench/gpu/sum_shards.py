"""What adds up shards of 16 bits on the GPU: `bench.sum_shards`."""

from __future__ import annotations

from bench.gpu.kernels import measure_family
from bench.gpu.results import Run
from bench.sum_shards import FAMILY


def measure(run: Run) -> None:
    """Adds a row for each operation and contestant."""
    measure_family(run, FAMILY)
