"""What the GPU is and how it is doing: clocks, power, temperature, and what slows it down."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bench import harness
from fastddp.tools.doctor import nvml


def facts(device: torch.device) -> harness.Row:
    """The columns that stay the same for a whole section."""
    row = harness.environment("bench.gpu", device, torch.get_num_threads())
    row["triton"] = _version_of_triton()
    row["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row |= {
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": properties.L2_cache_size / 2**20,
        }
    return row


def state(device: torch.device) -> harness.Row:
    """How the GPU is doing right now, by NVML; a value that the driver does not give is None."""
    if device.type != "cuda":
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception as error:  # no library, no driver, or a driver that hides the GPU: nothing to be recorded
        return {"nvml": f"not available: {error}"}
    return read_nvml(pynvml, handle)


def read_nvml(module: Any, handle: Any) -> harness.Row:
    """The columns of one GPU, from the module pynvml or one that looks like it."""
    driver = nvml.Driver(module)
    gpu = nvml.read_gpu(driver, handle)
    same = ("sm_mhz", "sm_max_mhz", "memory_mhz", "memory_max_mhz", "power_w", "temperature_c", "ecc")
    return {
        "driver": driver.ask("nvmlSystemGetDriverVersion"),
        "gpu_name": gpu.name,
        "throttle_reasons": None if gpu.slowed_by is None else list(gpu.slowed_by),
        **{name: getattr(gpu, name) for name in same},
    }


@functools.cache
def _version_of_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
