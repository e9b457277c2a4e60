"""What nobody can know without the device: whether NCCL offers memory there, and what the first wrapper takes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastddp
from bench.gpu.results import Run
from bench.gpu.step import lonely_group


def measure(run: Run) -> None:
    """Adds one row."""
    with lonely_group(run.device):
        cached = kernels_in_tritons_cache()
        before = used_mib(run.device)
        module = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).to(run.device)
        model = fastddp.DistributedDataParallel(module)
        after_wrap = used_mib(run.device)
        model(torch.ones(2, 1024, device=run.device)).sum().backward()
        torch.accelerator.synchronize(run.device)
        run.results.add(
            "facts",
            programs={name: shutil.which(name) for name in ("nvcc", "g++", "ncu", "compute-sanitizer", "nvidia-smi")},
            shm_mib=shutil.disk_usage("/dev/shm").total / 2**20,
            processors=len(os.sched_getaffinity(0)),
            # What was carried along is of use if the first wrapper compiles nothing.
            kernels_in_cache=cached,
            kernels_compiled=kernels_in_tritons_cache() - cached,
            supports_tensor_alloc=supports_tensor_alloc(run.device),
            model_mib=sum(parameter.nbytes for parameter in module.parameters()) / 2**20,
            used_before_mib=before,
            used_after_wrap_mib=after_wrap,
            used_after_step_mib=used_mib(run.device),
        )


def supports_tensor_alloc(device: torch.device) -> bool | None:
    """Whether the default group's backend has memory that its network knows; None where this torch cannot ask."""
    group = dist.distributed_c10d._get_default_group()
    ask = getattr(group._get_backend(device), "supports_tensor_alloc", None)
    return None if ask is None else bool(ask(device))


def kernels_in_tritons_cache() -> int:
    """Binaries that need not be compiled."""
    from triton import knobs

    return sum(1 for _ in Path(knobs.cache.dir).glob("*/*.cubin"))


def used_mib(device: torch.device) -> float | None:
    """Of the device's memory, by whomever, and not by tensors alone. None where nobody counts it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free) / 2**20
