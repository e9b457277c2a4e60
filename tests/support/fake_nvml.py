"""A fake of the module pynvml: its functions by name, over GPUs that a test describes.

Constants are pynvml's own. Each call is held against the signature of pynvml's function of that name, so a test that
passes has seen only calls that pynvml takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

SWITCH, BRIDGE = "switch", "bridge"  # what NVLinks lead to: NVSwitches, or the GPU next to it


@dataclass
class FakeGpu:
    """One GPU; the defaults are a healthy H100 at work."""

    name: str = "NVIDIA H100 80GB HBM3"
    free: int = 79 * 2**30
    sm: int = 1980
    reasons: int = 0
    utilization: int = 97
    temperature: int = 45
    ecc: tuple[int, int] = (1, 1)
    errors: dict[tuple[int, int], int] = field(default_factory=dict)  # (type, counter) → number
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    generation: int = 5
    width: int = 16
    links: int = 18
    dead_links: int = 0
    leads_to: str = SWITCH


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def pci_of(index: int) -> Any:
    return SimpleNamespace(busId=f"00000000:{index:02X}:00.0")


def link_state(gpu: FakeGpu, link: int) -> int:
    if link >= gpu.links:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return int(link >= gpu.dead_links)


def remote_type(gpu: FakeGpu, link: int) -> int:
    switched = gpu.leads_to == SWITCH
    return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switched else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU


def field_values(gpu: FakeGpu, fields: list[Any]) -> list[Any]:
    known = isinstance(fields[0], tuple) and fields[0][0] == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
    return [SimpleNamespace(nvmlReturn=0 if known else 3, value=SimpleNamespace(uiVal=26_562))]


# What functions nvmlDeviceGet... say of a GPU.
OF_A_GPU: dict[str, Callable[..., Any]] = {
    "Name": lambda gpu: gpu.name,
    "MemoryInfo": lambda gpu: SimpleNamespace(total=80 * 2**30, free=gpu.free),
    "ClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: gpu.sm, pynvml.NVML_CLOCK_MEM: 2619}[clock],
    "MaxClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}[clock],
    "CurrentClocksEventReasons": lambda gpu: gpu.reasons,
    "CurrentClocksThrottleReasons": lambda gpu: gpu.reasons,
    "UtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.utilization, memory=50),
    "Temperature": lambda gpu, sensor: {pynvml.NVML_TEMPERATURE_GPU: gpu.temperature}[sensor],
    "PowerUsage": lambda gpu: 650_000,
    "EnforcedPowerLimit": lambda gpu: 700_000,
    "EccMode": lambda gpu: list(gpu.ecc),
    "TotalEccErrors": lambda gpu, kind, counter: gpu.errors.get((kind, counter), 0),
    "RemappedRows": lambda gpu: gpu.remapped,
    "CurrPcieLinkGeneration": lambda gpu: gpu.generation,
    "MaxPcieLinkGeneration": lambda gpu: 5,
    "CurrPcieLinkWidth": lambda gpu: gpu.width,
    "MaxPcieLinkWidth": lambda gpu: 16,
    "NvLinkState": link_state,
    "NvLinkRemoteDeviceType": remote_type,
    "FieldValues": field_values,
}


class FakeNvml:
    """The module. ``refused``: a function that this driver does not support. ``fails``: how ``nvmlInit`` ends."""

    NVMLError = pynvml.NVMLError

    def __init__(
        self,
        *gpus: FakeGpu,
        refused: str = "",
        fails: int | None = None,
        cuda: int = 13000,
        ancestor: int = pynvml.NVML_TOPOLOGY_SYSTEM,
    ) -> None:
        self.called: set[str] = set()
        self._refused = refused
        self._fails = fails
        self._answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
            "nvmlDeviceGetCount": lambda: len(gpus),
            # Handles are the numbers of GPUs.
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": uuid,
            "nvmlDeviceGetPciInfo": pci_of,
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: pci_of(handle ^ 1),
            "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: ancestor,
        }
        for name, answer in OF_A_GPU.items():
            self._answers[f"nvmlDeviceGet{name}"] = lambda handle, *rest, answer=answer: answer(gpus[handle], *rest)

    def __dir__(self) -> list[str]:
        return [name for name in dir(pynvml) if name.startswith("nvmlClocks")]

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # raises for a name that pynvml does not have
        if not callable(real):
            return real

        def call(*arguments: Any) -> Any:
            inspect.signature(real).bind(*arguments)
            self.called.add(name)
            if name == self._refused:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            if name == "nvmlInit" and self._fails is not None:
                raise pynvml.NVMLError(self._fails)
            return self._answers[name](*arguments)

        return call
