"""Makes the doctor's report from what processes found out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fastddp.tools.doctor import environment, exchange, gpu_findings, kernel_checks, software, torch_gpus
from fastddp.tools.doctor.examination import Examination
from fastddp.tools.doctor.exchange import Exchange, Timing
from fastddp.tools.doctor.findings import Finding, remark, wrong
from fastddp.tools.doctor.kernel_checks import KernelCheck
from fastddp.tools.doctor.nvml import Machine
from fastddp.tools.doctor.software import Software


@dataclass(frozen=True)
class MachineReport:
    """One machine."""

    host: str
    machine: Machine
    torch_numbers: dict[int, int]  # NVML's number of a GPU → torch's


@dataclass(frozen=True)
class KernelReport:
    """A check of kernels, and its rank."""

    rank: int | None
    check: KernelCheck


@dataclass(frozen=True)
class Report:
    """One run of the doctor."""

    ranks: int | None  # None: it was not started by torchrun
    software: Software | None  # of the lowest rank that answered
    machines: tuple[MachineReport, ...]
    kernels: tuple[KernelReport, ...]
    exchange: Exchange | None
    findings: tuple[Finding, ...]  # what is wrong comes first

    @property
    def status(self) -> int:
        """The exit status: 1 if something is wrong."""
        return int(any(finding.level == "wrong" for finding in self.findings))


def write(
    ranks: int | None,
    by_rank: Mapping[int, Examination],
    found_by_ranks: Sequence[Finding] = (),
    backend: str | None = None,
    timings: Mapping[int, Sequence[Timing]] | None = None,
) -> Report:
    """Judge what was found out.

    Args:
        ranks: how many there are; None: no launcher started this process.
        by_rank: what each rank that answered found out.
        found_by_ranks: what was noticed while they answered.
        backend: over which they exchanged, if they did.
        timings: of all ranks' allreduces.
    """
    if not by_rank:
        return Report(ranks, None, (), (), None, tuple(found_by_ranks))
    by_rank = dict(sorted(by_rank.items()))
    first = by_rank[min(by_rank)]
    machines = {rank: facts for rank, facts in by_rank.items() if facts.machine is not None}
    gpu_of_rank = {rank: facts.gpu for rank, facts in by_rank.items()}
    found = [
        *found_by_ranks,
        *software.findings(first.software, first.torch_gpus.capabilities),
        *environment.findings(os.environ),
        *_about_machines(machines),
        *_about_kernels(by_rank, ranks),
    ]
    if backend is not None:
        has_gpus = any(facts.machine is not None and facts.machine.gpus for facts in machines.values())
        found += exchange.backend_findings(backend, gpu_of_rank, has_gpus)
    exchanged = None
    if backend is not None and timings:
        exchanged = exchange.put_together(backend, timings)
        found += exchange.findings(exchanged, timings, _nvlink_gb_per_s(list(machines.values())))
    return Report(
        ranks,
        first.software,
        tuple(
            MachineReport(facts.host, facts.machine, facts.torch_gpus.numbers(facts.machine))
            for facts in machines.values()
            if facts.machine is not None
        ),
        tuple(
            KernelReport(None if ranks is None else rank, check)
            for rank, facts in by_rank.items()
            for check in facts.kernels
        ),
        exchanged,
        tuple(sorted(found, key=lambda finding: finding.level != "wrong")),
    )


def _about_machines(by_rank: Mapping[int, Examination]) -> list[Finding]:
    found: list[Finding] = []
    for facts in by_rank.values():
        assert facts.machine is not None
        about = f"{facts.host}: " if len(by_rank) > 1 else ""
        used = facts.torch_gpus.used(facts.machine)
        judged = gpu_findings.findings(facts.machine, used)
        judged += torch_gpus.findings(facts.torch_gpus, facts.machine, facts.hidden_by)
        judged += _about_load(facts)
        found += [Finding(f.level, about + f.about, f.what, f.remedy) for f in judged]
    return found + _differences(list(by_rank.values()))


def _about_load(facts: Examination) -> list[Finding]:
    if facts.load <= facts.cores:
        return []
    what = f"The machine was busy before this began: load {facts.load:.1f} on {facts.cores} cores."
    return [remark("times", what, "What is measured here says little. Run this again while nothing else computes.")]


def _differences(machines: Sequence[Examination]) -> list[Finding]:
    found = []
    drivers = {facts.host: facts.machine.driver or "none" for facts in machines if facts.machine is not None}
    if len(set(drivers.values())) > 1:
        found.append(remark("driver", f"Machines differ: {_by_host(drivers)}.", "Install one driver everywhere."))
    gpus = {facts.host: ", ".join(sorted(set(facts.torch_gpus.names))) or "none" for facts in machines}
    if len(set(gpus.values())) > 1:
        choose = "Choose machines of one kind: each step waits for the slowest GPU."
        found.append(wrong("GPUs", f"Machines differ: {_by_host(gpus)}.", choose))
    return found


def _by_host(values: Mapping[str, str]) -> str:
    return ", ".join(f"{value} on {host}" for host, value in values.items())


def _about_kernels(by_rank: Mapping[int, Examination], ranks: int | None) -> list[Finding]:
    return [
        finding
        for rank, facts in by_rank.items()
        for finding in kernel_checks.findings(facts.kernels, "" if ranks is None else f"rank {rank}, ")
    ]


def _nvlink_gb_per_s(machines: Sequence[Examination]) -> float | None:
    """The speed of a GPU's NVLinks in each direction, if only NVLinks lie between ranks."""
    if len(machines) != 1 or machines[0].machine is None:
        return None
    machine = machines[0].machine
    used = machines[0].torch_gpus.used(machine)
    paths = [machine.topology[one.index][other.index] for one in used for other in used if one is not other]
    if not paths or not all((path or "").startswith("NV") for path in paths):
        return None
    speeds = [[link.gb_per_s for link in gpu.active_nvlinks] for gpu in used]
    return min(sum(speed or 0.0 for speed in of_gpu) for of_gpu in speeds) or None


def choose_backend(by_rank: Mapping[int, Examination]) -> str:
    """The backend of the measured exchange."""
    has_nccl = dist.is_nccl_available() and all(facts.software.nccl for facts in by_rank.values())
    return exchange.choose_backend({rank: facts.gpu for rank, facts in by_rank.items()}, has_nccl)
