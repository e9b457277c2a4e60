"""The doctor's report: made from what processes found out, and its page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastddp.tools.doctor import exchange, software
from fastddp.tools.doctor.examination import Examination
from fastddp.tools.doctor.exchange import Exchange, Timing
from fastddp.tools.doctor.findings import Finding, KernelCheck
from fastddp.tools.doctor.software import Software

_ELSEWHERE = (
    "GPUs' clocks, memory errors and links: nvidia-smi -q, nvidia-smi topo -m. More about the network: nccl-tests."
)


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
    backend: str = "",
    timings: Mapping[int, Timing] | None = None,
) -> Report:
    """Judge what each rank that answered found out; ``ranks``: how many there are.

    ``backend``: over which they exchanged, if they did. ``timings``: of all ranks' allreduces, if none failed.
    """
    found = list(found_by_ranks)
    kernels = []
    first = by_rank[min(by_rank)].software if by_rank else None
    if first is not None:
        found += software.findings(first)
    for rank, facts in sorted(by_rank.items()):
        kernels += [KernelReport(None if ranks is None else rank, check) for check in facts.kernels]
        for check in facts.kernels:
            found += check.findings("" if ranks is None else f"rank {rank}, ")
    if backend:
        found += exchange.findings(backend, {rank: facts.gpu for rank, facts in by_rank.items()}, timings or {})
    exchanged = exchange.put_together(backend, timings) if timings else None
    found.sort(key=lambda finding: finding.level != "wrong")
    return Report(ranks, first, tuple(kernels), exchanged, tuple(found))


def page(report: Report) -> RenderableType:
    """The page."""
    parts: list[RenderableType] = []
    if report.software is not None:
        parts += [Text("Software", style="bold"), _table((), report.software.lines().items())]
    if report.kernels:
        title = Text("\nKernels, run once against plain torch", style="bold")
        parts += [title, _table(("on", "what", "made of", "result"), map(_row, report.kernels))]
    if (one := report.exchange) is not None:
        told = (
            f"\nAllreduce of {one.mib} MiB over {one.backend}, {one.ranks} ranks, "
            f"interface {one.interface or f'chosen by {one.backend}'}: {1e3 * one.seconds:.3g} ms, "
            f"{one.bus_gb_per_s:.3g} GB/s of bus bandwidth (the slowest rank's median)."
        )
        parts.append(Text(told))
    parts.append(Text(f"\n{_ELSEWHERE}\n"))
    for finding in report.findings:
        label, style = ("WRONG", "bold red") if finding.level == "wrong" else ("remark", "bold")
        text = f"  {finding.about}: {finding.what} {finding.remedy}".rstrip()
        parts.append(Text.assemble((label, style), text))
    count = sum(finding.level == "wrong" for finding in report.findings)
    remarks = len(report.findings) - count
    is_are = "1 thing is wrong" if count == 1 else f"{count} things are wrong" if count else "Nothing is wrong"
    return Group(*parts, Text(f"{is_are}, {remarks or 'no'} remark{'' if remarks == 1 else 's'}.", style="bold"))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, show_header=bool(columns))
    for row in rows:
        table.add_row(*row)
    table.columns[0].no_wrap = True
    return table


def _row(report: KernelReport) -> tuple[str, ...]:
    check = report.check
    result = "did not run" if check.error is not None else "WRONG" if check.wrong else "right"
    where = check.device if report.rank is None else f"rank {report.rank}, {check.device}"
    return where, check.kernels, check.made_of, result
