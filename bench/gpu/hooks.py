"""A training step with communication hooks, on one GPU: what compression adds when there is nobody to talk to."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn

from bench.gpu.contestants import HOOKS, REFERENCE, Mode, hook_modes
from bench.gpu.models import cases
from bench.gpu.results import Run
from bench.gpu.step import lonely_group, measure_groups

_STEPS_UNTIL_LOADED = 4  # PowerSGD loads its kernels in the third


def measure(run: Run) -> None:
    """Adds a row for each model and contestant, as soon as it is known."""
    torch.backends.cudnn.benchmark = True
    contestants = hook_modes(HOOKS[:2] if run.quick else HOOKS)
    with lonely_group(run.device):
        with run.not_counted():
            load_kernels(contestants, run.device)
        measure_groups(run, cases(run.quick)[0], groups_of(contestants), "step with hooks")


def groups_of(modes: Sequence[Mode]) -> list[list[Mode]]:
    """Without a hook first; then by hook, each beside the plain model and torch's DDP."""
    without = [mode for mode in modes if mode.hook is None]
    beside = [mode for mode in without if mode.engine == "plain" or mode.name == REFERENCE]
    names = dict.fromkeys(mode.hook.name for mode in modes if mode.hook is not None)
    return [
        without,
        *([*beside, *(mode for mode in modes if mode.hook is not None and mode.hook.name == name)] for name in names),
    ]


def load_kernels(modes: Sequence[Mode], device: torch.device) -> None:
    """Compile and load what hooks take for gradients of fp32, by steps of a model that is as small as they compress."""
    for mode in modes:
        if mode.engine != "fastddp":
            continue
        step = mode.prepare(_Small().to(device))
        for _ in range(_STEPS_UNTIL_LOADED):
            step.run((torch.ones(8, 64, device=device),))
        del step
        gc.collect()


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).square().mean()  # type: ignore[no-any-return]
