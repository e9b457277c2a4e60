"""Reports as JSON, and back without loss: ``{"format": "fastddp trace", "version": 2, "reports": [...]}``.

A report in JSON has the fields of :class:`~fastddp.tools.trace.report.Report`, with ``null`` for None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fastddp.documents.formats import MIB, DocumentFormat
from fastddp.documents.typed_json import Unexpected, restored
from fastddp.tools.trace.recording import TraceError
from fastddp.tools.trace.report import Report

REMEDY = "Give the JSON file that `fastddp trace` wrote, or traces."
_FILE = DocumentFormat("fastddp trace", 2, "report", REMEDY, largest=256 * MIB)  # timelines of many ranks
# The version changes with the fields of a report and their meaning. In version 1 a device's copies counted as compute.


class NotAReport(TraceError, ValueError):
    """The file holds no report of this version."""


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """Write the reports to a file, in ASCII; ValueError: a number is not finite, which JSON cannot express."""
    _FILE.save(path, {"reports": [asdict(report) for report in reports]})


def read_json(path: Path) -> tuple[Report, ...]:
    """What :func:`write_json` wrote; NotAReport: the file holds something else; it names file, place and remedy."""
    try:
        reports: tuple[Report, ...] = restored(_FILE.load(path).get("reports"), tuple[Report, ...], "reports")
    except Unexpected as error:
        raise NotAReport(f"{path}: {error}. {REMEDY}") from None
    except ValueError as error:
        raise NotAReport(str(error)) from None
    return reports


def holds_reports(path: Path) -> bool:
    """Whether a file looks like what :func:`write_json` wrote."""
    try:
        with path.open("rb") as file:
            return f'"{_FILE.name}"'.encode() in file.read(100)
    except OSError:  # the reader will report it
        return False
