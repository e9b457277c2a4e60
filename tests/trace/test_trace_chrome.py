"""Chrome traces: what is read from good ones, and what is said of the others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fastddp.trace import chrome, files
from fastddp.trace.ranks import view
from fastddp.trace.recording import Recording, TraceError
from fastddp.trace.report import Split
from trace_files import BACKWARD, LAUNCHER, NCCL, NCCL_STREAM, ChromeTrace, bucket


def small(steps: int = 3) -> ChromeTrace:
    trace = ChromeTrace(rank=1, world_size=2)
    for step in range(steps):
        trace.moment(100 * step, "fastddp.step")
        trace.operator(100 * step + 10, 100 * step + 50)
        trace.gloo(100 * step + 30, 100 * step + 31, 100 * step + 60, 0)
    return trace


def collectives(recording: Recording) -> list[tuple[float, int | None]]:
    """Start, from the first event, and bucket of each, by start."""
    activities = recording.activities
    found = []
    for i in activities.of("collective").nonzero()[0]:
        place = int(activities.range[i])
        name = recording.ranges[place].name if place >= 0 else None
        found.append((round(float(activities.start[i]), 6), name.bucket if name else None))
    return sorted(found)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_says_who_recorded_it_and_what(tmp_path: Path, name: str) -> None:
    recording = chrome.read(small().write(tmp_path / name))
    assert (recording.rank, recording.world_size, recording.host) == (1, 2, "machine")
    assert recording.origin_ns == 1_790_000_000 + 5_000_000 * 1_000_000
    assert recording.notes == ()
    assert collectives(recording) == [(31, 0), (131, 0), (231, 0)]


def test_progress_is_told_up_to_the_files_last_byte(tmp_path: Path) -> None:
    path = small(3000).write(tmp_path / "trace.json")
    told: list[int] = []
    chrome.read(path, told.append)
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size
    assert len(set(told)) > 2


def test_runs_belong_to_launches_in_their_order_kind_by_kind(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.moment(0, "fastddp.step")
    trace.gloo(1, 20, 30, 0)
    trace.gloo(2, 10, 15, None, "broadcast")  # of buffers, between two buckets, and it runs first
    trace.gloo(3, 21, 31, 1)
    assert collectives(chrome.read(trace.write(tmp_path / "t.json"))) == [(10, None), (20, 0), (21, 1)]


def test_a_run_that_was_launched_before_recording_began_takes_nobodys_launch(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.event("user_annotation", "gloo:all_reduce", 0, 5, 9)
    trace.gloo(6, 7, 9, 0)
    trace.gloo(8, 9, 12, 1)
    assert collectives(chrome.read(trace.write(tmp_path / "t.json"))) == [(0, None), (7, 0), (9, 1)]


def test_a_kernel_belongs_to_the_innermost_range_around_its_launch_on_the_same_thread(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.range(0, 10, "fastddp.gradient parameter=layer1.weight bucket=1")
    trace.range(2, 8, bucket("collective", 1))
    trace.range(0, 10, bucket("collective", 0), thread=BACKWARD)
    trace.call(5, 1)
    trace.call(5, 2, thread=BACKWARD)
    trace.call(11, 3)
    trace.call(9, 5)  # behind the inner range, inside the outer one
    for correlation in (1, 2, 3, 4, 5):  # number 4 was launched before recording began
        trace.kernel(10 * correlation, 10 * correlation + 5, correlation, NCCL, NCCL_STREAM)
    recording = chrome.read(trace.write(tmp_path / "t.json"))
    assert recording.on_device
    assert collectives(recording) == [(10, 1), (20, 0), (30, None), (40, None), (50, 1)]


def test_a_range_that_outlasts_the_one_around_it_confuses_none_that_follow(tmp_path: Path) -> None:
    """By a rounding, or since the trace is damaged."""
    trace = ChromeTrace()
    for step in range(8):
        t = 100.0 * step
        trace.range(t, t + 3, bucket("collective", 0, of=3))
        trace.range(t + 0.5, t + 15, "fastddp.gradient parameter=layer1.weight bucket=1")
        for index, start in ((1, t + 5), (2, t + 10)):
            trace.range(start, start + 3, bucket("collective", index, of=3))
            trace.call(start + 1, 10 * step + index)
            trace.kernel(start + 1, start + 2, 10 * step + index, NCCL, NCCL_STREAM)
    expected = [(100.0 * step + start, index) for step in range(8) for start, index in ((6, 1), (11, 2))]
    assert collectives(chrome.read(trace.write(tmp_path / "t.json"))) == expected


def test_messages_over_gloo_take_nothing_from_what_their_thread_computes(tmp_path: Path) -> None:
    """They are recorded on the thread that launched them, which goes on meanwhile."""
    trace = ChromeTrace()
    trace.moment(0, "fastddp.step")
    trace.operator(10, 60, thread=LAUNCHER)
    trace.operator(20, 20, "c10d::recv_", thread=LAUNCHER)
    trace.event("user_annotation", "gloo:recv", 20, 50, LAUNCHER)
    trace.moment(100, "fastddp.step")
    recording = chrome.read(trace.write(tmp_path / "t.json"))
    assert view(0, recording).splits == [Split(compute=20, overlapped=30, exposed=0, idle=50)]
    assert "Messages between pairs of ranks" in recording.notes[0]


def test_kernels_of_nccl_say_what_they_carry(tmp_path: Path) -> None:
    trace = ChromeTrace()
    about = {"In msg nelems": 1000, "dtype": "BFloat16", "correlation": 1, "device": 0, "stream": 20}
    trace.event("kernel", NCCL, 0, 5, 20, **about)
    activities = chrome.read(trace.write(tmp_path / "t.json")).activities
    assert activities.bytes.tolist() == [2000]


@pytest.mark.parametrize("name", ["ncclKernel_Generic", "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32", NCCL])
def test_kernels_of_nccl_are_communication_whatever_their_algorithm(tmp_path: Path, name: str) -> None:
    trace = ChromeTrace()
    trace.kernel(0, 40, 1)
    trace.kernel(30, 100, 2, name, NCCL_STREAM)
    recording = chrome.read(trace.write(tmp_path / "t.json"))
    assert view(0, recording).splits == [Split(compute=30, overlapped=10, exposed=60, idle=0)]


def test_a_bucket_of_torchs_ddp_is_what_torch_says_is_an_allreduce(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for step in range(3):
        t = 100.0 * step
        trace.range(t, t + 10, "DistributedDataParallel.forward")
        for place, operation in enumerate(("broadcast", "allreduce", "allreduce_coalesced", None)):
            correlation, name = 10 * step + place, "ncclDevKernel_Generic_1" if operation else NCCL
            named = {"Collective name": operation} if operation else {}
            trace.call(t + place, correlation)
            trace.kernel(t + 20 * place, t + 20 * place + 10, correlation, name, NCCL_STREAM, **named)
    assert view(0, chrome.read(trace.write(tmp_path / "t.json"))).runs.bucket[:4].tolist() == [-1, 0, 1, 2]


def test_events_with_times_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = small()
    trace.events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": "soon", "dur": 1}]
    trace.events += [{"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "dur": 1}]
    trace.events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": "nan", "dur": 1}]
    trace.event("gpu_memcpy", "Memcpy", 1, 2, 7, correlation="9" * 30)
    recording = chrome.read(trace.write(tmp_path / "t.json"))
    assert "4 events" in recording.notes[0]
    assert len(collectives(recording)) == 3


# ------------------------------------------------------------------------------------------------------ other files


@pytest.mark.parametrize("packed", [False, True], ids=["json", "gz"])
def test_of_a_truncated_trace_what_lies_before_is_read_with_a_warning(tmp_path: Path, packed: bool) -> None:
    text = small(400).text().encode()
    data = gzip.compress(text)[:-2000] if packed else text[: len(text) // 2]
    path = tmp_path / "cut.json"
    path.write_bytes(data)
    recording = chrome.read(path)
    assert 50 < len(collectives(recording)) < 400
    (warning,) = recording.warnings
    assert str(path) in warning
    assert "not written to its end" in warning


FOREIGN = {
    "empty.json": (b"", "is empty. Did the run end"),
    "other.json": (b'{"loss": [1, 2, 3], "steps": 3}', "is JSON, but no trace: it has no 'traceEvents'"),
    "array.json": (b"[1, 2, 3]", "is JSON, but no trace"),
    "number.json": (b"3", "is JSON, but no trace"),
    "binary.json": (bytes(range(256)) * 10, "is no JSON that can be read"),
    "cut.json": (b'{"schemaVersion": 1, "deviceProp', "is no JSON that can be read"),
    "damaged.json.gz": (b"\x1f\x8b" + bytes(100), "is no JSON that can be read"),
    "text.json": (b"hello", "is no JSON that can be read"),
    "none.json": (b'{"traceEvents": []}', "holds no event"),
    "no event.json": (b'{"traceEvents": [{"ph": "X", "cat": "cpu_', "holds no event that could be read"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_trace_is_an_error_that_names_the_file_and_what_to_do(tmp_path: Path, name: str) -> None:
    content, message = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError) as raised:
        files.read(tmp_path / name)
    assert str(raised.value).startswith(f"{tmp_path / name} {message}")
    assert any(remedy in str(raised.value) for remedy in ("export_chrome_trace()", "Did the run end"))


def test_odd_events_harm_nobody(tmp_path: Path) -> None:
    trace = small()
    odd = [
        {"ph": "X", "cat": ["kernel"], "ts": 1},
        None,
        3,
        "text",
        [],
        {},
        {"ph": "X"},
        {"ph": "i", "ts": 1},
        {"ph": "X", "cat": "kernel", "name": 3, "ts": 1},
    ]
    text = json.dumps(trace.header | {"traceEvents": [*odd, *trace.events]})
    (tmp_path / "odd.json").write_text(text)
    assert len(collectives(chrome.read(tmp_path / "odd.json"))) == 3


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
def test_what_a_header_says_in_no_known_way_is_unknown(
    tmp_path: Path, header: dict[str, object], known: tuple[int | None, int | None, str | None]
) -> None:
    trace = small()
    trace.header.update(header)
    recording = chrome.read(trace.write(tmp_path / "t.json"))
    assert (recording.rank, recording.world_size, recording.host) == known
    assert view(0, recording).splits[0].step == pytest.approx(100)
