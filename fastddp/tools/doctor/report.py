"""Makes the doctor's report from what processes found out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fastddp.tools.doctor import exchange, kernel_checks, software
from fastddp.tools.doctor.examination import Examination
from fastddp.tools.doctor.exchange import Exchange, Timing
from fastddp.tools.doctor.findings import Finding, remark
from fastddp.tools.doctor.kernel_checks import KernelCheck
from fastddp.tools.doctor.software import Software


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
    timings: Mapping[int, Timing] | None = None,
) -> Report:
    """Judge what was found out.

    Args:
        ranks: how many there are; None: no launcher started this process.
        by_rank: what each rank that answered found out.
        found_by_ranks: what was noticed while they answered.
        backend: over which they exchanged, if they did.
        timings: of all ranks' allreduces, if none failed.
    """
    if not by_rank:
        return Report(ranks, None, (), None, tuple(found_by_ranks))
    by_rank = dict(sorted(by_rank.items()))
    first = by_rank[min(by_rank)]
    found = [*found_by_ranks, *software.findings(first.software), *software.environment_findings(os.environ)]
    for rank, facts in by_rank.items():
        found += kernel_checks.findings(facts.kernels, "" if ranks is None else f"rank {rank}, ")
    found += _about_load(by_rank)
    exchanged = None
    if backend is not None:
        found += exchange.findings(backend, {rank: facts.gpu for rank, facts in by_rank.items()}, timings or {})
        exchanged = exchange.put_together(backend, timings) if timings else None
    checks = [(rank, check) for rank, facts in by_rank.items() for check in facts.kernels]
    return Report(
        ranks,
        first.software,
        tuple(KernelReport(None if ranks is None else rank, check) for rank, check in checks),
        exchanged,
        tuple(sorted(found, key=lambda finding: finding.level != "wrong")),
    )


def _about_load(by_rank: Mapping[int, Examination]) -> list[Finding]:
    loads = {facts.host: (facts.load, facts.cores) for facts in reversed(list(by_rank.values()))}
    busy = [f"{host}: load {load:.1f} on {cores} cores" for host, (load, cores) in loads.items() if load > cores]
    if not busy:
        return []
    what = f"Machines were busy before this began ({'; '.join(busy)})."
    return [remark("times", what, "What is measured here says little. Run this again while nothing else computes.")]


def choose_backend(by_rank: Mapping[int, Examination]) -> str:
    """The backend of the measured exchange."""
    has_nccl = dist.is_nccl_available() and all(facts.software.nccl for facts in by_rank.values())
    return exchange.choose_backend({rank: facts.gpu for rank, facts in by_rank.items()}, has_nccl)
