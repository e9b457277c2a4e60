"""What NVML tells of this machine's GPUs. None: the driver does not tell.

NVML: https://docs.nvidia.com/deploy/nvml-api, through the module pynvml of ``nvidia-ml-py``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

_REASONS = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")  # their newer and older names
_NO_REASON = ("All", "None")
_NO_DRIVER = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
_BY_ANCESTOR = {
    "NVML_TOPOLOGY_INTERNAL": "board",
    "NVML_TOPOLOGY_SINGLE": "PIX",
    "NVML_TOPOLOGY_MULTIPLE": "PXB",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PHB",
    "NVML_TOPOLOGY_NODE": "NODE",
    "NVML_TOPOLOGY_SYSTEM": "SYS",
}

PATHS = {
    "NV": "that many NVLinks",
    "board": "one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "several bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
"""What the entries of a topology mean, the fastest first."""


@dataclass(frozen=True)
class NvLink:
    """One link of a GPU."""

    is_active: bool
    gb_per_s: float | None  # 10⁹ bytes a second, in each direction
    leads_to: str | None  # "switch", or a GPU's PCI address


@dataclass(frozen=True)
class Gpu:
    """One GPU, at one moment."""

    index: int  # in the order of PCI addresses, whatever CUDA_VISIBLE_DEVICES says
    answers: bool  # to any question
    uuid: str | None = None
    pci_address: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    memory_max_mhz: int | None = None
    slowed_by: tuple[str, ...] | None = None  # what keeps the clocks down, in NVML's names
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    ecc: bool | None = None
    corrected: int | None = None  # memory errors, since the driver was loaded
    uncorrected: int | None = None
    uncorrected_ever: int | None = None
    remap_pending: bool | None = None  # of rows of memory that are broken
    remap_failed: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: tuple[NvLink, ...] = ()

    @property
    def active_nvlinks(self) -> tuple[NvLink, ...]:
        """The links that are active."""
        return tuple(link for link in self.nvlinks if link.is_active)


@dataclass(frozen=True)
class Machine:
    """All GPUs of one machine."""

    nvml: Literal["answers", "no driver", "fails"]
    problem: str = ""  # in NVML's words
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver runs
    gpus: tuple[Gpu, ...] = ()
    topology: tuple[tuple[str | None, ...], ...] = ()  # NV18, PIX, ...; [i][i] is ""


class Driver:
    """NVML's functions by name. ``ask`` returns None if this driver or this pynvml cannot answer."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def ask(self, function: str, *arguments: Any) -> Any:
        """What the function returns."""
        try:
            return getattr(self.nvml, function)(*arguments)
        except (AttributeError, self.nvml.NVMLError):
            return None

    def constant(self, name: str) -> Any:
        """One of NVML's numbers."""
        return getattr(self.nvml, name, None)


def read_machine(nvml: Any = None) -> Machine:
    """Ask about everything, once.

    Args:
        nvml: the module pynvml, or one with functions of the same names. Default: the one that is installed.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError as error:
        return Machine("fails", f"{error} (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Machine("no driver" if type(error).__name__ in _NO_DRIVER else "fails", str(error))
    driver = Driver(nvml)
    handles = [
        driver.ask("nvmlDeviceGetHandleByIndex", index) for index in range(driver.ask("nvmlDeviceGetCount") or 0)
    ]
    gpus = tuple(read_gpu(driver, handle, index) for index, handle in enumerate(handles))
    version = driver.ask("nvmlSystemGetCudaDriverVersion_v2")
    return Machine(
        "answers",
        driver=driver.ask("nvmlSystemGetDriverVersion"),
        driver_cuda=None if version is None else (version // 1000, version % 1000 // 10),
        gpus=gpus,
        topology=_topology(driver, handles, gpus),
    )


def read_gpu(driver: Driver, handle: Any, index: int = 0) -> Gpu:
    """Ask about one GPU. A handle of None means a GPU that does not answer."""
    if handle is None:
        return Gpu(index, answers=False)

    def ask(function: str, *arguments: Any) -> Any:
        return driver.ask(function, handle, *(driver.constant(a) if isinstance(a, str) else a for a in arguments))

    pci = ask("nvmlDeviceGetPciInfo")
    memory = ask("nvmlDeviceGetMemoryInfo")
    utilization = ask("nvmlDeviceGetUtilizationRates")
    ecc = ask("nvmlDeviceGetEccMode")
    remapped = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, is pending, has failed
    mask = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if mask is None:  # before driver 535
        mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    errors = "nvmlDeviceGetTotalEccErrors"
    return Gpu(
        index,
        answers=True,
        uuid=ask("nvmlDeviceGetUUID"),
        pci_address=None if pci is None else _text(pci.busId),
        name=ask("nvmlDeviceGetName"),
        memory_bytes=None if memory is None else memory.total,
        free_bytes=None if memory is None else memory.free,
        sm_mhz=ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
        sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
        memory_mhz=ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
        memory_max_mhz=ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
        slowed_by=_names_of_reasons(driver.nvml, mask),
        utilization_percent=None if utilization is None else utilization.gpu,
        temperature_c=ask("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        power_w=_watts(ask("nvmlDeviceGetPowerUsage")),
        power_limit_w=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        ecc=None if ecc is None else bool(ecc[0]),
        corrected=ask(errors, "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"),
        uncorrected=ask(errors, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),
        uncorrected_ever=ask(errors, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_AGGREGATE_ECC"),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=_nvlinks(driver, handle),
    )


def _names_of_reasons(nvml: Any, mask: int | None) -> tuple[str, ...] | None:
    """The names of the set bits in NVML's mask of what keeps the clocks down."""
    if mask is None:
        return None
    names: dict[int, str] = {}
    for prefix in _REASONS:
        for attribute in dir(nvml):
            name = attribute.removeprefix(prefix)
            if attribute.startswith(prefix) and name not in _NO_REASON:
                names[getattr(nvml, attribute)] = name
    return tuple(names.get(1 << bit, f"bit {bit}") for bit in range(mask.bit_length()) if mask >> bit & 1)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _nvlinks(driver: Driver, handle: Any) -> tuple[NvLink, ...]:
    """NVML tells no state for links that the GPU lacks."""
    states = {
        link: driver.ask("nvmlDeviceGetNvLinkState", handle, link)
        for link in range(driver.constant("NVML_NVLINK_MAX_LINKS") or 0)
    }
    return tuple(
        NvLink(True, _link_speed(driver, handle, link), _leads_to(driver, handle, link))
        if state
        else NvLink(False, None, None)
        for link, state in states.items()
        if state is not None
    )


def _link_speed(driver: Driver, handle: Any, link: int) -> float | None:
    """The speed of one link; some drivers only tell one speed for all."""
    for field in ((driver.constant("NVML_FI_DEV_NVLINK_GET_SPEED"), link), "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON"):
        wanted = driver.constant(field) if isinstance(field, str) else field
        values = driver.ask("nvmlDeviceGetFieldValues", handle, [wanted])
        if values is not None and values[0].nvmlReturn == 0 and values[0].value.uiVal:
            return values[0].value.uiVal / 1000
    return None


def _leads_to(driver: Driver, handle: Any, link: int) -> str | None:
    kind = driver.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    if kind is not None and kind == driver.constant("NVML_NVLINK_DEVICE_TYPE_SWITCH"):
        return "switch"
    pci = driver.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    return None if pci is None else _text(pci.busId)


def _topology(driver: Driver, handles: list[Any], gpus: tuple[Gpu, ...]) -> tuple[tuple[str | None, ...], ...]:
    ancestors = {driver.constant(name): path for name, path in _BY_ANCESTOR.items()}

    def path(one: int, other: int) -> str | None:
        if one == other:
            return ""
        links = _links_between(gpus[one], gpus[other])
        if links:
            return f"NV{links}"
        if handles[one] is None or handles[other] is None:
            return None
        return ancestors.get(driver.ask("nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other]))

    return tuple(tuple(path(one, other) for other in range(len(gpus))) for one in range(len(gpus)))


def _links_between(one: Gpu, other: Gpu) -> int:
    """How many NVLinks join the two. Through switches, each GPU reaches all others with all its links."""
    direct = [link for link in one.active_nvlinks if link.leads_to is not None and link.leads_to == other.pci_address]
    switched = min(sum(link.leads_to == "switch" for link in gpu.active_nvlinks) for gpu in (one, other))
    return len(direct) or switched
