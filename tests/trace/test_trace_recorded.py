"""Traces that torch.profiler recorded, here and once before: what ``fastddp trace`` says of them holds together."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from pathlib import Path
from typing import Literal

import pytest

from fastddp.tools.trace import names
from fastddp.tools.trace.files import read
from fastddp.tools.trace.grids import bucket_grid
from fastddp.tools.trace.reading import read_reports
from fastddp.tools.trace.report import Report
from ranks import RankPool
from releases import TRACES_NAME_HOSTS
from trace_recording import DATA, STEPS, record


def report_of(folder: Path, wrapper: Literal["fastddp", "torch DDP"]) -> Report:
    """Which holds together, whatever the times are."""
    (report,) = read_reports([folder])
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert (report.wrapper, report.world_size) == (wrapper, 2)
    assert [bucket.bucket for bucket in report.buckets] == [0, 1, 2]
    for rank, timeline in zip(report.ranks, report.timelines, strict=True):
        assert len(rank.step_ms) == STEPS
        assert rank.split.step == pytest.approx(sum(rank.step_ms) / STEPS)
        assert min(rank.split.compute, rank.split.communication) > 0
        assert min(rank.step_ms) <= timeline.length <= max(rank.step_ms)
        # What lies at the very beginning is the end of a collective of the step before. The status of a step rides with
        # the last bucket.
        collectives = [one.bucket for one in timeline.intervals if one.what == "collective" and one.start > 0]
        assert sorted(collectives, key=str) == [0, 1, 2]
        assert all(0 <= one.start <= one.end <= timeline.length for one in timeline.intervals)
        assert rank.waits_ms is not None
        assert rank.waits_ms >= 0
    for bucket in report.buckets:
        assert 0 < bucket.start < report.split.step * 10  # the machine may be busy
        assert bucket.duration > 0
        assert bucket.ready is not None
    names_hosts = TRACES_NAME_HOSTS or folder.is_relative_to(DATA)
    assert any("clock" in note for note in report.notes) != names_hosts
    return report


def recorded_names(path: Path) -> set[str]:
    return {range_.text for recording in read(path) for range_ in recording.ranges if range_.name is not None}


def test_of_steps_under_fastddp_which_have_the_names_that_were_recorded_before(ranks: RankPool, tmp_path: Path) -> None:
    """A change of names concerns everybody who reads traces: record tests/data anew, and change docs/traces.md."""
    path, _ = ranks.run(record, 2, tmp_path)
    for folder in (tmp_path, DATA / "fastddp"):
        buckets = report_of(folder, "fastddp").buckets
        assert [bucket.last for bucket in buckets] == ["2.weight", "1.weight", "0.weight"]
        for bucket in buckets:
            assert bucket.first == bucket.last == bucket.last_parameter
            assert (bucket.last_rank in (0, 1), bucket.bytes, bucket.wire) == (True, 256 * 256 * 4, "float32")
            assert 0 < bucket.ready <= bucket.start
            assert bucket.delay is not None
            assert bucket.bus_gb_per_s > 0
    assert recorded_names(path) == recorded_names(DATA / "fastddp" / "rank0.json.gz")


def test_of_steps_under_torchs_ddp(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(record, 2, tmp_path, "torch")
    assert all(bucket.first is None for bucket in report_of(tmp_path, "torch DDP").buckets)


def test_in_a_compiled_backward_gradients_come_and_travel_as_in_another(ranks: RankPool, tmp_path: Path) -> None:
    for path in ranks.run(record, 2, tmp_path, "compiled"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        spans = [(one["name"], one["ts"], one["ts"] + one["dur"]) for one in events if one.get("ph") == "X"]
        graphs = [span for span in spans if span[0] == "CompiledFunctionBackward"]
        for what in ("gradient", "pack", "collective"):
            own = [span for span in spans if span[0].startswith(f"fastddp.{what} ")]
            inside = [one for one in own if any(graph[1] <= one[1] and one[2] <= graph[2] for graph in graphs)]
            # The last bucket, with which the status travels, starts when backward has ended.
            assert len(inside) == (2 if what == "collective" else 3) * len(graphs), inside
    assert all(bucket.first == bucket.last for bucket in report_of(tmp_path, "fastddp").buckets)


def test_parameters_that_are_gathered_are_counted_by_name_and_drawn_as_their_buckets(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(record, 2, tmp_path, "sharded")
    (report,) = read_reports([tmp_path])
    assert [bucket.bucket for bucket in report.buckets] == [0, 1, 2]
    (gathers,) = [one for one in report.collectives if one.kind == names.GATHER]
    assert (gathers.of_buckets, gathers.count) == (False, 3)  # from the other rank
    assert gathers.bytes is not None
    for timeline in report.timelines:
        of_none = [one.name for one in timeline.intervals if one.what == "collective" and one.bucket is None]
        assert set(of_none) <= {"gloo:all_reduce"}  # which ends a step
        assert {one.bucket for one in timeline.intervals if one.name.startswith("fastddp.await")} == {0, 1, 2}


@pytest.mark.parametrize("hook", ["none", "bf16", "python", "PowerSGD", "sharded"])
def test_every_name_of_a_real_step_is_read_again_without_a_loss(ranks: RankPool, tmp_path: Path, hook: str) -> None:
    (path,) = ranks.run(record, 1, tmp_path, hook)
    found = set(re.findall(r'"name": "(fastddp\.[^"]*)"', gzip.decompress(path.read_bytes()).decode()))
    assert found == recorded_names(path)
    assert {"step", "window", "gradient", "collective"} <= {names.parse(text).what for text in found}
    for text in found:
        fields = {key: value for key, value in dataclasses.asdict(names.parse(text)).items() if value is not None}
        what, *others = text.removeprefix("fastddp.").split()
        assert fields.pop("what") == what
        assert sorted(others) == sorted(f"{key}={value}" for key, value in fields.items())


def test_nsight_tells_of_a_job_without_a_gpu_what_torchs_profiler_told_of_the_same_steps() -> None:
    """Both recorded one run. Nsight Systems has no collectives of gloo's: they end when the host has awaited them."""
    nsights, torchs = (read_reports([DATA / "nsight" / name])[0] for name in ("step.sqlite", "torch"))
    assert (nsights.recorder, nsights.wrapper, nsights.step_mark) == ("Nsight Systems", "fastddp", "fastddp.step")
    assert len(nsights.warnings) == 1
    for ours, theirs in zip(nsights.ranks, torchs.ranks, strict=True):
        assert ours.step_ms == pytest.approx(theirs.step_ms, abs=0.05)
    for mine, other in zip(nsights.buckets, torchs.buckets, strict=True):
        for field in ("bucket", "first", "last", "bytes", "wire", "last_rank", "last_parameter"):
            assert getattr(mine, field) == getattr(other, field)
        assert mine.ready == pytest.approx(other.ready, abs=0.05)
        assert mine.start <= other.start
        assert mine.start + mine.duration >= other.start + other.duration
    packs = [[row[-1] for row in bucket_grid(one).rows] for one in (nsights, torchs)]
    assert packs[0] == pytest.approx(packs[1], abs=0.05)
    assert sum(packs[0]) > 0.1
