"""What memory a DDP takes, each in a process of its own: of tensors at most and between steps, and of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.cases import Batch, Case
from bench.contestants import VIEW, Engine, wrapped
from bench.gpu import apart
from bench.gpu.alone import memory
from bench.gpu.contestants import GpuStep
from bench.gpu.facts import used_mib
from bench.gpu.models import cases, gpt2, llama
from bench.gpu.results import Run


@dataclass(frozen=True)
class Setting:
    """A DDP, and how its AdamW is made: sharded, plain or not at all."""

    engine: Engine
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = ""


_FP32 = {"main_grads": "grad"}
SETTINGS: dict[str, dict[str, Setting]] = {
    "gpt2": {
        "plain": Setting("plain"),
        "torch": Setting("torch"),
        "torch-view": Setting("torch", VIEW),
        "fastddp": Setting("fastddp"),
        "fastddp-view": Setting("fastddp", VIEW),
    },
    "llama": {
        "torch": Setting("torch", optimizer="AdamW"),
        "torch-view": Setting("torch", VIEW, "AdamW"),
        "fastddp": Setting("fastddp", optimizer="AdamW"),
        "fastddp-fp32-sharded": Setting("fastddp", _FP32, "sharded AdamW"),
    },
}


def case_of(name: str, quick: bool) -> Case:
    """The model of the settings of this name."""
    if name == "llama":
        return llama(1, 8, quick=True) if quick else llama(8, 2048)
    return cases(quick=True)[0] if quick else gpt2(samples=8, length=1024)


def measure(run: Run) -> None:
    """Adds a row for each model and setting; quick: of the last alone."""
    for case, settings in SETTINGS.items():
        for name in settings:
            if run.quick and name != list(SETTINGS["llama"])[-1]:
                continue
            if run.out_of_time():
                run.skip(f"memory of {case} under {name}")
                continue
            for row in apart.rows(run, of_setting, case, name, run.quick):
                run.results.add("memory", **row)


class TrainingStep(GpuStep):
    """With an optimizer's step."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        super().__init__(module, zeroed=False)
        self.optimizer = optimizer

    def run(self, batch: Batch) -> None:
        """All of it."""
        super().run(batch)
        self.optimizer.step()


def of_setting(device: torch.device, case: str, name: str, quick: bool) -> list[harness.Row]:
    """In a fresh process: MiB of the device before the wrap, after it and after a step; of tensors in later ones."""
    setting = SETTINGS[case][name]
    model, batch_of = case_of(case, quick).build(device)
    torch.accelerator.synchronize(device)
    row: harness.Row = {"case": case, "contestant": name, "used_before_mib": used_mib(device)}
    module = wrapped(model, setting.engine, None, setting.options)
    del model
    row["used_after_wrap_mib"] = used_mib(device)
    step = _step(module, setting.optimizer)
    batches: Callable[[int], Batch] = partial(batch_of, 0)
    step.run(batches(0))
    row["used_after_step_mib"] = used_mib(device)
    for number in range(2):
        step.run(batches(number))
    return [row | harness.rounded(memory(step, batches, device), 6)]


def _step(module: nn.Module, optimizer: str) -> GpuStep:
    if not optimizer:
        return GpuStep(module, zeroed=False)
    if optimizer == "AdamW":
        return TrainingStep(module, torch.optim.AdamW(module.parameters(), lr=1e-4))
    import fastddp

    sharded: Any = fastddp.ShardedOptimizer(module, torch.optim.AdamW, lr=1e-4)  # type: ignore[arg-type]
    return TrainingStep(module, sharded)
