"""Which recordings of a run are of which rank, and what ranks that differ have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastddp.trace import files
from fastddp.trace.analysis import analyse
from fastddp.trace.reading import read_reports
from fastddp.trace.recording import TraceError
from fastddp.trace.report import Report
from trace_files import NCCL, NCCL_STREAM, ChromeTrace, NsightExport, bucket


def steps_on_a_gpu(trace: ChromeTrace | NsightExport, late: float = 0.0, buckets: int = 1) -> None:
    """Two steps of 100 ms; collectives of 20 ms begin at 50 + late, 70 + late, ..."""
    for step in range(3):
        t = 100.0 * step
        trace.moment(t, "fastddp.step")
        trace.call(t, 10 * step)
        trace.kernel(t, t + 40, 10 * step)
        for index in range(buckets):
            trace.range(t + 5 + index, t + 5.5 + index, bucket("collective", index, of=buckets))
            trace.call(t + 5 + index, 10 * step + index + 1)
            start = t + 50 + late + 20 * index
            trace.kernel(start, t + 70 + 20 * index, 10 * step + index + 1, NCCL, NCCL_STREAM)


def run_of(folder: Path, *named: str) -> Report:
    """Files of Nsight Systems of these names, each 1 ms later than the one before."""
    for place, name in enumerate(named):
        trace = NsightExport(process=100 + place)
        steps_on_a_gpu(trace, late=float(place))
        trace.write(folder / name)
    (report,) = read_reports([folder])
    return report


def sources(report: Report) -> list[tuple[int, str]]:
    return [(rank.rank, Path(rank.source).name) for rank in report.ranks]


def test_ranks_are_those_in_the_names_of_files_if_all_have_one(tmp_path: Path) -> None:
    report = run_of(tmp_path, "rank10.sqlite", "run_rank-2.sqlite", "RANK_0.sqlite")
    assert sources(report) == [(0, "RANK_0.sqlite"), (2, "run_rank-2.sqlite"), (10, "rank10.sqlite")]
    assert any("taken from the names of files" in note for note in report.notes)


@pytest.mark.parametrize(
    "names", [["n2", "n10", "n9"], ["rank2", "rank10", "other"], ["a_rank2", "b_rank2", "c_rank2"]]
)
def test_otherwise_files_are_counted_by_the_numbers_in_their_names(tmp_path: Path, names: list[str]) -> None:
    report = run_of(tmp_path, *(f"{name}.sqlite" for name in names))
    order = {"n2": ["n2", "n9", "n10"], "rank2": ["other", "rank2", "rank10"]}.get(names[0], names)
    assert sources(report) == [(rank, f"{name}.sqlite") for rank, name in enumerate(order)]
    assert any("counted in the order of files and processes" in note for note in report.notes)


def test_a_process_that_only_used_the_gpu_is_no_rank(tmp_path: Path) -> None:
    trace = NsightExport(process=99)
    trace.kernel(10, 11, 1)
    for process in (100, 101):
        trace.process = process
        steps_on_a_gpu(trace)
    path = trace.write(tmp_path / "run.sqlite")
    report = analyse(files.read(path), "run")
    assert [len(rank.step_ms) for rank in report.ranks] == [2, 2]
    assert [(one.start, one.duration) for one in report.buckets] == [(50, 20)]
    left_out = f"{path}: 1 recording without steps and collectives, of a process that is no rank, is left out."
    assert left_out in report.notes


def test_a_rank_that_recorded_fewer_buckets_takes_none_from_the_others(tmp_path: Path) -> None:
    for rank, buckets in enumerate((1, 2)):
        trace = ChromeTrace(rank, world_size=2)
        steps_on_a_gpu(trace, buckets=buckets)
        trace.write(tmp_path / f"{rank}.json")
    (report,) = read_reports([tmp_path])
    assert [(one.bucket, one.start, one.duration) for one in report.buckets] == [(0, 50, 20), (1, 70, 20)]
    assert [one.exposed for one in report.buckets] == pytest.approx([20, 20])
    assert [one.mean_exposed for one in report.buckets] == pytest.approx([20, 10])
    assert report.split.exposed == pytest.approx(30)


def test_several_cycles_of_a_rank_are_several_runs(tmp_path: Path) -> None:
    for cycle in range(2):
        trace = ChromeTrace(0, world_size=2)
        steps_on_a_gpu(trace)
        trace.write(tmp_path / f"host_1.{cycle}.pt.trace.json")
    with pytest.raises(TraceError, match=r"both of rank 0.*cycles .* are several runs: give each cycle a folder"):
        read_reports([tmp_path])
