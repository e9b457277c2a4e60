"""Traces that torch.profiler recorded, here and once before: what ``fastddp trace`` says of them holds together."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fastddp.trace import names
from fastddp.trace.files import read
from fastddp.trace.reading import read_reports
from fastddp.trace.report import Report
from ranks import RankPool
from trace_recording import DATA, STEPS, record


def report_of(folder: Path) -> Report:
    (report,) = read_reports([folder])
    return report


def check_that_it_holds_together(report: Report, status: int = 0) -> None:
    """``status``: collectives of a step that belong to no bucket."""
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert report.world_size == 2
    assert [bucket.bucket for bucket in report.buckets] == [0, 1, 2]
    for rank, timeline in zip(report.ranks, report.timelines, strict=True):
        assert len(rank.step_ms) == STEPS
        assert rank.split.step == pytest.approx(sum(rank.step_ms) / STEPS)
        assert rank.split.compute > 0
        assert rank.split.communication > 0
        assert min(rank.step_ms) <= timeline.length <= max(rank.step_ms)
        # What lies at the very beginning is the end of a collective of the step before.
        collectives = [one for one in timeline.intervals if one.what == "collective" and one.start > 0]
        assert sorted(-1 if one.bucket is None else one.bucket for one in collectives) == [-1] * status + [0, 1, 2]
        assert all(0 <= one.start <= one.end <= timeline.length for one in timeline.intervals)
    for bucket in report.buckets:
        assert 0 < bucket.start < report.split.step * 10  # the machine may be busy
        assert bucket.duration > 0
    assert all(rank.waits_ms is not None and rank.waits_ms >= 0 for rank in report.ranks)
    assert not any("clock" in note for note in report.notes)


def check_buckets_of_fastddp(report: Report) -> None:
    assert report.wrapper == "fastddp"
    assert [bucket.last for bucket in report.buckets] == ["2.weight", "1.weight", "0.weight"]
    for bucket in report.buckets:
        assert bucket.first == bucket.last == bucket.last_parameter
        assert bucket.last_rank in (0, 1)
        assert (bucket.bytes, bucket.wire) == (256 * 256 * 4, "float32")
        assert bucket.ready is not None
        assert bucket.delay is not None
        assert 0 < bucket.ready <= bucket.start
        assert bucket.bus_gb_per_s is not None
        assert bucket.bus_gb_per_s > 0


def test_of_steps_under_fastddp(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(record, 2, tmp_path, "fastddp")
    report = report_of(tmp_path)
    check_that_it_holds_together(report, status=1)
    check_buckets_of_fastddp(report)


def test_of_steps_under_torchs_ddp(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(record, 2, tmp_path, "torch", suffix=".json.gz")
    report = report_of(tmp_path)
    check_that_it_holds_together(report)
    assert report.wrapper == "torch DDP"
    assert all(bucket.ready is not None and bucket.first is None for bucket in report.buckets)


def test_of_a_trace_that_was_recorded_before() -> None:
    report = report_of(DATA / "fastddp")
    check_that_it_holds_together(report, status=1)
    check_buckets_of_fastddp(report)


# ------------------------------------------------------------------------------------------------------------- names


def recorded_names(path: Path) -> set[str]:
    return {range_.text for recording in read(path) for range_ in recording.ranges if range_.name is not None}


@pytest.mark.parametrize("hook", ["none", "bf16", "python", "powersgd"])
def test_every_name_of_a_real_step_is_read_again_without_a_loss(ranks: RankPool, tmp_path: Path, hook: str) -> None:
    path = ranks.run(record, 1, tmp_path, "fastddp", hook)[0]
    found = set(re.findall(r'"name": "(fastddp\.[^"]*)"', path.read_text()))
    assert found == recorded_names(path)
    assert {"step", "window", "gradient", "collective"} <= {names.parse(text).what for text in found}
    for text in found:
        name = names.parse(text)
        fields = {key: value for key, value in dataclasses.asdict(name).items() if value is not None}
        what = fields.pop("what")
        assert text == " ".join([f"fastddp.{what}", *(f"{key}={value}" for key, value in _in_order(fields, text))])


def _in_order(fields: dict[str, object], text: str) -> list[tuple[str, object]]:
    return sorted(fields.items(), key=lambda field: text.index(f" {field[0]}="))


def test_names_are_those_of_the_trace_that_was_recorded_before(ranks: RankPool, tmp_path: Path) -> None:
    """A change of names concerns everybody who reads traces: record tests/data anew, and change docs/traces.md."""
    path = ranks.run(record, 2, tmp_path, "fastddp")[0]
    assert recorded_names(path) == recorded_names(DATA / "fastddp" / "rank0.json.gz")


def test_other_names_are_none_of_fastddps() -> None:
    assert names.parse("aten::mm") is None
    assert names.parse("DistributedDataParallel.forward") is None


def test_keys_of_a_later_version_are_left_out() -> None:
    assert names.parse("fastddp.ready bucket=3 colour=red") == names.Name("ready", bucket=3)


def test_numbers_that_are_none_are_unknown() -> None:
    assert names.parse("fastddp.ready bucket=three bytes=") == names.Name("ready")
