"""Versions and GPUs, and whether they fit each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastddp.extension.building import load
from fastddp.extension.choosing import candidates, torch_of
from fastddp.extension.compiling import find_torch
from fastddp.ranks.listing import ranks
from fastddp.tools.doctor.findings import Finding, remark, wrong

_MAY_DIFFER = ("Python", "driver")  # between ranks, without harm


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
    built_for: str | None  # the torch that fastddp._C was compiled for
    misfit: str | None  # why fastddp._C is of no use
    driver: str  # empty: none, or it does not answer
    gpus: tuple[str, ...] = ()  # that torch sees, by name
    gpu_problem: str = ""  # why torch sees none though there is a driver

    def lines(self) -> dict[str, str]:
        """What to show: name → version or what it lacks."""
        extension = _in_words(self.built_for)
        if self.misfit is not None and self.built_for is not None:
            extension += ", of no use here"
        return {
            "Python": self.python,
            "torch": f"{self.torch}, {f'CUDA {self.cuda}' if self.cuda else 'without CUDA'}",
            "NCCL": self.nccl or "not in this torch",
            "Triton": self.triton or "not installed",
            "fastddp": self.fastddp or "not installed",
            "fastddp._C": extension,
            "driver": self.driver or "no NVIDIA driver",
            "GPUs": ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)) or "none",
        }


def look() -> Software:
    """Ask what is installed here."""
    triton, triton_problem = _triton()
    gpus, problem = _gpus()
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        triton=triton,
        triton_problem=triton_problem,
        fastddp=_version_of("fastddp"),
        built_for=_built_for(),
        misfit=_misfit(),
        driver=_driver(),
        gpus=gpus,
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


def _gpus() -> tuple[tuple[str, ...], str]:
    """Names of the GPUs that torch sees, or why there are none; initialises CUDA."""
    if not torch.backends.cuda.is_built():
        return (), "this torch was built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # of many types, and their texts say what to do
        return (), str(error).strip().splitlines()[0]
    return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))), ""


def versions() -> str:
    """What ``fastddp --version`` prints, without loading the extension."""
    return f"fastddp {_version_of('fastddp') or 'not installed'}, fastddp._C {_in_words(_built_for())}"


def _in_words(built_for: str | None) -> str:
    return "not compiled for this torch" if built_for is None else f"compiled for torch {built_for}"


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


def _misfit() -> str | None:
    """Why ``fastddp._C`` is of no use."""
    torch_here = find_torch()
    why = "this Python has no torch" if torch_here is None else load(torch_here)
    return f"It cannot be loaded: {why}." if why else None


def _built_for() -> str | None:
    """The torch that the extension was compiled for; None: there is none for the torch of this Python."""
    torch_here = find_torch()
    folder = None if torch_here is None else next(candidates(torch_here), None)
    return None if folder is None else torch_of(folder)


def findings(software: Software) -> list[Finding]:
    """Findings on what does not fit."""
    found = []
    if software.driver and not software.gpus:
        why = software.gpu_problem.rstrip(".") or "it sees none"
        look = "See nvidia-smi, CUDA_VISIBLE_DEVICES, and whether a container was started with GPUs."
        make = remark if "CUDA_VISIBLE_DEVICES" in os.environ else wrong
        found.append(make("torch", f"There is an NVIDIA driver, and torch uses no GPU: {why}.", look))
    if len(set(software.gpus)) > 1:
        what = f"They are of different kinds ({', '.join(software.gpus)}): each step waits for the slowest."
        found.append(wrong("GPUs", what, "Choose GPUs of one kind with CUDA_VISIBLE_DEVICES."))
    if software.misfit is not None:
        remedy = "Run `python -m fastddp build` where there is a compiler: it is compiled, or says what is missing."
        found.append(wrong("fastddp._C", software.misfit, remedy))
    if software.triton_problem is not None and software.gpus:
        install = "pip install triton, in the version that this torch names (pip show torch)."
        found.append(wrong("Triton", f"{software.triton_problem} GPUs need it.", install))
    elif software.triton_problem is not None:
        found.append(remark("Triton", f"{software.triton_problem} Only GPUs need it."))
    return found


def differences(by_rank: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Findings on ranks whose :meth:`Software.lines` differ; the most frequent value comes last."""
    found = []
    for name in next(iter(by_rank.values()), {}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank in sorted(by_rank):
            ranks_by_value.setdefault(by_rank[rank][name], []).append(rank)
        usual, *others = sorted(ranks_by_value.items(), key=lambda item: -len(item[1]))
        if others:
            make = remark if name in _MAY_DIFFER else wrong
            what = "; ".join(f"{value} on {ranks(numbers)}" for value, numbers in [*others, usual])
            found.append(make(name, f"Ranks differ: {what}.", "Make all machines alike."))
    return found
