"""A training step in so many rounds that .3 % is no noise: torch's fastest setting and fastddp's, with clocks noted."""

from __future__ import annotations

import gc

import torch

from bench.gpu import machine
from bench.gpu.contestants import modes
from bench.gpu.models import cases
from bench.gpu.results import Run
from bench.gpu.step import lonely_group, measure_groups

ROUNDS = 60


def measure(run: Run) -> None:
    """Adds a row for each model and contestant, and one for how the GPU does after each model."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    contestants = [mode for mode in modes(seldom=False) if mode.name != "torch-again"]
    with lonely_group(run.device):
        for case in cases(run.quick):
            if run.out_of_time():
                run.skip(f"step rows of {case.name}")
                continue
            measure_groups(run, case, [contestants], "step rows", ROUNDS)
            run.results.add("state", when=f"after {case.name}", **machine.state(run.device))
            gc.collect()
