"""The doctor's page. Nothing else prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastddp.tools.doctor.exchange import Exchange
from fastddp.tools.doctor.findings import Finding
from fastddp.tools.doctor.report import KernelReport, Report

_ELSEWHERE = (
    "GPUs' clocks, memory errors and links: nvidia-smi -q, nvidia-smi topo -m. More about the network: nccl-tests."
)


def page(report: Report) -> RenderableType:
    """The page."""
    parts: list[RenderableType] = []
    if report.software is not None:
        parts.append(_section("Software", ("", ""), report.software.lines().items()))
    if report.kernels:
        rows = [_kernels(one) for one in report.kernels]
        parts.append(_section("Kernels, run once against plain torch", ("on", "what", "made of", "result"), rows))
    if report.exchange is not None:
        parts.append(Text(_exchange(report.exchange)))
    parts.append(Text(f"{_ELSEWHERE}\n"))
    return Group(*parts, *(_finding(finding) for finding in report.findings), _conclusion(report.findings))


def console() -> Console:
    """Standard output, wide enough for the tables even if it is a file or a pipe."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(width=150, highlight=False)


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    table = Table(show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold"), table, Text())


def _kernels(report: KernelReport) -> tuple[str, ...]:
    check = report.check
    result = "did not run" if check.error is not None else "WRONG" if check.wrong else "right"
    where = check.device if report.rank is None else f"rank {report.rank}, {check.device}"
    return where, check.kernels, check.made_of, result


def _exchange(exchange: Exchange) -> str:
    interface = exchange.interface or f"chosen by {exchange.backend}"
    return (
        f"Allreduce of {exchange.mib} MiB over {exchange.backend}, {exchange.ranks} ranks, interface {interface}: "
        f"{1e3 * exchange.seconds:.3g} ms, {exchange.bus_gb_per_s:.3g} GB/s of bus bandwidth "
        "(the slowest rank's median).\n"
    )


def _finding(finding: Finding) -> Text:
    label = "WRONG" if finding.level == "wrong" else "remark"
    text = Text(f"{label}  ", style="bold red" if finding.level == "wrong" else "bold")
    return text.append(f"{finding.about}: {finding.what} {finding.remedy}".rstrip(), style="not bold default")


def _conclusion(findings: Iterable[Finding]) -> Text:
    levels = [finding.level for finding in findings]
    count, remarks = levels.count("wrong"), levels.count("remark")
    is_are = "1 thing is wrong" if count == 1 else f"{count} things are wrong" if count else "Nothing is wrong"
    return Text(f"{is_are}, {remarks or 'no'} remark{'' if remarks == 1 else 's'}.", style="bold")
