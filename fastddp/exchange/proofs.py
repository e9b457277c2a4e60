"""Files that record that a kernel has proven itself: see the note in csrc/device/compiled_kernels.h.

Where no file can be written, each job tries its kernels again, in its first step.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fastddp.kernels.ahead_of_time import CompiledKernel


@cache
def driver_version() -> str:
    """The driver's version as NVML gives it, such as "580.65.06"; empty where NVML does not answer."""
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # not installed, no library, no permission: nothing is recorded then
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


@cache
def place_of(device: torch.device) -> str:
    """The kind of device, the driver and the compiler, in words. A proof holds for these only."""
    import triton

    name = torch.get_device_module(device.type).get_device_name(device)
    return f"{name}, driver {driver_version() or 'unknown'}, Triton {triton.__version__}"


def proof_of(kernel: CompiledKernel, device: torch.device) -> Path | None:
    """The file, in Triton's cache, that exists once the kernel has passed on this kind of device with this driver.

    None: the driver's version is not known, or there is no folder to write to.
    """
    if not driver_version():
        return None
    from triton import knobs

    folder = Path(knobs.cache.dir) / "fastddp-proofs"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return folder / hashlib.sha256(kernel.cubin + f"{kernel.name}, {place_of(device)}".encode()).hexdigest()[:32]
    return None
