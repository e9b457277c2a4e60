"""The doctor's page. Nothing else prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastddp.tools.doctor.exchange import Exchange, in_words
from fastddp.tools.doctor.findings import Finding
from fastddp.tools.doctor.gpu_findings import in_words as slowdown_in_words
from fastddp.tools.doctor.nvml import PATHS, Gpu
from fastddp.tools.doctor.report import KernelReport, MachineReport, Report
from fastddp.tools.doctor.software import Software

_NOT_TOLD = "not told"
_NOT_TOLD_MEANS = '"not told": not told by the driver'


def page(report: Report) -> RenderableType:
    """The page."""
    parts: list[RenderableType] = []
    if report.software is not None:
        parts.append(_software(report.software))
    for machine in report.machines:
        parts += _machine(machine)
    if report.kernels:
        parts.append(_kernels(report.kernels))
    if report.exchange is not None:
        parts.append(_exchange(report.exchange))
    return Group(*parts, *(_finding(finding) for finding in report.findings), _conclusion(report.findings))


def console() -> Console:
    """Standard output, wide enough for the tables even if it is a file or a pipe."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(width=150, highlight=False)


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> RenderableType:
    """A table between its title and a note."""
    table = Table(show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold"), table, *([Text(note)] if note else []), Text())


def _software(software: Software) -> RenderableType:
    return _section("Software", ("", ""), software.lines().items())


def _machine(report: MachineReport) -> Iterator[RenderableType]:
    machine = report.machine
    if machine.nvml != "answers":
        what = "no NVIDIA driver" if machine.nvml == "no driver" else "NVML does not answer"
        yield Text(f"{report.host}: {what} ({machine.problem}).\n")
        return
    runs = ".".join(map(str, machine.driver_cuda)) if machine.driver_cuda else _NOT_TOLD
    head = f"{report.host}: driver {told(machine.driver)}, for CUDA up to {runs}"
    if not machine.gpus:
        yield Text(f"{head}; no GPU.\n")
        return
    yield _gpus(head, machine.gpus, report.torch_numbers)
    if len(machine.gpus) > 1:
        yield _topology(machine.topology)


def _gpus(title: str, gpus: Sequence[Gpu], torch_numbers: dict[int, int]) -> RenderableType:
    """A column a GPU: eight of them fit side by side."""
    lines: dict[str, Callable[[Gpu], str]] = {
        "in torch": lambda gpu: f"cuda:{torch_numbers[gpu.index]}" if gpu.index in torch_numbers else "no",
        "name": lambda gpu: told(gpu.name),
        "memory free, GiB": lambda gpu: _of(_gib(gpu.free_bytes), _gib(gpu.memory_bytes)),
        "SM clock, MHz": lambda gpu: _of(gpu.sm_mhz, gpu.sm_max_mhz),
        "memory clock, MHz": lambda gpu: _of(gpu.memory_mhz, gpu.memory_max_mhz),
        "clocks held down by": _slowdowns,
        "busy, %": lambda gpu: told(gpu.utilization_percent),
        "temperature, °C": lambda gpu: told(gpu.temperature_c),
        "power, W": lambda gpu: _of(_whole(gpu.power_w), _whole(gpu.power_limit_w)),
        "ECC": lambda gpu: told({True: "on", False: "off", None: None}[gpu.ecc]),
        "errors corrected": lambda gpu: told(gpu.corrected),
        "errors not corrected": lambda gpu: told(gpu.uncorrected),
        "NVLinks active": lambda gpu: _of(len(gpu.active_nvlinks), len(gpu.nvlinks)) if gpu.nvlinks else "none told",
        "each NVLink, GB/s": _nvlink_speed,
        "PCIe generation": lambda gpu: _of(gpu.pcie_generation, gpu.pcie_generation_max),
        "PCIe lanes": lambda gpu: _of(gpu.pcie_width, gpu.pcie_width_max),
    }
    rows = [[name, *(cell(gpu) for gpu in gpus)] for name, cell in lines.items()]
    lacks = any(_NOT_TOLD in cell for row in rows for cell in row)
    columns = ["GPU", *(str(gpu.index) for gpu in gpus)]
    return _section(title, columns, rows, _NOT_TOLD_MEANS if lacks else "")


def told(value: object) -> str:
    """A value, or that there is none."""
    return _NOT_TOLD if value is None else str(value)


def _of(now: object, most: object) -> str:
    """1980 of 1980."""
    return _NOT_TOLD if now is None and most is None else f"{told(now)} of {told(most)}"


def _gib(count: int | None) -> str | None:
    return None if count is None else f"{count / 2**30:.1f}"


def _whole(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _slowdowns(gpu: Gpu) -> str:
    if gpu.slowed_by is None:
        return _NOT_TOLD
    return ", ".join(slowdown_in_words(reason) for reason in gpu.slowed_by) or "nothing"


def _nvlink_speed(gpu: Gpu) -> str:
    if not gpu.active_nvlinks:
        return ""
    speeds = [link.gb_per_s for link in gpu.active_nvlinks if link.gb_per_s is not None]
    return f"{min(speeds):.1f}" if speeds else _NOT_TOLD


def _topology(rows: tuple[tuple[str | None, ...], ...]) -> RenderableType:
    used = {"NV" if path.startswith("NV") else path for row in rows for path in row if path}
    notes = [f"{'NVn' if name == 'NV' else name}: {words}" for name, words in PATHS.items() if name in used]
    if any(path is None for row in rows for path in row):
        notes.append(_NOT_TOLD_MEANS)
    numbers = [str(index) for index in range(len(rows))]
    cells = [[number, *(told(path) for path in row)] for number, row in zip(numbers, rows, strict=True)]
    return _section("Between GPUs", ["", *numbers], cells, "; ".join(notes))


def _kernels(reports: tuple[KernelReport, ...]) -> RenderableType:
    rows = []
    for report in reports:
        check = report.check
        result = "did not run" if check.error is not None else "WRONG" if check.wrong else "right"
        where = check.device if report.rank is None else f"rank {report.rank}, {check.device}"
        rows.append([where, check.kernels, check.made_of or "", result])
    return _section("Kernels, run once against plain torch", ["on", "what", "made of", "result"], rows)


def _exchange(exchange: Exchange) -> RenderableType:
    title = f"Allreduce over {exchange.backend}, {exchange.ranks} ranks (medians, of the slowest rank)"
    rows = [
        # For a few bytes only the time matters.
        [in_words(row.bytes), f"{1e6 * row.seconds:,.0f}", f"{row.bus_gb_per_s:.3g}" if row.bytes >= 2**20 else ""]
        for row in exchange.all_reduces
    ]
    return _section(title, ["size", "time, µs", "bus bandwidth, GB/s"], rows)


def _finding(finding: Finding) -> Text:
    label = "WRONG" if finding.level == "wrong" else "remark"
    text = Text(f"{label}  ", style="bold red" if finding.level == "wrong" else "bold")
    text.append(f"{finding.about}: {finding.what}", style="not bold default")
    if finding.remedy:
        text.append(f" {finding.remedy}", style="not bold default")
    return text


def _conclusion(findings: Iterable[Finding]) -> Text:
    levels = [finding.level for finding in findings]
    count, remarks = levels.count("wrong"), levels.count("remark")
    is_are = "1 thing is wrong" if count == 1 else f"{count or 'No'} things are wrong"
    if count == 0:
        is_are = "Nothing is wrong"
    return Text(f"{is_are}, {remarks or 'no'} remark{'' if remarks == 1 else 's'}.", style="bold")
