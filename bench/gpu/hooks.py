"""A training step with communication hooks, on one GPU: what compression adds when there is nobody to talk to."""

from __future__ import annotations

import gc

import torch

from bench.gpu.contestants import hook_modes
from bench.gpu.models import cases
from bench.gpu.results import Run
from bench.gpu.step import lonely_group, measure_case


def measure(run: Run) -> None:
    """Adds a row for each model and contestant."""
    torch.backends.cudnn.benchmark = True
    with lonely_group(run.device):
        for case in cases(run.quick):
            if run.out_of_time():
                run.skip(f"training step of {case.name} with hooks")
                continue
            measure_case(run, case, hook_modes(), "step with hooks")
            gc.collect()
