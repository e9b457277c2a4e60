"""What the GPU is and how it is doing: clocks, power, temperature, and what slows it down."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bench import harness

_REASONS = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")  # their older and newer names
_NO_REASON = ("All", "None")


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


def read_nvml(nvml: Any, handle: Any) -> harness.Row:
    """The columns of one GPU, from the module pynvml or one that looks like it."""

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except nvml.NVMLError:
            return None

    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    ecc = ask(nvml.nvmlDeviceGetEccMode, handle)
    return {
        "driver": ask(nvml.nvmlSystemGetDriverVersion),
        "gpu_name": ask(nvml.nvmlDeviceGetName, handle),
        "sm_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "sm_max_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "memory_max_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "throttle_reasons": reasons(nvml, ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)),
        "power_w": None if milliwatts is None else milliwatts / 1000,
        "temperature_c": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "ecc": None if ecc is None else bool(ecc[0]),
    }


def reasons(nvml: Any, mask: int | None) -> list[str] | None:
    """The names of the bits that are set in NVML's mask of what keeps the clocks down."""
    if mask is None:
        return None
    names: dict[int, str] = {}
    for prefix in _REASONS:
        for attribute in dir(nvml):
            name = attribute.removeprefix(prefix)
            if attribute.startswith(prefix) and name not in _NO_REASON:
                names[getattr(nvml, attribute)] = name
    return [names.get(1 << bit, f"bit {bit}") for bit in range(mask.bit_length()) if mask >> bit & 1]


@functools.cache
def _version_of_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
