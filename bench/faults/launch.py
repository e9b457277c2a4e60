"""Runs one fault, and judges what was said about it."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.faults.entries import Fault
from bench.faults.forking import Forking, kill_group
from bench.faults.network import machines
from bench.faults.rank import LIMIT, Setting, port_told
from fastddp import _pages
from fastddp.tools.ps.live import pid_of

# What ends a rank: an exception's line after a traceback, or C++ that gives up.
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]*(?:Error|Exception|Interrupt)\b|terminate called ).*)", re.MULTILINE)


@dataclass
class Outcome:
    """What the user saw, and whether it was right."""

    fault: str
    ranks: int
    exchange: str
    implementation: str
    by: str = "nothing"  # report, error (without a report), soft report, nothing
    rank_named: bool = False
    cause_named: bool = False
    parameter_named: bool | None = None  # none: the fault is not about one
    seconds: float | None = None  # from the deed to the report or, without one, to the first error
    findings: list[Any] = field(default_factory=list)  # of the first report that is not soft: causes, and ranks
    said: str = ""  # its text, or what the first rank that failed printed last
    reports: int = 0  # how many there were, soft ones included

    def is_right(self) -> bool:
        """Whether everything is named that has to be."""
        return self.rank_named and self.cause_named and self.parameter_named is not False

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"right": self.is_right()}


def run_fault(
    forking: Forking,
    fault: Fault,
    ranks: int,
    exchange: str = "plain",
    patience: float = 5.0,
    implementation: str = "fastddp",
    watched: float | None = None,
) -> Outcome:
    """One run, which is over when something was said, or `watched` seconds after the deed, or when all ranks ended."""
    apart = machines(fault.network == "store apart") if fault.network else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, apart as both:
        pids: list[int] = []
        # Kept here, since it ends with its last reference.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = {"launcher": store.port, "rank 0": 0, "alone": 0}[fault.store]

        def setting(rank: int, port: int, store_pid: int) -> Setting:
            machine = both[2 * rank // ranks] if both else None
            return Setting(
                fault.name, rank, ranks, exchange, implementation, patience, folder, port, store_pid, machine
            )

        try:
            store_pid = 0
            if fault.store == "alone":
                store_pid = forking.start("store", setting(0, 0, 0))
                pids.append(store_pid)
                port = port_told(folder)
            processes = [forking.start("rank", setting(rank, port, store_pid)) for rank in range(ranks)]
            pids += processes
            _wait(Path(folder), fault, processes, patience, watched)
        finally:
            for pid in pids:
                kill_group(pid)
            _remove_pages(pids)
        return judge(Seen.read(Path(folder), ranks), fault, Outcome(fault.name, ranks, exchange, implementation))


def _wait(folder: Path, fault: Fault, processes: list[int], patience: float, watched: float | None) -> None:
    """Until there is something to judge."""
    begin = time.monotonic()
    culprits = [processes[culprit] for culprit in fault.culprits]
    while time.monotonic() < begin + LIMIT:
        time.sleep(0.05)
        alive = [pid for pid in processes if _is_alive(pid)]
        if not alive or (not fault.is_harmless and set(alive) <= set(culprits)):
            return
        seen = Seen.read(folder, len(processes))
        if len(seen.hard_reports()) >= fault.reports and not fault.is_harmless:
            time.sleep(1.0)  # a second one, which would be one too many
            return
        # Of a fault that is not noticed: as long as any report may take, on a machine that has much to do.
        if seen.deed is not None and not fault.is_harmless:
            allowed = watched if watched is not None else 6 * patience + 20
            if time.monotonic() > seen.deed + allowed:
                return


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _remove_pages(pids: list[int]) -> None:
    """Those of processes that were killed stay."""
    for path in _pages.shared_pages():
        if pid_of(path) in pids:
            _pages.remove_page(path)


@dataclass
class Seen:
    """What the ranks of a run have left behind."""

    deed: float | None  # when the first culprit did it; None: it has not come so far
    reports: list[dict[str, Any]]
    logs: dict[int, str]
    failed_at: dict[int, float]  # by rank: when its log was last written to, on the clock of the deed

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Seen:
        """From the files of a run."""
        deeds = [float(text) for path in folder.glob("deed.*") if (text := path.read_text())]
        lines = [line for path in sorted(folder.glob("reports.*")) for line in path.read_text().splitlines()]
        logs, written = {}, {}
        for rank in range(ranks):
            path = folder / f"log.rank.{rank}"
            logs[rank] = path.read_text(errors="replace") if path.exists() else ""
            if path.exists():
                written[rank] = path.stat().st_mtime - time.time() + time.monotonic()
        reports = sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda line: line["at"])
        return cls(min(deeds, default=None), reports, logs, written)

    def hard_reports(self) -> list[dict[str, Any]]:
        """Those that say that waiting does not help."""
        return [report for report in self.reports if not report["report"]["is_soft"]]


def judge(seen: Seen, fault: Fault, outcome: Outcome) -> Outcome:
    """Of what was said, the report first."""
    culprits = sorted({culprit % outcome.ranks for culprit in fault.culprits})
    reports = seen.hard_reports()
    outcome.reports = len(seen.reports)
    failed = {rank: log for rank, log in seen.logs.items() if ERROR.search(log)}
    at = None
    if reports:
        outcome.by, outcome.said, at = "report", reports[0]["report"]["message"], reports[0]["at"]
        findings = reports[0]["report"]["causes"]
        outcome.findings = [(finding["cause"], finding["ranks"]) for finding in findings]
        is_printed = any("stands still" in log for log in seen.logs.values())  # and not only handed to Python
        if fault.network:
            # One rank may have come a step further than another when the network went down: then each step has its own.
            steps = {report["report"]["step"] for report in reports}
            is_one_a_step = fault.reports <= len(reports) <= fault.reports * len(steps)
            outcome.rank_named = is_one_a_step and _sides_named(reports, outcome.ranks)
        else:
            outcome.rank_named = _ranks_named(reports[0]) == culprits
        outcome.cause_named = is_printed and all(_is_cause_named(report, fault) for report in reports)
    elif failed:
        outcome.by = "error"
        first = min(failed, key=lambda rank: seen.failed_at[rank])
        outcome.said, at = ERROR.findall(failed[first])[-1], seen.failed_at[first]
    elif seen.reports:
        outcome.by, outcome.said, at = "soft report", seen.reports[0]["report"]["message"], seen.reports[0]["at"]
        outcome.rank_named = _ranks_named(seen.reports[0]) == culprits
    if fault.error and not (outcome.rank_named and outcome.cause_named):
        _judge_errors(seen.logs, fault, culprits, outcome)
    if fault.is_harmless:
        is_quiet = not failed and not (reports if fault.may_be_soft else seen.reports)
        outcome.rank_named = outcome.cause_named = is_quiet
    if fault.parameter:
        said = outcome.said if outcome.by == "report" else "\n".join(seen.logs.values())
        outcome.parameter_named = re.search(fault.parameter, said) is not None
    if at is not None and seen.deed is not None:
        outcome.seconds = round(at - seen.deed, 1)
    return outcome


def _ranks_named(report: dict[str, Any]) -> list[int]:
    return sorted({rank for finding in report["report"]["causes"] for rank in finding["ranks"]})


def _is_cause_named(report: dict[str, Any], fault: Fault) -> bool:
    findings = report["report"]["causes"]
    says = re.search(fault.says, report["report"]["message"])
    return bool(findings) and findings[0]["cause"] in fault.causes and says is not None


def _sides_named(reports: list[dict[str, Any]], ranks: int) -> bool:
    """Whether no report names ranks of both sides of a network that is down; one that knows all names none."""
    sides = [{2 * rank // ranks for rank in _ranks_named(report)} for report in reports]
    return all(len(of) <= (1 if len(reports) > 1 else 0) for of in sides)


def _judge_errors(logs: dict[int, str], fault: Fault, culprits: list[int], outcome: Outcome) -> None:
    """An error names the rank if it is the culprit's own, or says its number."""
    texts = {rank: _last_error(log) for rank, log in logs.items()}
    if not any(texts.values()):
        return
    telling = {rank: text for rank, text in texts.items() if re.search(fault.error, text)}
    if not outcome.cause_named and telling:
        outcome.cause_named = True
        if outcome.by == "report":
            outcome.by = "report and error"
        else:
            outcome.by, outcome.said = "error", telling[min(telling)]
    if telling and not outcome.rank_named:
        own = all(culprit in telling for culprit in culprits)
        numbers = [rf"\branks? (?:\d+, )*{culprit}\b" for culprit in culprits]
        outcome.rank_named = own or any(all(re.search(number, text) for number in numbers) for text in telling.values())


def _last_error(log: str) -> str:
    """Of a rank's output: what follows the last traceback's calls, without the stacks of C++ after it.

    And what is said before C++ ends the process.
    """
    begins = [match.start() for match in ERROR.finditer(log)]
    text = re.sub(r"^\[rank\d+\]: ?", "", log[begins[-1] :], flags=re.MULTILINE) if begins else ""
    last_words = re.search(r"^fastddp: step \d+ has failed.*", log, re.MULTILINE | re.DOTALL)
    return last_words[0] if last_words and "terminate called" in text else text
