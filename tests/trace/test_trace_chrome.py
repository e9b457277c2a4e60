"""Chrome traces: what is read from good ones, in the forms that other versions and hands write, and what is refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from fastddp.times.split import Split
from fastddp.tools.trace import chrome, files
from fastddp.tools.trace.events import ChromeDocument
from fastddp.tools.trace.recording import TraceError
from trace_files import BACKWARD, LAUNCHER, NCCL, ChromeTrace, bucket, collectives, report, seen, small

SMALL = [(31, 0), (131, 0), (231, 0)]  # its collectives


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_says_who_recorded_it_and_what(tmp_path: Path, name: str) -> None:
    recording = chrome.read(small().write(tmp_path / name))
    assert (recording.rank, recording.world_size, recording.host) == (1, 2, "machine")
    assert recording.origin_ns == 1_790_000_000 + 5_000_000 * 1_000_000
    assert recording.notes == ()
    assert collectives(recording) == SMALL
    (tmp_path / "list.json").write_text(json.dumps(small().events))  # without a header
    assert collectives(chrome.read(tmp_path / "list.json")) == SMALL


def test_progress_is_told_up_to_the_files_last_byte(tmp_path: Path) -> None:
    path = small(1000).write(tmp_path / "trace.json")
    told: list[int] = []
    chrome.read(path, told.append)
    assert told == sorted(told)
    assert (told[-1], len(set(told)) > 2) == (path.stat().st_size, True)


# --------------------------------------------------------------------------------- which collective is which bucket's


COLLECTIVES = {
    "runs belong to launches in their order, kind by kind": (
        # The broadcast is one of buffers, between two buckets, and it runs first.
        ChromeTrace().steps(0).gloo(1, 20, 30, 0).gloo(2, 10, 15, None, "broadcast").gloo(3, 21, 31, 1),
        [(10, None), (20, 0), (21, 1)],
    ),
    "a run that was launched before recording began takes nobody's launch": (
        ChromeTrace().range(0, 5, "gloo:all_reduce", 9).gloo(6, 7, 9, 0).gloo(8, 9, 12, 1),
        [(0, None), (7, 0), (9, 1)],
    ),
    "a kernel belongs to the innermost range around its launch on the same thread": (
        ChromeTrace().range(0, 10, "fastddp.gradient parameter=layer1.weight bucket=1")
        .range(2, 8, bucket("collective", 1)).range(0, 10, bucket("collective", 0), thread=BACKWARD)
        .launch(5, 10, 15, NCCL).launch(5, 20, 25, NCCL, thread=BACKWARD).launch(11, 30, 35, NCCL)
        .launch(None, 40, 45, NCCL)
        .launch(9, 50, 55, NCCL),  # after the inner range, inside the outer one
        [(10, 1), (20, 0), (30, None), (40, None), (50, 1)],
    ),
    "a range that outlasts the one around it, by a rounding or since the trace is damaged, confuses none that follow": (
        ChromeTrace().range(0, 3, bucket("collective", 0, of=3))
        .range(0.5, 15, "fastddp.gradient parameter=layer1.weight bucket=1")
        .range(5, 8, bucket("collective", 1, of=3)).nccl(6, 6, 7)
        .range(10, 13, bucket("collective", 2, of=3)).nccl(11, 11, 12),
        [(6, 1), (11, 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", COLLECTIVES)
def test_of_collectives(tmp_path: Path, which: str) -> None:
    trace, expected = COLLECTIVES[which]
    assert collectives(seen(tmp_path, trace).recording) == expected


def test_messages_over_gloo_take_nothing_from_what_their_thread_computes(tmp_path: Path) -> None:
    """They are recorded on the thread that launched them, which goes on meanwhile."""
    trace = ChromeTrace().steps(0, 100).operator(10, 60, thread=LAUNCHER)
    trace.operator(20, 20, "c10d::recv_", thread=LAUNCHER).range(20, 50, "gloo:recv", LAUNCHER)
    found = seen(tmp_path, trace)
    assert found.splits == [Split(compute=20, overlapped=30, exposed=0, idle=50)]
    assert "Messages between pairs of ranks" in found.recording.notes[0]


# ------------------------------------------------------------------------------------------------- other forms, damage


@pytest.mark.parametrize("one", [str(2**63 - 1), str(2**63), str(2**64 - 5), "9" * 30, "9" * 5001], ids=len)
def test_whole_numbers_of_any_size_end_nothing(tmp_path: Path, one: str) -> None:
    trace = ChromeTrace().nccl(0, 0, 5).nccl(10, 10, 15).noting(Comms_Id=7654321).nccl(20, 20, 25)
    (tmp_path / "t.json").write_text(trace.text().replace("7654321", one))
    recording = chrome.read(tmp_path / "t.json")
    assert len(collectives(recording)) == 3
    assert recording.warnings == ()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
def test_wherever_the_text_is_cut_into_pieces_the_same_events_come_out(piece: int) -> None:
    event = {"n": -12.5e-3, "m": 1234567890123456789012, "t": 'a"\\é\U0001f600]', "l": [[], {}, None, True]}
    events = [event, 17, -1e5]
    data = json.dumps({"before": 12345678, "traceEvents": events, "after": 1.5}, ensure_ascii=False).encode()
    pieces = iter([data[place : place + piece] for place in range(0, len(data), piece)])
    document = ChromeDocument(lambda _: next(pieces, b""))
    assert list(document.events()) == events
    assert document.header == {"before": 12345678, "after": 1.5}


def test_odd_events_harm_nobody_and_those_without_times_are_counted(tmp_path: Path) -> None:
    trace = small()
    known = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    odd: list[Any] = [None, [], {}, {"ph": "X"}, {"ph": "i", "ts": 1}, {"ph": "X", "cat": ["kernel"], "ts": 1}]
    without_times = [
        {**known, "name": "aten::mm", "ts": "soon", "dur": 1},
        {**known, "name": "aten::mm", "ts": "nan", "dur": 1},
        {**known, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": 3, "ts": 1},
    ]
    trace.events = [*odd, *without_times, *trace.events]
    trace.event("gpu_memcpy", "Memcpy", 1, 2, 7, correlation="9" * 30)
    recording = seen(tmp_path, trace).recording
    assert "6 events" in recording.notes[0]
    assert len(collectives(recording)) == 3


DEEP, MANY = "[" * 100_000, small(400).text()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (MANY[: len(MANY) // 2].encode(), ""),
        (gzip.compress(MANY.encode())[:-2000], ""),
        (f"{MANY[:-2]}, {DEEP}".encode(), "nested too deeply"),
        (f'{MANY[:-2]}, {{"args": {DEEP}'.encode(), "nested too deeply"),
    ],
    ids=["cut", "gz that is cut", "a deep event", "a deep argument"],
)
def test_of_a_truncated_trace_what_lies_before_is_read_with_a_warning(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "cut.json"
    path.write_bytes(data)
    recording = chrome.read(path)
    assert 50 < len(collectives(recording)) < 400 + bool(why)
    (warning,) = recording.warnings
    assert warning.startswith(f"{path} is damaged or was not written to its end")
    assert why in warning


REFUSED = {
    "empty.json": (b"", "is empty. Did the run end"),
    "other.json": (b'{"loss": [1, 2, 3], "steps": 3}', "is JSON, but no trace: it has no 'traceEvents'"),
    "list.json": (b'[{"loss": 1}, {"loss": 2}]', "is JSON, but no trace: a list without events"),
    "binary.json": (bytes(range(256)) * 10, "is no JSON that can be read"),
    "damaged.json.gz": (b"\x1f\x8b" + bytes(100), "is no JSON that can be read"),
    "none.json": (b'{"traceEvents": []}', "holds no event"),
    "no event.json": (b'{"traceEvents": [{"ph": "X", "cat": "cpu_', "holds no event that could be read"),
    "deep.json": (DEEP.encode(), "is JSON, but no trace: a list without events (its values are nested too deeply"),
    "deep header.json": (b'{"version": ' + DEEP.encode(), "is no JSON that can be read (its values are nested too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_trace_is_an_error_that_names_the_file_and_what_to_do(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError) as raised:
        files.read(tmp_path / name)
    assert str(raised.value).startswith(f"{tmp_path / name} {message}")
    assert any(remedy in str(raised.value) for remedy in ("export_chrome_trace()", "Did the run end"))


@pytest.mark.parametrize(
    ("header", "known"),
    [
        ({"distributedInfo": {"rank": 1, "world_size": "two"}}, (1, None, "machine")),
        ({"distributedInfo": {"rank": None, "world_size": 2}}, (None, 2, "machine")),
        ({"distributedInfo": {"rank": True, "world_size": -1}}, (None, None, "machine")),
        ({"distributedInfo": [1, 2]}, (None, None, "machine")),
        ({"baseTimeNanoseconds": "noon"}, (1, 2, None)),  # so this clock is compared with none
        ({"host_name": 7}, (1, 2, None)),
    ],
)
def test_what_a_header_does_not_say_is_unknown(tmp_path: Path, header: dict[str, Any], known: tuple[Any, ...]) -> None:
    trace = small()
    trace.header.update(header)
    found = seen(tmp_path, trace)
    assert (found.recording.rank, found.recording.world_size, found.recording.host) == known
    assert found.splits[0].step == pytest.approx(100)


# ------------------------------------------------------------------------------------------- lists and old categories


def without_categories(trace: ChromeTrace) -> None:
    """As torch.autograd.profiler exports them."""
    for event in trace.events:
        del event["cat"], event["args"]


def of_torch_before_1_13(trace: ChromeTrace) -> None:
    old = {"user_annotation": "Operator", "cpu_op": "Operator", "cuda_runtime": "Runtime"}
    old |= {"kernel": "Kernel", "gpu_memcpy": "Memcpy"}
    for event in trace.events:
        event["cat"] = old[event["cat"]]


def on_a_gpu() -> ChromeTrace:
    trace = ChromeTrace()
    for t in (100, 200):
        trace.range(t, t + 90, f"ProfilerStep#{t // 100}").copy(t + 3, t + 70, t + 80)
        trace.launch(t + 1, t + 10, t + 40).nccl(t + 2, t + 30, t + 60)
    return trace


@pytest.mark.parametrize(
    ("build", "change"), [(small, without_categories), (small, of_torch_before_1_13), (on_a_gpu, of_torch_before_1_13)]
)
def test_what_older_profilers_wrote_says_the_same(tmp_path: Path, build: Any, change: Any) -> None:
    trace = build()
    today = report(tmp_path, trace)
    assert today.split.overlapped > 0
    change(trace)
    found = report(tmp_path, trace)
    assert (found.step_mark, found.split, found.ranks) == (today.step_mark, today.split, today.ranks)
    assert found.split.copy == pytest.approx(10 if build is on_a_gpu else 0)


# ---------------------------------------------------------------------------------------- in memory that a laptop has

BYTES = 200_000_000
READ = """
import resource, sys
from dataclasses import astuple
from pathlib import Path
from fastddp.tools.trace import chrome
from fastddp.tools.trace.analysis import analyse

chrome.read(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    report = analyse([chrome.read(Path(sys.argv[2]))], "big")
    said = (len(report.ranks[0].step_ms), *astuple(report.split), *report.warnings)
except chrome.TraceError as error:
    said = error
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), said, sep="\\n")
"""


def memory_and_words(folder: Path, path: Path) -> tuple[int, str]:
    """What reading a file takes, beyond what a small one does, and what is said of it."""
    command = [sys.executable, "-W", "ignore", "-c", READ, small().write(folder / "small.json"), path]
    memory, said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n", 1)
    return int(memory), said


@pytest.mark.tier("nightly")
@pytest.mark.timeout(600)
def test_a_trace_of_200_mb_takes_less_than_half_of_that_in_memory(tmp_path: Path) -> None:
    """Of 100 ms, 2000 operators and kernels take those from 5 to 45, and a collective those from 30 to 60."""
    trace = ChromeTrace(base_ms=0).steps(0).nccl(30, 30, 60, 0)
    for i in range(2000):
        start = 0.02 * i + 5
        trace.operator(start, start + 0.02, "aten::convolution_backward_with_a_name_of_some_length")
        name = f"void some_namespace::a_kernel_with_many_arguments<float, {i % 50}>"
        trace.launch(start / 10, start, start + 0.02, name)
    steps, path = 0, tmp_path / "big.json"
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "host_name": "machine", "traceEvents": [\n')
        while file.tell() < BYTES:
            for event in trace.events:
                file.write(json.dumps(event) + ",\n")
                event["ts"] += 100e3
                if "correlation" in event["args"]:
                    event["args"]["correlation"] += 2001
            steps += 1
        file.write("{}]}")
    memory, said = memory_and_words(tmp_path, path)
    assert memory < BYTES / 2
    counted, *split = map(float, said.strip("()\n").split(","))
    assert counted == steps - 1
    assert split == pytest.approx([25, 15, 15, 45, 0], abs=0.01)


@pytest.mark.tier("nightly")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("before", "message"),
    [
        (f'{{"traceEvents": [{json.dumps(ChromeTrace().operator(0, 1).events[0])}, {{"name": "', "is damaged"),
        ('{"trace_id": "', "is no JSON that can be read (one of its values is longer than 16 Mi"),
    ],
)
def test_a_string_of_300_mb_in_a_small_file_takes_no_such_memory(tmp_path: Path, before: str, message: str) -> None:
    packer = zlib.compressobj(wbits=31)
    with (tmp_path / "string.json.gz").open("wb") as file:
        file.write(packer.compress(before.encode()))
        for _ in range(300):
            file.write(packer.compress(b"a" * 1_000_000))
        file.write(packer.flush())
    memory, said = memory_and_words(tmp_path, tmp_path / "string.json.gz")
    assert message in said
    assert memory < 150_000_000
