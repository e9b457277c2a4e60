"""What looks wrong about GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastddp.tools.doctor.findings import Finding, remark, wrong
from fastddp.tools.doctor.nvml import Gpu, Machine

_ENOUGH_FREE = 0.9  # of a GPU's memory; the rest is what drivers and CUDA contexts take


@dataclass(frozen=True)
class Slowdown:
    """A reason for low clocks in words, with its remedy. Without a level, it is harmless."""

    words: str
    level: str | None = None
    remedy: str = ""


_COOL = "Look after fans, air flow and dust, and at how hot the GPU's neighbours are; until then steps are slower."
_POWER = "Check power supply and cables."
SLOWDOWNS = {
    "GpuIdle": Slowdown("idle"),
    "ApplicationsClocksSetting": Slowdown(
        "clocks set by a user", "remark", "nvidia-smi --reset-applications-clocks gives them free."
    ),
    "UserDefinedClocks": Slowdown(
        "clocks set by a user", "remark", "nvidia-smi --reset-applications-clocks gives them free."
    ),
    "SwPowerCap": Slowdown(
        "power limit",
        "remark",
        "Usual under full load; if the limit is lower than the GPU's own, nvidia-smi -pl raises it.",
    ),
    "HwSlowdown": Slowdown("slowed by hardware (heat or power)", "wrong", f"{_COOL} {_POWER}"),
    "SyncBoost": Slowdown("kept at the clock of other GPUs", "remark", "One GPU of the group is slow: see the others."),
    "SwThermalSlowdown": Slowdown("too hot (slowed by the driver)", "wrong", _COOL),
    "HwThermalSlowdown": Slowdown("too hot (slowed by hardware)", "wrong", _COOL),
    "HwPowerBrakeSlowdown": Slowdown("power brake (slowed from outside)", "wrong", _POWER),
    "DisplayClockSetting": Slowdown("clocks set for a display", "remark", "Train on another GPU than the display's."),
    "BoardLimit": Slowdown("limit of the board", "remark", _POWER),
    "Reliability": Slowdown("limit of voltage", "remark"),
}
"""By NVML's names."""


def in_words(reason: str) -> str:
    """Why clocks are low."""
    return SLOWDOWNS[reason].words if reason in SLOWDOWNS else f"{reason}, which this nvidia-ml-py has no name for"


def findings(machine: Machine, used: Sequence[Gpu]) -> list[Finding]:
    """What looks wrong about a machine's GPUs.

    Args:
        machine: all there is.
        used: the GPUs that a job would use; findings are only about these.
    """
    if machine.nvml == "fails":
        return [
            wrong(
                "NVML",
                f"NVML cannot be asked about GPUs: {machine.problem.rstrip('.')}.",
                "After an update of the driver restart the machine; else check that nvidia-smi works.",
            )
        ]
    found = []
    for gpu in used:
        about = f"GPU {gpu.index}"
        if not gpu.answers:
            look = "See the kernel's log (dmesg | grep -i xid). A lost GPU comes back when the machine is restarted."
            found.append(wrong(about, "It does not answer: lost, or not ours to ask.", look))
        found += [*_clocks(about, gpu), *_memory(about, gpu), *_errors(about, gpu), *_pcie(about, gpu)]
        found += _nvlinks(about, gpu, len(used))
    return found + _kinds(used)


def _clocks(about: str, gpu: Gpu) -> list[Finding]:
    found = []
    for reason in gpu.slowed_by or ():
        slowdown = SLOWDOWNS.get(reason, Slowdown(in_words(reason), "remark"))
        if slowdown.level is None:
            continue
        make = wrong if slowdown.level == "wrong" else remark
        clock = f" It runs at {gpu.sm_mhz} of {gpu.sm_max_mhz} MHz." if gpu.sm_mhz and gpu.sm_max_mhz else ""
        heat = "" if gpu.temperature_c is None else f" It has {gpu.temperature_c} °C."
        found.append(make(about, f"Its clocks are held down: {in_words(reason)}.{clock}{heat}", slowdown.remedy))
    return found


def _memory(about: str, gpu: Gpu) -> list[Finding]:
    if gpu.memory_bytes is None or gpu.free_bytes is None or gpu.free_bytes >= _ENOUGH_FREE * gpu.memory_bytes:
        return []
    what = f"Only {gpu.free_bytes / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB of its memory are free."
    return [remark(about, what, "Another process uses it: nvidia-smi names it.")]


def _errors(about: str, gpu: Gpu) -> list[Finding]:
    found = []
    replace = "Reset the GPU (nvidia-smi --gpu-reset); if errors come back, have it replaced."
    if gpu.uncorrected:
        what = f"{gpu.uncorrected} memory error(s) since the driver was loaded could not be corrected (ECC)."
        found.append(wrong(about, what, replace))
    elif gpu.uncorrected_ever:
        what = f"{gpu.uncorrected_ever} memory error(s) could not be corrected (ECC), before the driver was loaded."
        found.append(remark(about, what, "Watch it: should more come, have it replaced."))
    if gpu.corrected:
        found.append(
            remark(about, f"{gpu.corrected} memory error(s) since the driver was loaded were corrected (ECC).")
        )
    if gpu.remap_failed:
        found.append(
            wrong(about, "Broken rows of its memory could not be replaced by spare ones.", "Have it replaced.")
        )
    if gpu.remap_pending:
        found.append(wrong(about, "Broken rows of its memory wait to be replaced by spare ones.", "Reset the GPU."))
    if gpu.ecc is False:
        found.append(remark(about, "ECC is off: memory errors go unnoticed.", "nvidia-smi --ecc-config=1, then reset."))
    return found


def _pcie(about: str, gpu: Gpu) -> list[Finding]:
    found = []
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        what = f"Its PCIe link has {gpu.pcie_width} of {gpu.pcie_width_max} lanes."
        found.append(
            wrong(about, what, "Seat the card or its riser anew, and see how the mainboard shares lanes (BIOS).")
        )
    if gpu.pcie_generation and gpu.pcie_generation_max and gpu.pcie_generation < gpu.pcie_generation_max:
        what = f"Its PCIe link runs at generation {gpu.pcie_generation} of {gpu.pcie_generation_max}"
        if is_busy(gpu):
            seat = "Check risers and cables, and the slot's speed in the BIOS."
            found.append(wrong(about, f"{what}, under load ({gpu.utilization_percent} % busy).", seat))
        else:
            look = "Idle links downshift and come back under load: look again while a job runs."
            found.append(remark(about, f"{what}, while the GPU is idle.", look))
    return found


def is_busy(gpu: Gpu) -> bool:
    """Whether something ran on it at that moment; if the driver does not tell, it is idle."""
    return bool(gpu.utilization_percent) and "GpuIdle" not in (gpu.slowed_by or ())


def _nvlinks(about: str, gpu: Gpu, gpus: int) -> list[Finding]:
    active, there = len(gpu.active_nvlinks), len(gpu.nvlinks)
    if active == there or gpus == 1:
        return []
    if active == 0:
        what = f"None of its {there} NVLinks is active: it reaches other GPUs over PCIe."
        return [
            remark(about, what, "Where there are NVSwitches, start nvidia-fabricmanager; else a bridge is missing.")
        ]
    check = (
        "See nvidia-smi nvlink --status: cards with two bridges may miss one; else reset the GPU or have it checked."
    )
    return [wrong(about, f"Only {active} of its {there} NVLinks are active.", check)]


def _kinds(used: Sequence[Gpu]) -> list[Finding]:
    kinds: dict[str, list[int]] = {}
    for gpu in used:
        if gpu.name is not None:
            kinds.setdefault(gpu.name, []).append(gpu.index)
    if len(kinds) < 2:
        return []
    which = "; ".join(f"{name}: {', '.join(map(str, indices))}" for name, indices in kinds.items())
    choose = "Choose GPUs of one kind with CUDA_VISIBLE_DEVICES: each step waits for the slowest."
    return [wrong("GPUs", f"They are of different kinds ({which}).", choose)]
