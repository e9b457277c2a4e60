"""Reports as JSON, and back without loss: ``{"format": "fastddp trace", "version": 2, "reports": [...]}``.

A report in JSON has the fields of :class:`~fastddp.trace.report.Report`, with ``null`` for None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastddp.documents import DocumentFormat
from fastddp.trace.report import Report
from fastddp.trace.wording import shortened

REMEDY = "Give the JSON file that `fastddp trace` wrote, or traces."
_FILE = DocumentFormat("fastddp trace", 2, "report", REMEDY)
# The version changes with the fields of a report, but for new ones with a default, which earlier files lack; and with
# what they mean: in version 1 copies of a device counted as compute.


EXPECTED = {str: "a string", int: "a whole number", bool: "true or false"}


class NotAReport(ValueError):
    """The file holds no report of this version."""


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """Write the reports to a file, in ASCII.

    Raises:
        ValueError: a number is not finite, which JSON cannot express.
    """
    _FILE.save(path, {"reports": [asdict(report) for report in reports]})


def read_json(path: Path) -> tuple[Report, ...]:
    """The reports that :func:`write_json` wrote.

    Raises:
        NotAReport: the file holds something else; the message names file, place and remedy.
    """
    try:
        content = _FILE.load(path)
    except ValueError as error:
        raise NotAReport(str(error)) from None
    try:
        return restored(content.get("reports"), tuple[Report, ...], "reports")
    except NotAReport as error:
        raise NotAReport(f"{path}: {error}") from None


def holds_reports(path: Path) -> bool:
    """Whether a file looks like what :func:`write_json` wrote."""
    try:
        with path.open("rb") as file:
            return f'"{_FILE.name}"'.encode() in file.read(100)
    except OSError:  # whoever reads it will tell
        return False


def restored(value: Any, kind: Any, place: str) -> Any:
    """What ``asdict`` and ``json`` made of a value of type ``kind``; ``place`` says where it stands, for errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (some,) = (option for option in arguments if option is not NoneType)
        return None if value is None else restored(value, some, place)
    if origin is Literal:
        demand(value in arguments, value, place, "one of " + ", ".join(map(repr, arguments)))
        return value
    if origin is tuple:
        demand(isinstance(value, list), value, place, "a list")
        return tuple(restored(item, arguments[0], f"{place}[{i}]") for i, item in enumerate(value))
    if kind is float:
        demand(type(value) in (int, float), value, place, "a number")
        return float(value)
    if kind in EXPECTED:
        demand(type(value) is kind, value, place, EXPECTED[kind])
        return value
    demand(isinstance(value, dict), value, place, "an object")
    return kind(**dict(restored_fields(value, kind, place)))


def restored_fields(value: dict[str, Any], kind: type, place: str) -> Iterator[tuple[str, Any]]:
    """The arguments of a dataclass."""
    types, defaults = field_types(kind), with_default(kind)
    if surplus := sorted(value.keys() - types.keys()):
        raise NotAReport(f"{place}.{surplus[0]}: a report has no such field. {REMEDY}")
    for name, field_type in types.items():
        if name not in value and name in defaults:
            continue
        if name not in value:
            raise NotAReport(f"{place}.{name} is missing. {REMEDY}")
        yield name, restored(value[name], field_type, f"{place}.{name}")


@cache
def field_types(kind: type) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


@cache
def with_default(kind: type) -> frozenset[str]:
    """The fields of a dataclass that it can do without."""
    return frozenset(field.name for field in fields(kind) if field.default is not MISSING)


def demand(holds: bool, value: Any, place: str, what: str) -> None:
    """Complain about a value of which the condition does not hold."""
    if not holds:
        raise NotAReport(f"{place}: expected {what}, found {shortened(json.dumps(value), 60)}. {REMEDY}")
