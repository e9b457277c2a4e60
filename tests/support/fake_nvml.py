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
    total: int = 80 * 2**30
    free: int = 79 * 2**30
    sm: int = 1980
    sm_max: int = 1980
    memory: int = 2619
    reasons: int = 0
    utilization: int = 97
    temperature: int = 45
    milliwatts: int = 650_000
    ecc: tuple[int, int] = (1, 1)
    errors: dict[tuple[int, int], int] = field(default_factory=dict)  # (type, counter) → number
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    generation: int = 5
    width: int = 16
    links: int = 18
    dead_links: int = 0
    leads_to: str = SWITCH


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
        self._gpus = gpus
        self._refused = refused
        self._fails = fails
        self._cuda = cuda
        self._ancestor = ancestor
        self.called: set[str] = set()

    def __dir__(self) -> list[str]:
        return [name for name in dir(pynvml) if name.startswith("nvmlClocks")]

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # raises for a name that pynvml does not have
        if not callable(real):
            return real
        answer = getattr(type(self), f"_{name.removeprefix('nvml')}", None)
        assert answer is not None, f"the doctor calls {name}, of which this fake knows nothing"
        return self._function(name, real, answer)

    def _function(self, name: str, real: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            inspect.signature(real).bind(*arguments)
            self.called.add(name)
            if name == self._refused:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer(self, *arguments)

        return call

    def _Init(self) -> None:
        if self._fails is not None:
            raise pynvml.NVMLError(self._fails)

    def _SystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def _SystemGetCudaDriverVersion_v2(self) -> int:
        return self._cuda

    def _DeviceGetCount(self) -> int:
        return len(self._gpus)

    def _DeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _DeviceGetUUID(self, handle: int) -> str:
        return uuid(handle)

    def _DeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def _DeviceGetName(self, handle: int) -> str:
        return self._gpus[handle].name

    def _DeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=self._gpus[handle].total, free=self._gpus[handle].free)

    def _DeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return {pynvml.NVML_CLOCK_SM: self._gpus[handle].sm, pynvml.NVML_CLOCK_MEM: self._gpus[handle].memory}[clock]

    def _DeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return {pynvml.NVML_CLOCK_SM: self._gpus[handle].sm_max, pynvml.NVML_CLOCK_MEM: 2619}[clock]

    def _DeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._gpus[handle].reasons

    _DeviceGetCurrentClocksThrottleReasons = _DeviceGetCurrentClocksEventReasons

    def _DeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._gpus[handle].utilization, memory=50)

    def _DeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return {pynvml.NVML_TEMPERATURE_GPU: self._gpus[handle].temperature}[sensor]

    def _DeviceGetPowerUsage(self, handle: int) -> int:
        return self._gpus[handle].milliwatts

    def _DeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def _DeviceGetEccMode(self, handle: int) -> list[int]:
        return list(self._gpus[handle].ecc)

    def _DeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self._gpus[handle].errors.get((kind, counter), 0)

    def _DeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self._gpus[handle].remapped

    def _DeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return self._gpus[handle].generation

    def _DeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def _DeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self._gpus[handle].width

    def _DeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def _DeviceGetNvLinkState(self, handle: int, link: int) -> int:
        gpu = self._gpus[handle]
        if link >= gpu.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link >= gpu.dead_links)

    def _DeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        switched = self._gpus[handle].leads_to == SWITCH
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switched else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU

    def _DeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return self._DeviceGetPciInfo(handle ^ 1)

    def _DeviceGetFieldValues(self, handle: int, fields: list[Any]) -> list[Any]:
        known = isinstance(fields[0], tuple) and fields[0][0] == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
        return [SimpleNamespace(nvmlReturn=0 if known else 3, value=SimpleNamespace(uiVal=26_562))]

    def _DeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self._ancestor


def uuid(index: int) -> str:
    """Of the GPU of this number."""
    return f"GPU-00000000-0000-0000-0000-{index:012d}"
