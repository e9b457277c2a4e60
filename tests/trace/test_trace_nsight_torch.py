"""Traces of Nsight Systems of torch's DDP and other scripts: torch's NVTX ranges, the user's own, NCCL's payloads."""

from __future__ import annotations

import json
import sqlite3
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastddp.cli.commands import app
from fastddp.trace import files, nsight
from fastddp.trace.analysis import analyse
from fastddp.trace.ranks import bring_together, view
from fastddp.trace.recording import NONE, TraceError
from fastddp.trace.report import Report
from trace_files import NCCL, NCCL_STREAM, ChromeTrace, NsightExport, bucket, gradient

COMMUNICATOR = 2**64 - 77
SCHEMA, INIT_SCHEMA = 100, 101


def report(path: Path, step_range: str | None = None) -> Report:
    return analyse(files.read(path, step_range=step_range), "run", step_range=step_range)


def steps(trace: ChromeTrace | NsightExport, mark: str = "", buckets: int = 2) -> None:
    """Steps of 100 ms; ``mark`` has a place for their number."""
    for step in range(4):
        t = 100.0 * step
        if mark:
            trace.range(t, t + 90, mark.format(step, 10 + step))
        trace.call(t, 100 * step)
        trace.kernel(t, t + 50, 100 * step)
        for index in range(buckets):
            trace.call(t + 20 + index, 100 * step + index + 1)
            trace.kernel(t + 50 + 20 * index, t + 70 + 20 * index, 100 * step + index + 1, NCCL, NCCL_STREAM)


def test_a_name_that_is_not_utf_8_refuses_no_file(tmp_path: Path) -> None:
    trace = NsightExport()
    steps(trace, "fastddp.step")
    path = trace.write(tmp_path / "run.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO StringIds VALUES (999, CAST(x'6d61787e80ff' AS TEXT))")
        database.execute("UPDATE NVTX_EVENTS SET text = CAST(x'80ff' AS TEXT) WHERE eventType = 75")
    database.close()
    assert len(report(path).ranks[0].step_ms) == 3


# ------------------------------------------------------------------------------------------- what torch gives NVTX


def test_torchs_ddp_has_steps_and_buckets_where_torch_gives_nvtx_its_ranges(tmp_path: Path) -> None:
    trace = NsightExport()
    steps(trace, "DistributedDataParallel.forward, op_id = {1}")
    found = report(trace.write(tmp_path / "run.sqlite"))
    assert (found.wrapper, found.step_mark) == ("torch DDP", "forward")
    assert [one.start for one in found.buckets] == pytest.approx([50, 70])
    assert [one.ready for one in found.buckets] == pytest.approx([50, 50])


def test_without_them_a_note_says_which_option_brings_them(tmp_path: Path) -> None:
    trace = NsightExport()
    steps(trace)
    found = report(trace.write(tmp_path / "run.sqlite"))
    (note,) = (note for note in found.notes if "no second step" in note)
    assert "--pytorch=autograd-nvtx" in note
    assert "--step-range NAME" in note


@pytest.mark.parametrize("once", [True, False])
def test_names_that_torch_repeats_count_once(tmp_path: Path, once: bool) -> None:
    """fastddp gives NVTX its names itself; with autograd-nvtx torch gives them again, with a number."""
    trace = NsightExport()
    for step in range(3):
        t, suffix = 100.0 * step, f", op_id = {step}"
        for added in (suffix,) if once else ("", ", seq = -1" + suffix + ", sizes = [[2]]"):
            trace.moment(t, "fastddp.step" + added)
            trace.moment(t + 5, gradient("layer0.weight", 0) + added)
            trace.moment(t + 6, bucket("ready", 0, of=1) + added)
            trace.range(t + 7, t + 9, bucket("collective", 0, of=1) + added)
        for place, number in ((1, 1), (8, 2)):
            trace.call(t + place, 10 * step + number)
        trace.kernel(t + 10, t + 60, 10 * step + 1)
        trace.kernel(t + 60, t + 80, 10 * step + 2, NCCL, NCCL_STREAM)
    (recording,) = nsight.read(trace.write(tmp_path / "run.sqlite"))
    assert [len(recording.ranges_of(what)) for what in ("step", "gradient", "ready", "collective")] == [3] * 4
    (only,) = analyse([recording], "run").buckets
    assert (only.last_parameter, only.last) == ("layer0.weight", "layer0.weight")
    assert only.start == pytest.approx(50)


# -------------------------------------------------------------------------------------------------- the user's range


MARKS = ["train", "train {}", "train_{}", "train #{}/40"]


@pytest.mark.parametrize(
    ("mark", "kind"),
    [(mark, kind) for kind in (ChromeTrace, NsightExport) for mark in MARKS] + [("train, op_id = {1}", NsightExport)],
)
def test_a_range_of_the_scripts_own_is_a_step(
    tmp_path: Path, mark: str, kind: type[ChromeTrace | NsightExport]
) -> None:
    trace = kind()
    steps(trace, mark)
    trace.range(3, 5, "train_model")  # has letters behind it
    trace.range(40, 45, "train", thread=77)  # on another thread
    path = trace.write(tmp_path / ("run.sqlite" if kind is NsightExport else "run.json"))
    found = report(path, "train")
    assert found.step_mark == "--step-range"
    assert found.ranks[0].step_ms == pytest.approx((100, 100, 100, 100), abs=11)
    assert (found.split.compute, found.split.exposed) == pytest.approx((50, 40), abs=1)


def test_ranges_with_numbers_are_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        trace = ChromeTrace(rank, world_size=2)
        steps(trace, "step {}")
        trace.events = [event for event in trace.events if event["name"] != f"step {rank}"]
        trace.write(tmp_path / f"{rank}.json")
    paths = sorted(tmp_path.iterdir())
    views = [view(rank, files.read(path, step_range="step")[0], "step") for rank, path in enumerate(paths)]
    assert [one.steps.numbers for one in views] == [(1, 2, 3), (0, 2, 3)]
    assert bring_together(views).begin.tolist() == [[200, 300], [200, 300]]
    command = ["trace", str(tmp_path), "--no-files", "--step-range", "step"]
    assert "3 steps" in CliRunner().invoke(app, command).output


def test_a_range_that_is_not_there_is_an_error_that_says_how_to_make_it(tmp_path: Path) -> None:
    trace = NsightExport()
    steps(trace, "fastddp.step")
    with pytest.raises(
        TraceError, match=r"run\.sqlite has no range 'epoch'.*nvtx\.range\(\"epoch\"\).*record_function"
    ):
        report(trace.write(tmp_path / "run.sqlite"), "epoch")


# --------------------------------------------------------------------------------------------------- NCCL's payloads


def schemas(trace: NsightExport) -> None:
    entries = [
        (SCHEMA, 0, "NCCL communicator ID", None),
        (SCHEMA, 1, "Message size [bytes]", 8),
        (SCHEMA, 2, "Reduction operation", 16),
        (INIT_SCHEMA, 0, "NCCL communicator ID", None),
        (INIT_SCHEMA, 1, "No. of ranks", 8),
    ]
    for schema, place, name, offset in entries:
        trace.row("NVTX_PAYLOAD_SCHEMA_ENTRIES", domainId=7, schemaId=schema, idx=place, name=name, offset=offset)


def packed(schema: int, payload: bytes) -> bytes:
    return struct.pack("<IIIIQQ", 7, 0, schema, 0, len(payload), 32 + len(payload)) + payload


def call_of_nccl(trace: NsightExport, time: float, name: str, **payload: object) -> None:
    start = round(time * 1e6)
    trace.row(
        "NVTX_EVENTS", start=start, end=start + 10, eventType=59, text=name, globalTid=trace._thread(1), **payload
    )


def message(size: int) -> bytes:
    return packed(SCHEMA, struct.pack("<QQi", COMMUNICATOR, size, 0))


def with_payloads(trace: NsightExport, name: str, payload: dict[str, object], kernel: str) -> None:
    """The kernel is launched behind the call, when its group ends."""
    schemas(trace)
    call_of_nccl(trace, 0, "ncclCommInitRank", binaryData=packed(INIT_SCHEMA, struct.pack("<QIi", COMMUNICATOR, 4, 0)))
    for step in range(3):
        t = 100.0 * step
        trace.range(t, t + 1, "DistributedDataParallel.forward, op_id = 5")
        trace.call(t, 10 * step)
        trace.kernel(t, t + 50, 10 * step)
        call_of_nccl(trace, t + 20, name, **payload)
        call_of_nccl(trace, t + 20.5, "ncclGroupEnd")
        trace.call(t + 21, 10 * step + 1)
        trace.kernel(t + 50, t + 90, 10 * step + 1, kernel, NCCL_STREAM)


JSON = json.dumps({"NCCL communicator ID": "18,446,744,073,709,551,539", "Message size [bytes]": 4_000_000})


@pytest.mark.parametrize("payload", [{"binaryData": message(4_000_000)}, {"jsonText": JSON}], ids=["binary", "json"])
def test_nccl_says_what_its_calls_carry_and_in_which_group(tmp_path: Path, payload: dict[str, object]) -> None:
    trace = NsightExport()
    with_payloads(trace, "ncclAllReduce", payload, NCCL)
    path = trace.write(tmp_path / "run.sqlite")
    (recording,) = nsight.read(path)
    (about,) = recording.collectives
    assert (about.operation, about.group, about.group_size) == ("all_reduce", hex(COMMUNICATOR), 4)
    found = report(path)
    assert [(one.bytes, one.wire) for one in found.buckets] == [(4_000_000, "float32")]
    (kind,) = found.collectives
    assert kind.bus_gb_per_s == pytest.approx(4e6 * 1.5 / 40e-3 / 1e9)


def test_a_reduce_scatter_names_what_comes_out_of_it(tmp_path: Path) -> None:
    trace = NsightExport()
    with_payloads(trace, "ncclReduceScatter", {"binaryData": message(1000)}, "ncclDevKernel_Generic_1")
    (kind,) = report(trace.write(tmp_path / "run.sqlite")).collectives
    assert (kind.kind, kind.bytes) == ("reduce_scatter", 4000)


def test_sends_and_receives_of_a_group_are_one_exchange(tmp_path: Path) -> None:
    trace = NsightExport()
    schemas(trace)
    for number in range(3):
        for what in ("ncclSend", "ncclRecv"):
            call_of_nccl(trace, 10 + number, what, binaryData=message(500))
    trace.call(20, 1)
    trace.kernel(30, 40, 1, "ncclDevKernel_SendRecv", NCCL_STREAM)
    (recording,) = nsight.read(trace.write(tmp_path / "run.sqlite"))
    assert recording.collectives[0].operation == "send/recv"
    assert recording.activities.bytes.tolist() == [1500]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0" * 31, message(5)[:-1], packed(99, b"\0" * 24), packed(SCHEMA, b"\0" * 8), 17, "text"],
    ids=["empty", "short", "cut", "schema", "fields", "number", "text"],
)
def test_payloads_of_another_form_are_not_believed(tmp_path: Path, payload: object) -> None:
    trace = NsightExport()
    with_payloads(trace, "ncclAllReduce", {"binaryData": payload, "jsonText": None}, NCCL)
    (recording,) = nsight.read(trace.write(tmp_path / "run.sqlite"))
    assert set(recording.activities.bytes.tolist()) == {NONE}
    assert recording.collectives[0].operation == "all_reduce"


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"Message size [bytes]": "none"}'])
def test_payloads_in_broken_json_are_not_believed(tmp_path: Path, text: str) -> None:
    trace = NsightExport()
    with_payloads(trace, "ncclAllReduce", {"jsonText": text}, NCCL)
    (recording,) = nsight.read(trace.write(tmp_path / "run.sqlite"))
    assert set(recording.activities.bytes.tolist()) == {NONE}
