"""The command ``fastddp trace``: what it prints, writes, reads again, and refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trace_reports
from fastddp.tools.commands import app
from fastddp.tools.trace import page
from fastddp.tools.trace.as_json import NotAReport, read_json, write_json
from fastddp.tools.trace.reading import read_reports
from trace_files import small
from trace_recording import DATA

RECORDED = DATA / "fastddp"
HEADLINE = "fastddp: 2 ranks · fastddp · 4 steps · recorded by torch.profiler"


def run(*arguments: object, width: int = 200, code: int = 0) -> str:
    """What it prints or, with another code than 0, complains of; in one line."""
    files = [] if "--output" in arguments else ["--no-files"]
    result = CliRunner().invoke(app, ["trace", *map(str, arguments), *files], env={"COLUMNS": str(width)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code
    return " ".join((result.output if code else result.stdout).split())


def test_files_and_their_folder_are_the_same_run_and_folders_are_compared(tmp_path: Path) -> None:
    output = run(RECORDED, width=80)
    for word in (HEADLINE, "compute", "overlapped", "exposed", "idle", "bucket", "ready", "delay", "256.0 KiB"):
        assert word in output
    assert "…" not in output
    (folder,), (named,) = (read_reports(paths) for paths in ([RECORDED], sorted(RECORDED.glob("*.json.gz"))))
    assert (folder.name, named.name) == ("fastddp", "rank0.json.gz and 1 more")
    assert replace(folder, name="") == replace(named, name="")
    for name in ("before", "after"):
        shutil.copytree(RECORDED, tmp_path / name / "traces")
    assert "A step of “after/traces” takes" in run(tmp_path / "before" / "traces", tmp_path / "after" / "traces")


def test_it_writes_a_page_a_picture_and_reports_that_it_reads_again(tmp_path: Path) -> None:
    output = run(RECORDED, "--output", tmp_path / "step.1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.1.html", "step.1.json", "step.1.png"]
    assert (tmp_path / "step.1.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "step.1.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "step.1.json") in output
    output = run(tmp_path / "step.1.json", RECORDED, tmp_path / "step.1.json")
    assert "A step of “fastddp (2)” takes" in output
    assert "A step of “fastddp (3)” takes" in output


OWN_NAME = "fastddp-trace"


@pytest.mark.parametrize(
    ("output", "folder", "name"),
    [
        *((folder, folder, OWN_NAME) for folder in (".", "out", "out/", "out/.", "out/..", "new/", "new/deeper/.")),
        ("new/step", "new", "step"),
        ("step.html", ".", "step"),
        ("step.pdf", ".", "step.pdf"),  # not a suffix of what is written
    ],
)
def test_files_go_where_output_says_into_folders_that_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, folder: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    write_json(tmp_path / "out" / "report", [trace_reports.empty()])
    said = run("out/report", "--output", output)
    written = {path.name for path in (tmp_path / folder).iterdir()} - {"out", "report"}
    assert written == {f"{name}{suffix}" for suffix in (".html", ".json", ".png")}
    assert all(str(Path(folder) / file) in said for file in written)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "missing.json does not exist."),
        (["other.json"], "other.json is JSON, but no trace"),
        (["empty"], "empty has no trace: no file that ends in .json, .json.gz, .sqlite, .nsys-rep."),
        ([RECORDED / "rank0.json.gz", RECORDED / "rank0.json.gz"], "are both of rank 0. Name one file a rank, and"),
        ([RECORDED, "--output", ""], "--output is empty."),
        # Before anything is read.
        (["missing.json", "--output", "other.json/"], "other.json/fastddp-trace.html cannot be written: Not a dir"),
        (["missing.json", "--output", "other.json/a/b"], "b.html cannot be written: Not a directory. Give another --"),
        (
            ["missing.json", "--output", "page"],
            "page.html cannot be written: Is a directory. Give another --output, or",
        ),
        (["missing.json", "--output", "/proc/new/step"], "/proc/new/step.html cannot be written: "),
        (["missing.json", "--output", "x" * 300], "html cannot be written: File name too long"),
        (
            ["missing.json", "--output", "other"],
            "other.json is there, and no report of this command: it would be lost.",
        ),
        (["old.json"], "old.json holds a report of version 0"),
        (["pipe.json"], "pipe.json is a pipe or a device"),
        (["missing.json", "--output", "pipe"], "pipe.json cannot be written: no file."),
        ([], "Missing argument 'PATH...'"),
    ],
)
def test_bad_input_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    Path("old.json").write_text('{"format": "fastddp trace", "version": 0}')
    Path("empty").mkdir()
    Path("page.html").mkdir()
    os.mkfifo("pipe.json")
    before = sorted(tmp_path.rglob("*"))
    output = run(*arguments, code=2)
    assert message in output
    assert HEADLINE not in output
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_found_is_printed_though_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_page(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(page, "write_page", write_page)
    output = run(RECORDED, "--output", tmp_path / "step", code=2)
    assert "step.html cannot be written: No space left on device." in output
    assert HEADLINE in output


def test_a_warning_stands_before_anything_else_everywhere(tmp_path: Path) -> None:
    path, warning = tmp_path / "cut.json", "cut.json is damaged"
    path.write_text(small(40).text()[:-3000])
    output = run(path, "--output", tmp_path / "out")
    assert 0 < output.index("Warning: ") < output.index(warning) < output.index("A step takes")
    (saved,) = read_json(tmp_path / "out.json")
    assert warning in saved.warnings[0]
    page = (tmp_path / "out.html").read_text()
    assert page.index("<h2>Incomplete</h2>") < page.index("Where a step's time goes")
    assert "“cut.json (2)” is incomplete" in run(tmp_path / "out.json", tmp_path / "out.json")


def test_of_a_folder_other_files_and_its_own_reports_are_left_out_with_a_note(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "run" / "notes.txt").write_text("text")
    write_json(tmp_path / "run" / "fastddp-trace.json", [trace_reports.report()])
    output = run(tmp_path / "run")
    assert "config.json is JSON, but no trace" in output
    assert "fastddp-trace.json is a report of this command, and no trace." in output
    assert "notes.txt" not in output


# ------------------------------------------------------------------------------------------------------ reports as JSON


def test_a_file_is_ascii_and_what_is_wrong_in_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    # In names of files there are halves of surrogate pairs.
    reports = (trace_reports.report("läuft"), trace_reports.of_torch(), trace_reports.empty(), trace_reports.evil())
    write_json(file, reports)
    assert repr(read_json(file)) == repr(reports)  # 1 and 1.0 are equal, and not the same
    data = json.loads(file.read_bytes().decode("ascii"))
    data["reports"][0]["ranks"][1]["split"]["idle"] = "much"
    file.write_text(json.dumps(data))
    with pytest.raises(NotAReport, match=r"reports\.json: reports\[0\].ranks\[1\].split.idle: expected a number"):
        read_json(file)
