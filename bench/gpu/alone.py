"""What a training step costs besides time, one contestant after the other: memory, launches and copies."""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from bench import harness
from bench.cases import Batch
from bench.gpu.contestants import GpuStep, Mode

_WARMUP = 3  # buckets are rebuilt at the beginning of the second step
_STEPS = 2

# Kinds of work on the device, as the profiler's trace calls them, and as the rows do.
_KINDS = {"kernel": "launches", "gpu_memcpy": "memcpys", "gpu_memset": "memsets"}


def measure_alone(
    modes: Sequence[Mode],
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    device: torch.device,
    known: Mapping[str, harness.Row],
) -> dict[str, harness.Row]:
    """The columns of each mode, by its name. No two contestants exist at the same time.

    Known: those of others, with which these may be compared.
    """
    columns = dict(known)
    gc.collect()  # whoever was there before
    for mode in modes:
        step = mode.prepare(model)
        for index in range(_WARMUP):
            step.run(batch_of(index))
        columns[mode.name] = memory(step, batch_of, device) | work(step, batch_of, device)
        step.clear()
        del step
        gc.collect()
    for mode in modes:
        columns[mode.name] |= _added(columns[mode.name], columns[mode.plain])
    return columns


def memory(step: GpuStep, batch_of: Callable[[int], Batch], device: torch.device) -> harness.Row:
    """MiB that tensors take: at most within a step, and between two steps. None where nobody counts them."""
    if device.type != "cuda":
        return {"peak_mib": None, "steady_mib": None}
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for index in range(_STEPS):
        step.run(batch_of(index))
    torch.cuda.synchronize(device)
    return {
        "peak_mib": torch.cuda.max_memory_allocated(device) / 2**20,
        "steady_mib": torch.cuda.memory_allocated(device) / 2**20,
    }


def work(step: GpuStep, batch_of: Callable[[int], Batch], device: torch.device) -> harness.Row:
    """Kernels, copies and memsets of one step, counted by the profiler; None where it sees none."""
    counts: harness.Row = dict.fromkeys(_KINDS.values())
    if ProfilerActivity.CUDA not in supported_activities():
        return counts
    # Without the host's operators the trace is small; but not every profiler records kernels without them.
    for activities in ([ProfilerActivity.CUDA], [ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.accelerator.synchronize(device)
        with profile(activities=activities) as profiler:
            for index in range(_STEPS):
                step.run(batch_of(index))
            torch.accelerator.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            counts = count_work(path.read_text(), _STEPS)
        if counts["launches"] is not None:
            break
    return counts


def count_work(trace: str, steps: int) -> harness.Row:
    """From a Chrome trace of so many steps."""
    kinds = Counter(event.get("cat") for event in json.loads(trace)["traceEvents"])
    if not kinds["kernel"]:
        return dict.fromkeys(_KINDS.values())
    return {name: kinds[kind] / steps for kind, name in _KINDS.items()}


def _added(columns: harness.Row, plain: harness.Row) -> harness.Row:
    """What a mode has more of than the model without a DDP."""
    return {
        f"added_{name}": None if value is None or plain[name] is None else value - plain[name]
        for name, value in columns.items()
    }
