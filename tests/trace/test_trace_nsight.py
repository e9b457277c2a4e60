"""Traces of Nsight Systems: what its export to SQLite says, in all the forms it comes in."""

from __future__ import annotations

import json
import sqlite3
import stat
import struct
from pathlib import Path

import pytest

from fastddp.times.split import Split
from fastddp.tools.trace import files
from fastddp.tools.trace.analysis import analyse
from fastddp.tools.trace.grids import bucket_grid
from fastddp.tools.trace.recording import TraceError
from trace_files import (
    BACKWARD,
    FORWARD,
    NCCL,
    NCCL_STREAM,
    AnyTrace,
    ChromeTrace,
    NsightExport,
    Trace,
    bucket,
    gradient,
    recordings,
    report,
    seen,
)


def two_steps(trace: AnyTrace) -> AnyTrace:
    """Steps of 100 ms on the device, the host 50 ms ahead: compute to 45, a collective from 50 to 80."""
    for t in (0.0, 100.0, 200.0):
        trace.steps(t).launch(t + 1, t + 50, t + 95).moment(t + 5, gradient("layer0.weight", 0))
        trace.moment(t + 6, bucket("ready", 0, of=1)).nccl(t + 8, t + 100, t + 130, 0).copy(t + 10, t + 100, t + 110)
    return trace


def test_both_recorders_tell_the_same_of_the_same_steps(tmp_path: Path) -> None:
    torchs = report(tmp_path, two_steps(ChromeTrace()))
    nsights = report(tmp_path, two_steps(NsightExport()))
    assert nsights.recorder == "Nsight Systems"
    for field in ("buckets", "split", "wrapper", "step_mark", "idle", "advice", "collectives"):
        assert getattr(nsights, field) == getattr(torchs, field)
    drawn = [[(one.what, one.start, one.end) for one in of.timelines[0].intervals] for of in (torchs, nsights)]
    assert drawn[0] == drawn[1]
    # A range that was open when recording ended is a moment.
    open_range = two_steps(NsightExport()).range(300, None, "fastddp.step").launch(301, 350, 360)
    assert len(report(tmp_path, open_range).ranks[0].step_ms) == 3


@pytest.mark.parametrize("without", ["globalPid", "textId", "demangledName", "shortName", "domainId"])
def test_columns_that_older_versions_lack_are_done_without(tmp_path: Path, without: str) -> None:
    found = report(tmp_path, two_steps(NsightExport(without=without)))
    assert found.wrapper == "fastddp"
    assert (found.buckets[0].start, found.buckets[0].duration) == pytest.approx((50, 30))


def test_without_a_gpu_the_ranges_of_the_host_are_told(tmp_path: Path) -> None:
    """Steps of 100 ms: two collectives of bucket 0 from 20 to 60, one of bucket 1, which nobody awaits."""
    trace, second = NsightExport(), bucket("collective", 0).replace("collective=0", "collective=1")
    for t in (0.0, 100.0, 200.0):
        trace.steps(t).range(t, t + 10, FORWARD).range(t + 12, t + 65, "fastddp.window")
        trace.range(t + 14, t + 17, bucket("pack", 0)).moment(t + 19, bucket("ready", 0))
        trace.range(t + 20, t + 21, bucket("collective", 0)).range(t + 40, t + 41, second)
        trace.range(t + 50, t + 60, bucket("wait", 0)).range(t + 60, t + 64, bucket("unpack", 0))
        trace.range(t + 64, t + 65, bucket("collective", 1))
    found = report(tmp_path, trace, NsightExport(process=200).steps(0, 100, 200))
    assert [len(rank.step_ms) for rank in found.ranks] == [2, 2]
    assert found.ranks[0].split == Split(compute=22, overlapped=28, exposed=12, idle=38)
    only = found.buckets[0]
    assert (only.ready, only.start, only.duration) == pytest.approx((19, 20, 40))
    (line,) = [dict(zip(bucket_grid(found).columns, row, strict=True)) for row in bucket_grid(found).rows]
    assert [spent for column, spent in line.items() if "pack" in column.name] == pytest.approx([3, 4])
    assert len(found.warnings) == 2
    assert all("has nothing that a GPU did: all times are of the host" in warning for warning in found.warnings)
    # If a GPU works for one process, those for which none does are no ranks.
    assert len(recordings(tmp_path, two_steps(trace))) == 1


def test_windows_across_ranges_take_no_collective_from_its_bucket(tmp_path: Path) -> None:
    """They begin where the first collective is launched, and end after the last gradient."""
    trace, buckets = NsightExport(), 5
    for t in (0.0, 100.0, 200.0):
        trace.range(t, t + 100, "fastddp.step").launch(t + 1, t + 1, t + 90, thread=BACKWARD)
        trace.range(t + 6.25, t + 6 + 5 * buckets, "fastddp.window", BACKWARD)
        for index in range(buckets):
            begin = t + 5 + 5 * index
            trace.range(begin, begin + 3, gradient(f"layer{index}.weight", index), BACKWARD)
            trace.range(begin + 1, begin + 2, bucket("collective", index, of=buckets), BACKWARD)
            trace.launch(begin + 1.5, begin + 2, begin + 4, NCCL, NCCL_STREAM, BACKWARD)
    assert seen(tmp_path, trace).runs.bucket.tolist() == [*range(buckets)] * 3


def test_a_graph_that_was_recorded_as_a_whole_is_compute_and_a_note_says_so(tmp_path: Path) -> None:
    trace = NsightExport()
    for t in (0.0, 100.0, 200.0):
        trace.steps(t).graph(t + 1, t + 10, t + 90).launch(t + 2, t + 92, t + 97, "sgd")
    found = report(tmp_path, trace)
    assert (found.split.compute, found.split.idle) == pytest.approx((85, 15))
    assert "graphs were recorded as a whole" in found.notes[0]
    assert "--cuda-graph-trace=node" in found.notes[0]


def test_sessions_of_one_machine_have_one_clock(tmp_path: Path) -> None:
    """Each rank's file counts from its own start; the second began 1000 ms later."""
    traces = [
        two_steps(NsightExport(process=100 + rank))
        .row("TARGET_INFO_SESSION_START_TIME", utcEpochNs=begun * 1_000_000)
        .row("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="machine")
        for rank, begun in enumerate((10_000, 11_000))
    ]
    first, second = recordings(tmp_path, *traces)
    assert (first.host, second.host) == ("machine", "machine")
    assert second.origin_ns - first.origin_ns == 1_000_000_000


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (NsightExport().range(0, 1, FORWARD), "has nothing that a GPU did.*--trace=cuda,nvtx"),
        (NsightExport().steps(0).graph(1, 10, 90), "has nothing .* but CUDA graphs .*--cuda-graph-trace=node"),
    ],
)
def test_what_lacks_too_much_is_an_error_that_says_what_to_do(tmp_path: Path, trace: Trace, message: str) -> None:
    with pytest.raises(TraceError, match=rf"0\.sqlite .*{message}"):
        report(tmp_path, trace)


def test_another_database_and_a_damaged_export_are_errors_and_are_not_written_to(tmp_path: Path) -> None:
    cut, other = two_steps(NsightExport()).write(tmp_path / "cut.sqlite"), tmp_path / "other.sqlite"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    database.close()
    for path, message in (
        (cut, r"cut\.sqlite is no complete export.*nsys export --type sqlite"),
        (other, r"other\.sqlite is an SQLite file, but no export of Nsight Systems"),
    ):
        data = path.read_bytes()
        with pytest.raises(TraceError, match=message):
            files.read(path)
        assert path.read_bytes() == data


def test_a_report_is_exported_by_nsys_or_it_is_said_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(script: str) -> None:
        nsys = tmp_path / "nsys"
        nsys.write_text(f"#!/bin/sh\n{script}\n")
        nsys.chmod(nsys.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    made = tmp_path / "run.nsys-rep"
    made.write_bytes(b"report")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TraceError, match=rf"nsys export --type sqlite {made}"):
        files.read(made)
    install("echo the report is newer than this nsys >&2; exit 1")
    with pytest.raises(TraceError, match=r"run\.nsys-rep: .*nsys export .*failed:\nthe report is newer than this nsys"):
        files.read(made)
    ready = two_steps(NsightExport()).write(tmp_path / "ready.sqlite")
    install(f'[ "$1 $2 $3 $4" = "export --type sqlite --output" ] && cp {ready} "$5"')
    (found,) = files.read(made)
    assert analyse([found], "run").buckets == analyse(files.read(ready), "run").buckets
    assert found.source == str(made)


# --------------------------------------------------------------------------------------------------- NCCL's payloads

COMMUNICATOR = 2**64 - 77
SCHEMA, INIT_SCHEMA = 100, 101


def packed(schema: int, payload: bytes) -> bytes:
    return struct.pack("<IIIIQQ", 7, 0, schema, 0, len(payload), 32 + len(payload)) + payload


def message(size: int) -> bytes:
    return packed(SCHEMA, struct.pack("<QQi", COMMUNICATOR, size, 0))


class NcclExport(NsightExport):
    def __init__(self) -> None:
        super().__init__()
        for schema, second in ((SCHEMA, "Message size [bytes]"), (INIT_SCHEMA, "No. of ranks")):
            for name, offset in (("NCCL communicator ID", None), (second, 8)):
                self.row("NVTX_PAYLOAD_SCHEMA_ENTRIES", domainId=7, schemaId=schema, name=name, offset=offset)
        self.says(0, "ncclCommInitRank", binaryData=packed(INIT_SCHEMA, struct.pack("<QIi", COMMUNICATOR, 4, 0)))

    def says(self, time: float, name: str, **payload: object) -> None:
        about = {"eventType": 59, "text": name, "globalTid": self.thread(1)}
        self.row("NVTX_EVENTS", start=round(time * 1e6), **about, **payload)


def with_payloads(payload: dict[str, object], name: str = "ncclAllReduce", kernel: str = NCCL) -> NcclExport:
    """The kernel is launched after the call, when its group ends."""
    trace = NcclExport()
    for t in (0.0, 100.0, 200.0):
        trace.range(t, t + 1, f"{FORWARD}, op_id = 5").launch(t, t, t + 50)
        trace.says(t + 20, name, **payload)
        trace.says(t + 20.5, "ncclGroupEnd")
        trace.nccl(t + 21, t + 50, t + 90, name=kernel)
    return trace


JSON = json.dumps({"NCCL communicator ID": "18,446,744,073,709,551,539", "Message size [bytes]": 4_000_000})


@pytest.mark.parametrize("payload", [{"binaryData": message(4_000_000)}, {"jsonText": JSON}], ids=["binary", "json"])
def test_nccl_says_what_its_calls_carry_and_in_which_group(tmp_path: Path, payload: dict[str, object]) -> None:
    trace = with_payloads(payload)
    (about,) = seen(tmp_path, trace).recording.collectives
    assert (about.operation, about.group, about.group_size) == ("all_reduce", hex(COMMUNICATOR), 4)
    found = report(tmp_path, trace)
    assert (found.wrapper, found.step_mark) == ("torch DDP", "forward")
    (only,) = found.buckets
    assert (only.bytes, only.wire) == (4_000_000, "float32")
    assert (only.ready, only.start) == pytest.approx((50, 50))
    (kind,) = found.collectives
    assert kind.bus_gb_per_s == pytest.approx(4e6 * 1.5 / 40e-3 / 1e9)


def test_a_reduce_scatter_names_what_comes_out_of_it_and_messages_of_a_group_are_one_exchange(tmp_path: Path) -> None:
    trace = with_payloads({"binaryData": message(1000)}, "ncclReduceScatter", "ncclDevKernel_Generic_1")
    (kind,) = report(tmp_path, trace).collectives
    assert (kind.kind, kind.bytes) == ("reduce_scatter", 4000)
    trace = NcclExport()
    for number in range(3):
        trace.says(10 + number, "ncclSend", binaryData=message(500))
        trace.says(10 + number, "ncclRecv", binaryData=message(500))
    recording = seen(tmp_path, trace.nccl(20, 30, 40, name="ncclDevKernel_SendRecv")).recording
    assert recording.collectives[0].operation == "send/recv"
    assert recording.activities.bytes.tolist() == [1500]
