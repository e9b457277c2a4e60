"""What `fastddp doctor` says about GPUs that NVML describes."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from rich.console import Console

from fake_nvml import BRIDGE, FakeGpu, FakeNvml, uuid
from fastddp.tools.doctor import nvml as nvml_module
from fastddp.tools.doctor import printing, report, software
from fastddp.tools.doctor.examination import Examination
from fastddp.tools.doctor.nvml import read_machine
from fastddp.tools.doctor.report import Report
from fastddp.tools.doctor.torch_gpus import TorchGpus

IDLE = pynvml.nvmlClocksEventReasonGpuIdle
VOLATILE, AGGREGATE = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
CORRECTED, UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
# Of a machine with CUDA, whatever is installed where the tests run.
SOFTWARE = replace(software.look(), cuda="13.0", misfit=None, triton_problem=None, nvtx=True, triton="3.7.1")


def seen(*numbers: int, cuda: str | None = "13.0") -> TorchGpus:
    uuids = tuple(uuid(number) for number in numbers)
    return TorchGpus(uuids, ("H100",) * len(numbers), (90,) * len(numbers), cuda)


def diagnose(
    nvml: FakeNvml, torch_gpus: TorchGpus | None = None, hidden_by: str | None = None, load: float = 4.0
) -> Report:
    machine = read_machine(nvml)
    if torch_gpus is None:
        torch_gpus = seen(*range(len(machine.gpus)))
    return report.write(None, {0: Examination("node", SOFTWARE, machine, torch_gpus, "cpu", (), hidden_by, load, 4)})


def page(found: Report, width: int = 250) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(printing.page(found))
    return out.getvalue()


HEALTHY = (
    *("driver 580.95.05, for CUDA up to 13.0", "cuda:1", "NVIDIA H100 80GB HBM3", "79.0 of 80.0", "1980 of 1980"),
    *("2619 of 2619", "650 of 700", "18 of 18", "26.6", "5 of 5", "16 of 16", "Nothing is wrong, no remarks."),
)


def test_healthy_gpus_are_described_and_nothing_is_found() -> None:
    found = diagnose(FakeNvml(FakeGpu(), FakeGpu()))
    assert (found.findings, found.status) == ((), 0)
    assert all(words in page(found) for words in HEALTHY)
    assert "not told" not in page(found)
    assert json.loads(json.dumps(asdict(found)))["machines"][0]["machine"]["gpus"][1]["pcie_width"] == 16


def test_every_call_is_one_that_pynvml_takes() -> None:
    # The fake asks pynvml about each name and each number of arguments.
    bridged, older = FakeNvml(FakeGpu(leads_to=BRIDGE), FakeGpu(leads_to=BRIDGE)), FakeNvml(FakeGpu())
    older._refused = "nvmlDeviceGetCurrentClocksEventReasons"
    switched = FakeNvml(FakeGpu(links=0), FakeGpu(links=0))
    for nvml in (bridged, older, switched):
        diagnose(nvml)
    called = bridged.called | older.called | switched.called
    named = set(re.findall(r'"(nvml(?:Device|System)\w+)"', Path(nvml_module.__file__).read_text())) | {"nvmlInit"}
    assert called == named
    assert all(callable(getattr(pynvml, name)) for name in named)


def test_topology_is_that_of_nvlinks_where_there_are_any_and_bridges_join_pairs() -> None:
    switched, bridged = [FakeGpu(), FakeGpu(dead_links=2)], [FakeGpu(leads_to=BRIDGE, links=4) for _ in range(4)]
    shown = [
        [" ".join(str(path) or "-" for path in row) for row in diagnose(FakeNvml(*gpus)).machines[0].machine.topology]
        for gpus in (switched, bridged)
    ]
    assert shown[0] == ["- NV16", "NV16 -"]
    assert shown[1] == ["- NV4 SYS SYS", "NV4 - SYS SYS", "SYS SYS - NV4", "SYS SYS NV4 -"]


@pytest.mark.parametrize(
    ("ancestor", "path"),
    [("INTERNAL", "board"), ("SINGLE", "PIX"), ("MULTIPLE", "PXB"), ("HOSTBRIDGE", "PHB"), ("NODE", "NODE")],
)
def test_paths_over_pcie_have_the_names_of_nvidia_smi(ancestor: str, path: str) -> None:
    common = getattr(pynvml, f"NVML_TOPOLOGY_{ancestor}")
    found = diagnose(FakeNvml(FakeGpu(links=0), FakeGpu(links=0), ancestor=common))
    assert found.machines[0].machine.topology == (("", path), (path, ""))
    assert f"{path}: " in page(found)


def test_every_reason_of_pynvml_has_words() -> None:
    for mask in {getattr(pynvml, name) for name in dir(pynvml) if name.startswith("nvmlClocks") and "Reason" in name}:
        if isinstance(mask, int) and mask.bit_count() == 1:
            assert "no name" not in page(diagnose(FakeNvml(FakeGpu(reasons=mask))))
    assert "bit 40, which this nvidia-ml-py has no name for" in page(diagnose(FakeNvml(FakeGpu(reasons=1 << 40))))


def second(**changed: Any) -> FakeNvml:
    return FakeNvml(FakeGpu(), FakeGpu(**changed))


def throttled(reason: str) -> FakeNvml:
    return second(reasons=getattr(pynvml, f"nvmlClocksThrottleReason{reason}"), sm=1200, temperature=88)


A100, CUDA, MISMATCH = "NVIDIA A100-SXM4-80GB", "13.0", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
HIDDEN, TOO_OLD = (TorchGpus(cuda=CUDA, problem=f"{what} available") for what in ("No CUDA GPUs are", "No driver is"))
WITHOUT_BRIDGE, POWER_CAP = FakeGpu(links=12, dead_links=12), pynvml.nvmlClocksEventReasonSwPowerCap
HOT, REASONS = (
    FakeGpu(reasons=pynvml.nvmlClocksThrottleReasonHwThermalSlowdown),
    "nvmlDeviceGetCurrentClocksEventReasons",
)
PAST = {(CORRECTED, VOLATILE): 2, (UNCORRECTED, AGGREGATE): 5}
FOUND: dict[str, tuple[FakeNvml | Report, list[str], list[str]]] = {  # what is wrong, and what is a remark
    "heat, by the driver": (throttled("SwThermalSlowdown"), ["GPU 1: Its clocks are held down: too hot"], []),
    "heat, by hardware": (throttled("HwThermalSlowdown"), ["GPU 1: Its clocks are held down: too hot"], []),
    "a power brake": (throttled("HwPowerBrakeSlowdown"), ["GPU 1: Its clocks are held down: power brake"], []),
    "either": (throttled("HwSlowdown"), ["GPU 1: Its clocks are held down: slowed by hardware"], []),
    "the power limit": (second(reasons=POWER_CAP), [], ["GPU 1: Its clocks are held down: power limit."]),
    "idleness": (second(reasons=IDLE), [], []),
    "memory errors": (second(errors={(UNCORRECTED, VOLATILE): 3}), ["GPU 1: 3 memory error(s) since the driver"], []),
    "past or corrected ones": (second(errors=PAST), [], ["5 memory error(s) could not", "2 memory error(s) since"]),
    "no ECC": (second(ecc=(0, 0)), [], ["GPU 1: ECC is off"]),
    "little memory": (second(free=12 * 2**30), [], ["GPU 1: Only 12.0 of 80.0 GiB of its memory are free."]),
    "lanes": (second(width=8), ["GPU 1: Its PCIe link has 8 of 16 lanes."], []),
    "NVLinks": (second(dead_links=2), ["GPU 1: Only 16 of its 18 NVLinks are active."], []),
    "rows to remap": (second(remapped=(0, 1, 1, 0)), ["wait to be replaced by spare ones"], []),
    "rows that cannot be": (second(remapped=(0, 1, 0, 1)), ["could not be replaced by spare ones"], []),
    "a slow link": (second(generation=3), ["GPU 1: Its PCIe link runs at generation 3 of 5, under load"], []),
    "an idle link": (
        second(generation=1, reasons=IDLE, utilization=0),
        [],
        ["generation 1 of 5, while the GPU is idle"],
    ),
    "cards without a bridge": (FakeNvml(WITHOUT_BRIDGE, WITHOUT_BRIDGE), [], ["GPU 0: ", "GPU 1: "]),
    "a card alone": (FakeNvml(WITHOUT_BRIDGE), [], []),
    "kinds": (second(name=A100), [f"GPUs: They are of different kinds (NVIDIA H100 80GB HBM3: 0; {A100}: 1)."], []),
    "kinds of which a job uses one": (diagnose(second(name=A100), seen(0)), [], []),
    "another driver than its library": (diagnose(FakeNvml(fails=MISMATCH), TorchGpus()), ["NVML: NVML cannot be"], []),
    "a driver too old": (
        diagnose(FakeNvml(FakeGpu(), cuda=12080), TOO_OLD),
        [
            "torch: torch cannot use the machine's GPUs: No driver",
            "runs CUDA up to 12.8, and torch was built with 13.0",
        ],
        [],
    ),
    "an older minor version of CUDA": (diagnose(FakeNvml(FakeGpu(), cuda=12040), seen(0, cuda="12.8")), [], ["12.4"]),
    "no CUDA in torch": (diagnose(FakeNvml(FakeGpu()), TorchGpus()), ["torch: This torch was built without CUDA"], []),
    "GPUs that the user hides": (diagnose(FakeNvml(FakeGpu()), HIDDEN, hidden_by=""), [], ["CUDA_VISIBLE_DEVICES"]),
    "a busy machine": (
        diagnose(FakeNvml(FakeGpu()), load=4.1),
        [],
        ["times: The machine was busy before this began: load 4.1 on 4"],
    ),
    "no answer": (FakeNvml(FakeGpu(), refused="nvmlDeviceGetHandleByIndex"), ["GPU 0: "], []),
    "drivers before 535": (FakeNvml(HOT, refused=REASONS), ["GPU 0: Its clocks are held down"], []),
}


@pytest.mark.parametrize("which", FOUND)
def test_what_is_wrong_and_what_is_a_remark(which: str) -> None:
    about, wrong, remarks = FOUND[which]
    found = about if isinstance(about, Report) else diagnose(about)
    for level, expected in (("wrong", wrong), ("remark", remarks)):
        said = [f"{finding.about}: {finding.what}" for finding in found.findings if finding.level == level]
        assert len(said) == len(expected)
        assert all(words in sentence for words, sentence in zip(expected, said, strict=True))
    assert all(finding.remedy for finding in found.findings if finding.level == "wrong")
    assert found.status == bool(wrong)
    assert page(found)


def test_torchs_numbers_are_those_that_cuda_visible_devices_gives() -> None:
    found = diagnose(FakeNvml(FakeGpu(), FakeGpu(), FakeGpu()), seen(2, 0))
    assert found.machines[0].torch_numbers == {2: 0, 0: 1}


SHOWN = [
    "SystemGetDriverVersion", "SystemGetCudaDriverVersion_v2", "DeviceGetName", "DeviceGetMemoryInfo",
    "DeviceGetClockInfo", "DeviceGetMaxClockInfo", "DeviceGetTemperature", "DeviceGetPowerUsage",
    "DeviceGetEnforcedPowerLimit", "DeviceGetEccMode", "DeviceGetTotalEccErrors", "DeviceGetCurrPcieLinkGeneration",
    "DeviceGetMaxPcieLinkGeneration", "DeviceGetCurrPcieLinkWidth", "DeviceGetMaxPcieLinkWidth",
    "DeviceGetTopologyCommonAncestor",
]  # fmt: skip


@pytest.mark.parametrize("function", [f"nvml{name}" for name in SHOWN])
def test_what_the_driver_does_not_tell_is_said_to_be_not_told(function: str) -> None:
    found = diagnose(FakeNvml(FakeGpu(links=0), FakeGpu(links=0), refused=function))
    assert found.status == 0
    assert "not told" + " by the driver" * ("Device" in function) in page(found)


NOT_SHOWN = [
    "DeviceGetCount", "DeviceGetUUID", "DeviceGetPciInfo", "DeviceGetUtilizationRates", "DeviceGetRemappedRows",
    "DeviceGetCurrentClocksEventReasons", "DeviceGetNvLinkState", "DeviceGetNvLinkRemoteDeviceType",
    "DeviceGetNvLinkRemotePciInfo", "DeviceGetFieldValues",
]  # fmt: skip


@pytest.mark.parametrize("function", [f"nvml{name}" for name in NOT_SHOWN])
def test_nothing_is_wrong_because_the_driver_does_not_tell_something_else(function: str) -> None:
    for leads_to in (BRIDGE, "switch"):
        assert diagnose(FakeNvml(*(FakeGpu(leads_to=leads_to) for _ in range(2)), refused=function)).status == 0


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_a_driver_is_said_to_have_none(error: int) -> None:
    found = diagnose(FakeNvml(fails=error), TorchGpus())
    assert found.findings == ()
    assert "node: no NVIDIA driver" in page(found)
