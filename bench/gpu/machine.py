"""What the GPU is and how it is doing: clocks, power, temperature, and what slows it down."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bench import harness


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

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(module, function)(*arguments)
        except (AttributeError, module.NVMLError):
            return None

    power, ecc = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetEccMode", handle)
    mask = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    return {
        "driver": ask("nvmlSystemGetDriverVersion"),
        "gpu_name": ask("nvmlDeviceGetName", handle),
        "throttle_reasons": None if mask is None else _names_of_reasons(module, mask),
        "sm_mhz": ask("nvmlDeviceGetClockInfo", handle, module.NVML_CLOCK_SM),
        "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, module.NVML_CLOCK_SM),
        "memory_mhz": ask("nvmlDeviceGetClockInfo", handle, module.NVML_CLOCK_MEM),
        "memory_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, module.NVML_CLOCK_MEM),
        "power_w": None if power is None else power / 1000,
        "temperature_c": ask("nvmlDeviceGetTemperature", handle, module.NVML_TEMPERATURE_GPU),
        "ecc": None if ecc is None else bool(ecc[0]),
    }


def _names_of_reasons(module: Any, mask: int) -> list[str]:
    """What keeps the clocks down: NVML's names of the set bits."""
    prefix = "nvmlClocksEventReason"
    names = {getattr(module, name): name.removeprefix(prefix) for name in dir(module) if name.startswith(prefix)}
    return [names.get(1 << bit, f"bit {bit}") for bit in range(mask.bit_length()) if mask >> bit & 1]


@functools.cache
def _version_of_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
