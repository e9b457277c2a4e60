"""Versions, GPUs and settings, and whether they fit each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastddp import _build_check
from fastddp.listing import ranks
from fastddp.tools.doctor.findings import Finding, remark, wrong

_OLDEST_TORCH = (2, 11)
_MAY_DIFFER = ("Python", "driver")  # between ranks, without harm
_SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "makes the host wait for each kernel: nothing overlaps backward",
    "NCCL_P2P_DISABLE": "keeps NCCL from NVLink and from PCIe between GPUs",
    "NCCL_SHM_DISABLE": "keeps NCCL from memory that processes share",
    "NCCL_IB_DISABLE": "keeps NCCL from InfiniBand and RoCE",
}


@dataclass(frozen=True)
class Software:
    """What is installed, as text; None: it is not."""

    python: str
    torch: str
    cuda: str | None  # of torch
    nccl: str | None  # of torch
    triton: str | None
    triton_problem: str | None  # why it does not import, or cannot be used
    fastddp: str | None
    built_for: str | None  # the torch that fastddp._C was built for
    nvtx: bool | None  # whether names for NVTX were compiled in
    misfit: str | None  # why fastddp._C is of no use
    misfit_remedy: str
    driver: str  # empty: none, or it does not answer
    gpus: tuple[str, ...] = ()  # that torch sees, by name
    capabilities: tuple[int, ...] = ()  # of these, without the dot
    gpu_problem: str = ""  # why torch sees none though there is a driver

    def lines(self) -> dict[str, str]:
        """What to show: name → version or what it lacks."""
        extension = "not built" if self.built_for is None else f"built for torch {self.built_for}"
        if self.misfit is not None and self.built_for is not None:
            extension += ", of no use here"
        nvtx = {True: "names compiled in", False: "no names compiled in", None: "not known"}[self.nvtx]
        return {
            "Python": self.python,
            "torch": f"{self.torch}, {f'CUDA {self.cuda}' if self.cuda else 'without CUDA'}",
            "NCCL": self.nccl or "not in this torch",
            "Triton": self.triton or "not installed",
            "fastddp": self.fastddp or "not installed",
            "fastddp._C": extension,
            "NVTX": nvtx,
            "driver": self.driver or "no NVIDIA driver",
            "GPUs": ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)) or "none",
        }


def look() -> Software:
    """Ask what is installed here."""
    triton, triton_problem = _triton()
    misfit, remedy = _misfit()
    built_for, nvtx = _build()
    gpus, problem = _gpus()
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        triton=triton,
        triton_problem=triton_problem,
        fastddp=_version_of("fastddp"),
        built_for=built_for,
        nvtx=nvtx,
        misfit=misfit,
        misfit_remedy=remedy,
        driver=_driver(),
        gpus=tuple(gpu.name for gpu in gpus),
        capabilities=tuple(10 * gpu.major + gpu.minor for gpu in gpus),
        gpu_problem=problem,
    )


def _driver() -> str:
    """The driver's version as NVML gives it; empty: there is none."""
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no library, no driver, one that does not answer
        return ""


def _gpus() -> tuple[list[Any], str]:
    """Properties of the GPUs that torch sees, or why there are none; initialises CUDA."""
    if not torch.backends.cuda.is_built():
        return [], "this torch was built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # of many types, and their texts say what to do
        return [], str(error).strip().splitlines()[0]
    return [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())], ""


def versions() -> str:
    """What ``fastddp --version`` prints; it does not load the extension.

    The version is the installed distribution's: the package cannot be asked if its extension does not fit.
    """
    built_for, _ = _build()
    extension = "not built" if built_for is None else f"built for torch {built_for}"
    return f"fastddp {_version_of('fastddp') or 'not installed'}, fastddp._C {extension}"


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _triton() -> tuple[str | None, str | None]:
    """Its version, and why the kernels cannot be compiled with it."""
    try:
        import triton

        from fastddp.kernels.ahead_of_time import scratch_parameters
    except ImportError as error:
        return None, f"Triton does not import: {str(error).rstrip('.')}."
    try:
        scratch_parameters(triton.__version__)
    except RuntimeError as error:
        return triton.__version__, f"{str(error).rstrip('.')}."
    return triton.__version__, None


def _misfit() -> tuple[str | None, str]:
    """Why ``fastddp._C`` is of no use, and what to do."""
    misfit = _build_check.misfit()
    if misfit is None:
        try:
            importlib.import_module("fastddp._C")
        except ImportError as error:
            misfit = f"fastddp._C does not import: {str(error).rstrip('.')}."
    return misfit, _build_check.REBUILD


def _build() -> tuple[str | None, bool | None]:
    """What setup.py has recorded: torch's version, and whether it found NVTX's headers."""
    if importlib.util.find_spec("fastddp._C") is None or importlib.util.find_spec("fastddp._build_info") is None:
        return None, None
    record = importlib.import_module("fastddp._build_info")
    headers = getattr(record, "nvtx_headers", None)
    return record.torch_version, None if headers is None else bool(headers)


def findings(software: Software) -> list[Finding]:
    """Findings on what does not fit."""
    found = []
    capabilities = software.capabilities
    if software.driver and not capabilities:
        what = (
            f"There is an NVIDIA driver, and torch uses no GPU: {software.gpu_problem.rstrip('.') or 'it sees none'}."
        )
        look = "See nvidia-smi, CUDA_VISIBLE_DEVICES, and whether a container was started with GPUs."
        make = remark if "CUDA_VISIBLE_DEVICES" in os.environ else wrong
        found.append(make("torch", what, look))
    if len(set(software.gpus)) > 1:
        what = f"They are of different kinds ({', '.join(software.gpus)}): each step waits for the slowest."
        found.append(wrong("GPUs", what, "Choose GPUs of one kind with CUDA_VISIBLE_DEVICES."))
    least_capability = _least_capability(software)
    if tuple(int(part) for part in software.torch.split(".")[:2]) < _OLDEST_TORCH:
        found.append(
            wrong("torch", f"torch {software.torch} is older than fastddp takes.", "Install torch 2.11 or newer.")
        )
    if software.misfit is not None:
        found.append(wrong("fastddp._C", software.misfit, software.misfit_remedy))
    if software.triton_problem is not None:
        install = "pip install triton, in the version that this torch names (pip show torch)."
        if any(capability >= least_capability for capability in capabilities):
            found.append(wrong("Triton", f"{software.triton_problem} GPUs need it.", install))
        else:
            found.append(remark("Triton", f"{software.triton_problem} Only GPUs need it."))
    old = [capability for capability in capabilities if capability < least_capability]
    if old:
        less = f"compute capability {min(old) / 10:.1f}, not {least_capability / 10:.1f}"
        what = f"{len(old)} GPU(s) are older than fastddp's kernels ({less})."
        found.append(remark("GPUs", what, "Gradients are packed by torch's operators there: right, and slower."))
    if software.nvtx is False:
        headers = "If you want them, install CUDA's headers (pip install nvidia-nvtx) and build fastddp again."
        found.append(remark("NVTX", "Nsight Systems will show no names of fastddp's; torch.profiler does.", headers))
    return found


def environment_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Findings on settings in the environment that silently slow a job down."""
    found = []
    for name, what in _SLOW_SETTINGS.items():
        if environment.get(name, "") not in ("", "0"):
            make = wrong if name == "CUDA_LAUNCH_BLOCKING" else remark
            found.append(make("environment", f"{name} {what}.", "Unset it, if nobody remembers why it is there."))
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "TORCH_DISTRIBUTED_DEBUG=DETAIL lets ranks compare each collective before it runs."
        found.append(remark("environment", what, "Unset it when you look for no hang."))
    return found


def _least_capability(software: Software) -> int:
    """The least one for which fastddp launches its own kernels; 0 if unknown."""
    if software.misfit is not None:
        return 0
    from fastddp.exchange.launching import LEAST_CAPABILITY

    return LEAST_CAPABILITY


def differences(by_rank: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Findings on ranks that differ from the most frequent value; among equally frequent ones, the lowest rank's.

    Args:
        by_rank: what :meth:`Software.lines` showed on each rank.
    """
    found = []
    for name in dict.fromkeys(name for lines in by_rank.values() for name in lines):
        ranks_by_value: dict[str, list[int]] = {}
        for rank in sorted(by_rank):
            ranks_by_value.setdefault(by_rank[rank].get(name, "not told"), []).append(rank)
        if len(ranks_by_value) == 1:
            continue
        usual, *others = sorted(ranks_by_value.items(), key=lambda item: -len(item[1]))
        make = remark if name in _MAY_DIFFER else wrong
        what = "; ".join(f"{value} on {ranks(numbers)}" for value, numbers in others)
        found.append(make(name, f"Ranks differ: {what}; {usual[0]} on {ranks(usual[1])}.", "Make all machines alike."))
    return found
