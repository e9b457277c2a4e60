"""Chrome traces as other versions and other hands write them: ids of 64 bits, lists, old categories, endless values."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastddp.cli.commands import app
from fastddp.trace import chrome
from fastddp.trace.analysis import analyse
from fastddp.trace.as_json import read_json
from fastddp.trace.events import ChromeDocument
from fastddp.trace.recording import Recording, TraceError
from fastddp.trace.report import Report, Split
from trace_files import NCCL, NCCL_STREAM, ChromeTrace

BIG = 2**64 - 5  # an id of 64 bits without a sign


def collectives(recording: Recording) -> int:
    return int(recording.activities.of("collective").sum())


def with_ids(*ids: object) -> ChromeTrace:
    trace = ChromeTrace()
    for number, one in enumerate(ids):
        trace.kernel(10 * number, 10 * number + 5, number, NCCL, NCCL_STREAM, **{"Comms Id": one})
    return trace


@pytest.mark.parametrize("one", [2**63 - 1, 2**63, BIG, 10**30, 10**5000], ids=["63", "64", "big", "bigger", "endless"])
def test_whole_numbers_of_any_size_end_nothing(tmp_path: Path, one: int) -> None:
    text = with_ids(1, 7654321, 3).text().replace("7654321", "9" * 5001 if one == 10**5000 else str(one))
    (tmp_path / "t.json").write_text(text)
    recording = chrome.read(tmp_path / "t.json")
    assert collectives(recording) == 3
    assert recording.warnings == ()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
def test_wherever_the_text_is_cut_into_pieces_the_same_events_come_out(piece: int) -> None:
    events = [
        {"n": -12.5e-3, "m": 1234567890123456789012, "t": 'a"\\é\U0001f600]', "l": [[], {}, None, True]},
        17,
        -1e5,
    ]
    data = json.dumps({"before": 12345678, "traceEvents": events, "behind": 1.5}, ensure_ascii=False).encode()
    place = 0

    def read(_: int) -> bytes:
        nonlocal place
        place += piece
        return data[place - piece : place]

    document = ChromeDocument(read)
    assert list(document.events()) == events
    assert document.header == {"before": 12345678, "behind": 1.5}


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_trace_that_ends_early_is_warned_of_before_anything_else_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(with_ids(*range(40)).text()[:-3000])
    code, output = run(path, "--output", tmp_path / "out")
    assert code == 0
    warning = f"{path} is damaged or was not written to its end"
    shown = " ".join(output.split())
    assert shown.index(f"Warning: {warning}") < shown.index("A step takes")
    (report,) = read_json(tmp_path / "out.json")
    assert report.warnings[0].startswith(warning)
    page = (tmp_path / "out.html").read_text()
    assert page.index("<h2>Incomplete</h2>") < page.index("Where a step's time goes")
    code, output = run(tmp_path / "out.json", tmp_path / "out.json", "--no-files")
    assert "“cut.json (2)” is incomplete: not all of its traces could be read." in output


@pytest.mark.parametrize("where", ["header", "event", "list", "argument"])
def test_values_that_are_nested_too_deeply_are_a_sentence(tmp_path: Path, where: str) -> None:
    deep, path = "[" * 100_000, tmp_path / "deep.json"
    event = json.dumps(with_ids(1).events[0])
    text = {
        "header": f'{{"schemaVersion": {deep}',
        "event": f'{{"traceEvents": [{event}, {deep}',
        "list": deep,
        "argument": f'{{"traceEvents": [{event}, {{"args": {deep}',
    }[where]
    path.write_text(text)
    if where in ("header", "list"):
        with pytest.raises(TraceError, match=r"deep\.json .*nested too deeply"):
            chrome.read(path)
    else:
        (warning,) = chrome.read(path).warnings
        assert "nested too deeply" in warning


READ = """
import resource, sys
from pathlib import Path
from fastddp.trace import chrome

try:
    print(len(chrome.read(Path(sys.argv[1])).warnings))
except chrome.TraceError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def write_packed(path: Path, before: str, megabytes: int) -> None:
    """A string without an end, of so many megabytes, in less than half of one."""
    packer = zlib.compressobj(wbits=31)
    with path.open("wb") as file:
        file.write(packer.compress(before.encode()))
        for _ in range(megabytes):
            file.write(packer.compress(b"a" * 1_000_000))
        file.write(packer.flush())


@pytest.mark.tier("nightly")
@pytest.mark.timeout(300)
def test_a_string_of_hundreds_of_megabytes_in_a_small_file_takes_no_such_memory(tmp_path: Path) -> None:
    event = json.dumps(with_ids(1).events[0])
    files = {
        "small.json.gz": (f'{{"traceEvents": [{event}]}}', 0),
        "event.json.gz": (f'{{"traceEvents": [{event}, {{"name": "', 300),
        "header.json.gz": ('{"trace_id": "', 300),
    }
    said, peaks = {}, {}
    for name, (before, megabytes) in files.items():
        write_packed(tmp_path / name, before, megabytes)
        assert (tmp_path / name).stat().st_size < 500_000
        command = [sys.executable, "-W", "ignore", "-c", READ, tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said[name], peak = done.stdout.strip().rsplit("\n", 1)
        peaks[name] = int(peak)
    assert said["small.json.gz"] == "0"
    assert said["event.json.gz"] == "1"
    assert (
        "header.json.gz is no JSON that can be read (one of its values is longer than 16 Mi" in said["header.json.gz"]
    )
    assert max(peaks.values()) - peaks["small.json.gz"] < 150_000_000


# -------------------------------------------------------------------------------------------- lists, old categories


def report(path: Path) -> Report:
    return analyse([chrome.read(path)], "run")


def test_a_list_of_events_is_a_trace(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(with_ids(1, BIG).events))
    assert collectives(chrome.read(tmp_path / "list.json")) == 2


def test_a_list_of_something_else_is_none(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('[{"loss": 1}, {"loss": 2}]')
    with pytest.raises(TraceError, match="is JSON, but no trace: a list without events"):
        chrome.read(tmp_path / "list.json")


def test_what_torch_autograd_profiler_exports_has_operators_and_collectives(tmp_path: Path) -> None:
    names = [("aten::mm", 0, 30, 1), ("c10d::allreduce_", 29, 30, 1), ("gloo:all_reduce", 30, 40, 2)]
    events = [
        {
            "name": name,
            "ph": "X",
            "ts": 1000 * start,
            "dur": 1000 * (end - start),
            "tid": thread,
            "pid": "CPU functions",
        }
        for name, start, end, thread in names
    ]
    path = tmp_path / "list.json.gz"
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    assert report(path).split == Split(compute=29, overlapped=0, exposed=10, idle=1)


def test_categories_of_torch_before_1_13_are_read(tmp_path: Path) -> None:
    old = {"user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "gpu_memcpy": "Memcpy"}
    trace = ChromeTrace()
    for number in (1, 2):
        t = 100 * number
        trace.range(t, t + 90, f"ProfilerStep#{number}")
        for place in range(3):
            trace.call(t + 1 + place, 10 * number + place)
        trace.kernel(t + 10, t + 40, 10 * number)
        trace.kernel(t + 30, t + 60, 10 * number + 1, NCCL, NCCL_STREAM)
        trace.copy(t + 70, t + 80, 10 * number + 2)
    today = report(trace.write(tmp_path / "new.json"))
    for event in trace.events:
        event["cat"] = old[event["cat"]]
    found = report(trace.write(tmp_path / "old.json"))
    assert found.step_mark == "ProfilerStep#"
    assert (found.split, found.ranks[0].step_ms) == (today.split, today.ranks[0].step_ms)
    assert found.split.copy == pytest.approx(10)
