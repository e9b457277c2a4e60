"""Traces of Nsight Systems: what its export to SQLite says, in all the forms it comes in."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fastddp.trace import files, nsight
from fastddp.trace.analysis import analyse
from fastddp.trace.ranks import view
from fastddp.trace.recording import TraceError
from trace_files import BACKWARD, NCCL, NCCL_STREAM, ChromeTrace, NsightExport, bucket, gradient


def two_steps(trace: ChromeTrace | NsightExport) -> None:
    """Steps of 100 ms on the device, the host 50 ms ahead: compute to 60, a collective from 50 to 80."""
    for step in range(3):
        t = 100.0 * step
        trace.moment(t, "fastddp.step")
        trace.call(t + 1, 10 * step + 1)
        trace.moment(t + 5, gradient("layer0.weight", 0))
        trace.moment(t + 6, bucket("ready", 0, of=1))
        trace.range(t + 7, t + 9, bucket("collective", 0, of=1))
        trace.call(t + 8, 10 * step + 2)
        trace.call(t + 10, 10 * step + 3)
        trace.kernel(t + 50, t + 95, 10 * step + 1)
        trace.kernel(t + 100, t + 130, 10 * step + 2, NCCL, NCCL_STREAM)
        trace.copy(t + 100, t + 110, 10 * step + 3)


def test_both_recorders_tell_the_same_of_the_same_steps(tmp_path: Path) -> None:
    ours, theirs = ChromeTrace(), NsightExport()
    two_steps(ours)
    two_steps(theirs)
    torchs = analyse(files.read(ours.write(tmp_path / "a.json")), "run")
    nsights = analyse(files.read(theirs.write(tmp_path / "a.sqlite")), "run")
    assert nsights.recorder == "Nsight Systems"
    assert nsights.buckets == torchs.buckets
    assert nsights.split == torchs.split
    assert (nsights.buckets[0].ready, nsights.buckets[0].start) == pytest.approx((45, 50))
    assert [interval.what for interval in nsights.timelines[0].intervals] == ["compute", "copy", "collective"]


def test_each_process_of_a_file_is_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "two.sqlite"
    first, second = NsightExport(process=100), NsightExport(process=101)
    two_steps(first)
    two_steps(second)
    for table, rows in second._rows.items():
        for row in rows:
            for column in ("textId", "demangledName"):  # strings are one table: the same texts have the same numbers
                assert row.get(column) is None or row[column] in second._strings.values()
            first.row(table, **row)
    recordings = nsight.read(first.write(path))
    assert [recording.ranges[0].text for recording in recordings] == ["fastddp.step", "fastddp.step"]
    report = analyse(recordings, "run")
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert [len(timeline.intervals) for timeline in report.timelines] == [3, 3]


@pytest.mark.parametrize("without", ["globalPid", "textId", "shortName", "domainId"])
def test_columns_that_older_versions_lack_are_done_without(tmp_path: Path, without: str) -> None:
    trace = NsightExport(without=(without,))
    if without == "textId":
        trace.range = lambda start, end, name, thread=1, event_type=59: trace.row(  # type: ignore[method-assign]
            "NVTX_EVENTS", start=round(start * 1e6), end=round(end * 1e6), eventType=event_type, text=name,
            globalTid=trace._thread(thread),
        )  # fmt: skip
    two_steps(trace)
    report = analyse(nsight.read(trace.write(tmp_path / "old.sqlite")), "run")
    assert report.wrapper == "fastddp"
    assert (report.buckets[0].start, report.buckets[0].duration) == pytest.approx((50, 30))


def test_without_ranges_and_launches_there_is_still_a_split(tmp_path: Path) -> None:
    trace = NsightExport()
    trace._rows.clear()
    trace.kernel(0, 60, 1)
    trace.kernel(40, 100, 2, NCCL, NCCL_STREAM)
    (recording,) = nsight.read(trace.write(tmp_path / "bare.sqlite"))
    report = analyse([recording], "run")
    assert (report.split.compute, report.split.overlapped, report.split.exposed) == pytest.approx((40, 20, 40))
    assert (report.wrapper, report.buckets) == ("unknown", ())


def test_a_range_that_was_open_when_recording_ended_is_a_moment(tmp_path: Path) -> None:
    trace = NsightExport()
    two_steps(trace)
    trace.range(300, None, "fastddp.step", event_type=60)
    trace.call(301, 91)
    trace.kernel(350, 360, 91)
    (recording,) = nsight.read(trace.write(tmp_path / "open.sqlite"))
    assert len(analyse([recording], "run").ranks[0].step_ms) == 3


def steps_of_buckets(trace: NsightExport, steps: int, buckets: int) -> None:
    """Steps of 100 ms; windows begin in the first gradient and end behind the last; a bucket every 5 ms."""
    for step in range(steps):
        t = 100.0 * step
        trace.span(t, t + 100, "fastddp.step")
        trace.call(t + 1, 1000 * step, BACKWARD)
        trace.kernel(t + 1, t + 90, 1000 * step)
        trace.span(t + 6, t + 6 + 5 * buckets, "fastddp.window", BACKWARD)
        for index in range(buckets):
            begin, correlation = t + 5 + 5 * index, 1000 * step + index + 1
            trace.range(begin, begin + 3, gradient(f"layer{index}.weight", index), BACKWARD)
            trace.range(begin + 1, begin + 2, bucket("collective", index, of=buckets), BACKWARD)
            trace.call(begin + 1.5, correlation, BACKWARD)
            trace.kernel(begin + 2, begin + 4, correlation, NCCL, NCCL_STREAM)


@pytest.mark.parametrize("steps", [3, 8, 19])
@pytest.mark.parametrize("buckets", [1, 2, 5, 12])
def test_windows_that_lie_across_ranges_take_no_collective_from_its_bucket(
    tmp_path: Path, steps: int, buckets: int
) -> None:
    trace = NsightExport()
    steps_of_buckets(trace, steps, buckets)
    (recording,) = nsight.read(trace.write(tmp_path / "spans.sqlite"))
    assert view(0, recording).runs.bucket.tolist() == [*range(buckets)] * steps


# ------------------------------------------------------------------------------------------------------ CUDA graphs


def test_a_graph_that_was_recorded_as_a_whole_is_compute_and_a_note_says_so(tmp_path: Path) -> None:
    trace = NsightExport()
    for step in range(3):
        t = 100.0 * step
        trace.moment(t, "fastddp.step")
        for place in (1, 2):
            trace.call(t + place, 10 * step + place)
        trace.graph(t + 10, t + 90, 10 * step + 1)
        trace.kernel(t + 92, t + 97, 10 * step + 2, "sgd")
    report = analyse(nsight.read(trace.write(tmp_path / "graph.sqlite")), "run")
    assert (report.split.compute, report.split.idle) == pytest.approx((85, 15))
    assert report.notes[0] == (
        f"{tmp_path / 'graph.sqlite'}: CUDA graphs were recorded as a whole. What is in them, communication included, "
        "is not known, and all of their time counts as compute. Profile again with --cuda-graph-trace=node."
    )


def test_where_a_gpu_ran_only_graphs_that_are_unknown_there_is_no_report(tmp_path: Path) -> None:
    trace = NsightExport()
    trace.moment(0, "fastddp.step")
    trace.call(1, 1)
    trace.graph(10, 90, 1)
    with pytest.raises(TraceError, match=r"only\.sqlite has nothing .* but CUDA graphs .*--cuda-graph-trace=node"):
        nsight.read(trace.write(tmp_path / "only.sqlite"))


# -------------------------------------------------------------------------------------------- clocks and other files


def test_processes_of_one_file_have_one_clock_though_it_does_not_say_whose(tmp_path: Path) -> None:
    trace = NsightExport(process=100)
    two_steps(trace)
    trace.process = 101
    two_steps(trace)
    report = analyse(nsight.read(trace.write(tmp_path / "two.sqlite")), "run")
    assert len(report.ranks) == 2
    assert not any("clocks" in note for note in report.notes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda trace: trace.row("CUPTI_ACTIVITY_KIND_KERNEL", start=60, end=None, globalPid=trace._thread(0)),
        lambda trace: trace.row("CUPTI_ACTIVITY_KIND_MEMCPY", start="soon", end=70, globalPid=trace._thread(0)),
        lambda trace: trace.row("NVTX_EVENTS", start=None, eventType=59, text="fastddp.step", globalTid=1),
        lambda trace: trace.row("CUPTI_ACTIVITY_KIND_RUNTIME", start=None, correlationId=5, globalTid=1),
    ],
    ids=["kernel", "copy", "range", "call"],
)
def test_rows_without_times_are_left_out_with_a_note(tmp_path: Path, damage: Callable[[NsightExport], None]) -> None:
    trace = NsightExport()
    two_steps(trace)
    whole = analyse(nsight.read(trace.write(tmp_path / "whole.sqlite")), "run")
    damage(trace)
    found = analyse(nsight.read(trace.write(tmp_path / "damaged.sqlite")), "run")
    assert (found.split, found.buckets) == (whole.split, whole.buckets)
    assert found.notes[0].endswith("damaged.sqlite: 1 row without times that can be read; left out.")


def test_texts_that_are_none_are_no_names(tmp_path: Path) -> None:
    trace = NsightExport()
    two_steps(trace)
    trace.row("NVTX_EVENTS", start=5, end=9, eventType=59, text=b"fastddp.step", globalTid=trace._thread(1))
    trace.row("StringIds", id=999, value=b"gemm")
    (recording,) = nsight.read(trace.write(tmp_path / "blob.sqlite"))
    assert len(recording.ranges_of("step")) == 3


def test_sessions_of_one_machine_have_one_clock(tmp_path: Path) -> None:
    """Each rank's file counts from its own start; the second began 1000 ms later."""
    recordings = []
    for rank, begun in enumerate((10_000, 11_000)):
        trace = NsightExport(process=100 + rank)
        two_steps(trace)
        trace.row("TARGET_INFO_SESSION_START_TIME", utcEpochNs=begun * 1_000_000)
        trace.row("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="machine")
        recordings += nsight.read(trace.write(tmp_path / f"{rank}.sqlite"))
    assert [recording.host for recording in recordings] == ["machine"] * 2
    assert recordings[1].origin_ns - recordings[0].origin_ns == 1_000_000_000


def test_a_file_in_which_no_gpu_did_anything_is_an_error(tmp_path: Path) -> None:
    trace = NsightExport()
    trace.moment(0, "fastddp.step")
    with pytest.raises(TraceError, match=r"cpu\.sqlite has nothing that a GPU did.*--trace=cuda,nvtx"):
        nsight.read(trace.write(tmp_path / "cpu.sqlite"))


def test_another_database_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    database.close()
    with pytest.raises(TraceError, match=r"other\.sqlite is an SQLite file, but no export of Nsight Systems"):
        files.read(path)


def test_a_damaged_export_is_an_error_and_is_not_written_to(tmp_path: Path) -> None:
    trace = NsightExport()
    for _ in range(50):
        two_steps(trace)
    path = trace.write(tmp_path / "cut.sqlite")
    data = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"cut\.sqlite is no complete export.*nsys export --type sqlite"):
        files.read(path)
    assert path.read_bytes() == data


def test_kernels_of_unknown_processes_are_not_dealt_out_by_chance(tmp_path: Path) -> None:
    trace = NsightExport(without=("globalPid",))
    two_steps(trace)
    trace.process = 101
    two_steps(trace)
    with pytest.raises(TraceError, match="does not say to which of them a kernel belongs"):
        nsight.read(trace.write(tmp_path / "old.sqlite"))


def test_a_report_is_exported_by_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = NsightExport()
    two_steps(trace)
    ready = trace.write(tmp_path / "ready.sqlite")
    _install_nsys(tmp_path, monkeypatch, f'[ "$1 $2 $3 $4" = "export --type sqlite --output" ] && cp {ready} "$5"')
    (tmp_path / "run.nsys-rep").write_bytes(b"report")
    (recording,) = files.read(tmp_path / "run.nsys-rep")
    assert len(recording.activities.start) == len(nsight.read(ready)[0].activities.start)
    assert recording.source == str(tmp_path / "run.nsys-rep")


def test_a_report_where_nsys_is_missing_or_fails_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"report")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TraceError, match=rf"nsys export --type sqlite {report}"):
        files.read(report)
    _install_nsys(tmp_path, monkeypatch, "echo the report is newer than this nsys >&2; exit 1")
    with pytest.raises(TraceError, match=r"run\.nsys-rep: .*nsys export .*failed:\nthe report is newer than this nsys"):
        files.read(report)


def _install_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    nsys = folder / "nsys"
    nsys.write_text(f"#!/bin/sh\n{script}\n")
    nsys.chmod(nsys.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
