"""Versions, and whether they fit each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fastddp import _build_check
from fastddp.listing import ranks
from fastddp.tools.doctor.findings import Finding, remark, wrong

_OLDEST_TORCH = (2, 11)
_MAY_DIFFER = ("Python", "nvcc")  # between ranks, without harm


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
    nvcc: str | None  # where it is

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
            "nvcc": self.nvcc or "not found (not needed: Triton brings its own compiler)",
        }


def look() -> Software:
    """Ask what is installed here."""
    triton, triton_problem = _triton()
    misfit, remedy = _misfit()
    built_for, nvtx = _build()
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
        nvcc=shutil.which("nvcc"),
    )


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


def findings(software: Software, capabilities: Sequence[int]) -> list[Finding]:
    """Findings on what does not fit.

    Args:
        software: what is installed.
        capabilities: of the GPUs that torch sees, without the dot.
    """
    found = []
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
        found.append(
            make(name, f"Ranks differ: {what}; {usual[0]} on {ranks(usual[1])}.", "Install the same on all machines.")
        )
    return found
