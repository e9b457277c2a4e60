"""Chrome traces: what is read from good ones, in the forms that other versions and hands write, and what is refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastddp.times.split import Split
from fastddp.tools.trace import chrome, files
from fastddp.tools.trace.events import ChromeDocument
from fastddp.tools.trace.recording import TraceError
from trace_files import BACKWARD, LAUNCHER, NCCL, ChromeTrace, bucket, collectives, seen, small

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


@pytest.mark.parametrize(
    ("launch", "run"), [("recv_", "recv"), ("allreduce_", "all_reduce"), ("allgather_", "all_gather")]
)
def test_messages_over_gloo_and_reads_take_nothing_from_what_their_thread_computes(
    tmp_path: Path, launch: str, run: str
) -> None:
    """They are recorded on the thread that launched them, which goes on meanwhile."""
    trace = ChromeTrace().steps(0, 100).operator(10, 60, thread=LAUNCHER)
    trace.operator(20, 20, f"c10d::{launch}", thread=LAUNCHER).range(20, 50, f"gloo:{run}", LAUNCHER)
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


DEEP, MANY = "[" * 100_000, small(400).text()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (MANY[: len(MANY) // 2].encode(), ""),
        (gzip.compress(MANY.encode())[:-2000], ""),
        (f"{MANY[:-2]}, {DEEP}".encode(), "nested too deeply"),
    ],
    ids=["cut", "gz that is cut", "a deep event"],
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
    "damaged.json.gz": (b"\x1f\x8b" + bytes(100), "is no JSON that can be read"),
    "none.json": (b'{"traceEvents": []}', "holds no event"),
    "deep.json": (DEEP.encode(), "is JSON, but no trace: a list without events (its values are nested too deeply"),
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
        ({"distributedInfo": [1, 2]}, (None, None, "machine")),
        ({"baseTimeNanoseconds": "noon"}, (1, 2, None)),  # so this clock is compared with none
    ],
)
def test_what_a_header_does_not_say_is_unknown(tmp_path: Path, header: dict[str, Any], known: tuple[Any, ...]) -> None:
    trace = small()
    trace.header.update(header)
    found = seen(tmp_path, trace)
    assert (found.recording.rank, found.recording.world_size, found.recording.host) == known
    assert found.splits[0].step == pytest.approx(100)


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
report = analyse([chrome.read(Path(sys.argv[2]))], "big")
memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)  # beyond what a small file takes
print(memory, len(report.ranks[0].step_ms), *astuple(report.split))
"""


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
    command = [sys.executable, "-W", "ignore", "-c", READ, small().write(tmp_path / "small.json"), path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    memory, counted, *split = map(float, said.split())
    assert memory < BYTES / 2
    assert counted == steps - 1
    assert split == pytest.approx([25, 15, 15, 45, 0], abs=0.01)
