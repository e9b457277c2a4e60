"""Reports as JSON: what comes back is what went in, and what is no report is refused with a reason."""

from __future__ import annotations

import json
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trace_reports
from fastddp.tools.trace.as_json import NotAReport, read_json, write_json
from fastddp.tools.trace.report import Report


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of :mod:`fastddp.tools.trace.report`, whether it makes sense or not."""
    if is_dataclass(kind):
        return st.builds(kind, **{name: any_of(field) for name, field in get_type_hints(kind).items()})  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return st.lists(any_of(get_args(kind)[0]), max_size=3).map(tuple)
    if get_origin(kind) is UnionType:
        return st.none() | any_of(get_args(kind)[0])
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is str:
        return st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs too: names of files have them
    return st.from_type(kind)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports") / "reports.json"


@pytest.mark.tier("slow")
@given(reports=st.lists(any_of(Report), max_size=2))
def test_reports_come_back_as_they_were(file: Path, reports: list[Report]) -> None:
    write_json(file, reports)
    again = read_json(file)
    assert list(again) == reports
    assert repr(again) == repr(tuple(reports))  # -0.0 and 0.0, 1 and 1.0 are equal, and not the same


def test_a_file_is_ascii_and_what_is_wrong_in_it_is_named(file: Path) -> None:
    reports = (trace_reports.report("läuft"), trace_reports.of_torch())
    write_json(file, reports)
    assert read_json(file) == reports
    data = json.loads(file.read_bytes().decode("ascii"))
    data["reports"][0]["ranks"][1]["split"]["idle"] = "much"
    file.write_text(json.dumps(data))
    with pytest.raises(NotAReport, match=r"reports\.json: reports\[0\].ranks\[1\].split.idle: expected a number"):
        read_json(file)


def test_a_number_that_json_lacks_is_refused_before_a_file_is_there(tmp_path: Path) -> None:
    report = trace_reports.report()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "r.json", [replace(report, split=replace(report.split, idle=float("nan")))])
    assert not (tmp_path / "r.json").exists()
