"""Reports as JSON: what comes back is what went in, and what is no report is refused with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trace_reports
from fastddp.trace.as_json import NotAReport, read_json, write_json
from fastddp.trace.report import Report


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of :mod:`fastddp.trace.report`, whether it makes sense or not."""
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


def test_a_file_is_ascii_and_says_what_it_is(tmp_path: Path) -> None:
    reports = (trace_reports.report("läuft"), trace_reports.of_torch())
    write_json(tmp_path / "reports.json", reports)
    data = json.loads((tmp_path / "reports.json").read_bytes().decode("ascii"))
    assert (data["format"], data["version"]) == ("fastddp trace", 2)
    assert data["reports"][0]["ranks"][1]["split"].keys() == {"compute", "overlapped", "exposed", "idle", "copy"}
    assert read_json(tmp_path / "reports.json") == reports


def test_a_whole_number_may_stand_for_a_time(file: Path) -> None:
    file.write_text(changed(lambda data: data["reports"][0]["split"].update(idle=3)))
    (report,) = read_json(file)
    assert repr(report.split.idle) == "3.0"


def test_a_number_that_json_lacks_is_refused_before_a_file_is_there(tmp_path: Path) -> None:
    report = trace_reports.report()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "r.json", [replace(report, split=replace(report.split, idle=float("nan")))])
    assert not (tmp_path / "r.json").exists()


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """A good report in JSON after a change."""
    data = {"format": "fastddp trace", "version": 2, "reports": [asdict(trace_reports.report())]}
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        ('{"format": NaN}', "NaN is no number of JSON"),
        ("[1, 2]", 'does not begin with "format": "fastddp trace"'),
        ('{"traceEvents": []}', 'does not begin with "format": "fastddp trace"'),
        (changed(lambda d: d.update(version=1)), "holds a report of version 1, and this fastddp reads version 2"),
        (changed(lambda d: d.pop("reports")), "reports: expected a list, found null"),
        (changed(lambda d: d["reports"].append(7)), r"reports\[1\]: expected an object, found 7"),
        (changed(lambda d: d["reports"][0].pop("advice")), r"reports\[0\].advice is missing"),
        (changed(lambda d: d["reports"][0].update(more=1)), r"reports\[0\].more: there is no such field"),
        (
            changed(lambda d: d["reports"][0]["ranks"][1]["split"].update(idle="much")),
            r'reports\[0\].ranks\[1\].split.idle: expected a number, found "much"',
        ),
        (changed(lambda d: d["reports"][0]["split"].update(idle=True)), "split.idle: expected a number, found true"),
        (changed(lambda d: d["reports"][0].update(world_size=2.5)), "world_size: expected a whole number, found 2.5"),
        (changed(lambda d: d["reports"][0].update(name=None)), "name: expected a string, found null"),
        (changed(lambda d: d["reports"][0].update(wrapper="FSDP")), "wrapper: expected one of 'fastddp', 'torch DDP'"),
    ],
)
def test_what_is_no_report_is_refused_with_place_and_reason(file: Path, text: str | bytes, complaint: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(NotAReport, match=f"^{re.escape(str(file))}.*{complaint}"):
        read_json(file)
