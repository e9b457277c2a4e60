"""What marks steps and buckets, and what is said where a step holds more than one wrapper's."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastddp.tools.commands import app
from fastddp.tools.trace import files
from fastddp.tools.trace.buckets import SEVERAL, SHARED
from fastddp.tools.trace.ranks import bring_together, view
from fastddp.tools.trace.recording import TraceError
from trace_files import (
    BOTH_RECORDERS,
    FORWARD,
    OTHER_STREAM,
    AnyTrace,
    ChromeTrace,
    NsightExport,
    Trace,
    bucket,
    gradient,
    report,
    seen,
)

# ------------------------------------------------------------------------------------------------------ ProfilerStep#


def two_windows_a_step(rank: int = 0, first: int = 3, layers: tuple[str, str] = ("layer", "layer")) -> ChromeTrace:
    """The user's steps last 90 of every 100 ms, and hold two windows, with a bucket each; of wrappers, or of one."""
    trace = ChromeTrace(rank, world_size=2)
    for number in range(first, 6):
        t = 100.0 * number
        trace.range(t, t + 90, f"ProfilerStep#{number}")
        for begin, layer in ((t, layers[0]), (t + 40, layers[1])):
            trace.steps(begin + 1).operator(begin + 1, begin + 20)
            trace.moment(begin + 20, bucket("ready", 0, of=1, layer=layer)).gloo(begin + 21, begin + 22, begin + 32, 0)
    return trace


def test_the_profilers_steps_are_what_the_user_calls_a_step(tmp_path: Path) -> None:
    """Of two windows in it the last one tells when a bucket travels."""
    found = report(tmp_path, two_windows_a_step())
    assert found.step_mark == "ProfilerStep#"
    assert found.ranks[0].step_ms == pytest.approx((90, 90, 90))
    assert (found.split.compute, found.split.exposed) == pytest.approx((38, 20))
    assert found.timelines[0].step in (3, 4, 5)
    (only,) = found.buckets
    assert (only.ready, only.delay, only.start, only.duration, only.exposed) == pytest.approx((60, 2, 62, 10, 20))
    assert SEVERAL in found.notes


def test_without_the_profilers_a_step_goes_from_one_window_to_the_next(tmp_path: Path) -> None:
    found = report(tmp_path, two_windows_a_step().without("ProfilerStep"))
    assert found.step_mark == "fastddp.step"
    assert found.ranks[0].step_ms == pytest.approx((40, 60, 40, 60, 40))
    assert not {SEVERAL, SHARED} & set(found.notes)
    alone = report(tmp_path, ChromeTrace().range(500, 590, "ProfilerStep#5").range(600, 690, "ProfilerStep#6"))
    assert (alone.ranks[0].step_ms, alone.wrapper) == (pytest.approx((90, 90)), "unknown")


def test_only_a_step_of_two_wrappers_says_that_their_buckets_have_the_same_numbers(tmp_path: Path) -> None:
    rebuilt = two_windows_a_step().moment(301, bucket("ready", 0, of=1, layer="other"))  # in one step of all
    for trace, is_said in (
        (two_windows_a_step(layers=("encoder", "decoder")), True),
        (two_windows_a_step(), False),
        (rebuilt, False),
    ):
        assert (SHARED in report(tmp_path, trace).notes) == is_said


def test_ranks_steps_of_one_number_belong_together_unless_they_are_marked_in_different_ways(tmp_path: Path) -> None:
    found = report(tmp_path, two_windows_a_step(0), two_windows_a_step(1, first=5))
    assert [len(rank.step_ms) for rank in found.ranks] == [3, 1]
    assert any("compared over 1" in note for note in found.notes)
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([0, 0])
    found = report(tmp_path, two_windows_a_step(0), two_windows_a_step(1).without("ProfilerStep"))
    assert any("not marked alike (ProfilerStep#, fastddp.step)" in note for note in found.notes)


def test_bucket_numbers_that_cannot_be_do_not_fill_the_memory(tmp_path: Path) -> None:
    trace = two_windows_a_step()
    for name in (
        "fastddp.ready bucket=99999999",
        "fastddp.ready bucket=2 of=2",
        "fastddp.ready bucket=99999999 of=100000000",
        "fastddp.gradient parameter=layer0.weight bucket=9999",  # none of those that the other names count
        f"fastddp.collective bucket={'9' * 5000} of=1",
        f"fastddp.collective tick={'9' * 30} bytes={'9' * 30}",
    ):
        trace.moment(350, name)
    assert [one.bucket for one in report(tmp_path, trace).buckets] == [0]
    assert seen(tmp_path, trace).recording.ranges_of("ready")[0].name.bucket == 0


# --------------------------------------------------------------------------------------------------------- torch's DDP


def test_buckets_of_torchs_ddp_are_guessed_from_the_order_of_its_allreduces(tmp_path: Path) -> None:
    trace = ChromeTrace(0, world_size=2)
    for t in (0.0, 100.0, 200.0):
        trace.range(t, t + 30, FORWARD).gloo(t + 1, t + 2, t + 3, None, "broadcast")
        trace.gloo(t + 40, t + 41, t + 51, None).gloo(t + 60, t + 61, t + 71, None)
    found = report(tmp_path, trace)
    assert found.wrapper == "torch DDP"
    assert [(one.bucket, one.ready, one.start, one.first) for one in found.buckets] == [
        (0, pytest.approx(40), pytest.approx(41), None),  # ready when torch launched it
        (1, pytest.approx(60), pytest.approx(61), None),
    ]
    assert any("guessed from the order" in note for note in found.notes)


def test_a_bucket_of_torchs_ddp_is_what_torch_says_is_an_allreduce(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for t in (0.0, 100.0, 200.0):
        trace.range(t, t + 10, FORWARD)
        for place, operation in enumerate(("broadcast", "allreduce", "allreduce_coalesced")):
            trace.nccl(t + place, t + 20 * place, t + 20 * place + 10, name="ncclDevKernel_Generic_1")
            trace.noting(Collective_name=operation)
        trace.nccl(t + 3, t + 60, t + 70)
    assert seen(tmp_path, trace).runs.bucket[:4].tolist() == [-1, 0, 1, 2]


@BOTH_RECORDERS
@pytest.mark.parametrize("late", [0, 40], ids=["in its step", "when the next step has begun"])
def test_what_is_copied_ahead_is_in_no_step_before(tmp_path: Path, recorder: type[Trace], late: float) -> None:
    """The host is 90 ms ahead. Each batch is copied on a stream of its own, while the step before still computes."""
    trace = recorder()
    for t in (0.0, 100.0, 200.0, 300.0, 400.0):
        trace.range(t, t + 5, FORWARD).copy(t, t + 10, t + 12, stream=OTHER_STREAM).launch(t + 2, t + 90, t + 150)
        trace.nccl(t + 20, t + 140, t + 155).nccl(t + 21, t + 155, t + 170).nccl(t + 22, t + 170 + late, t + 185 + late)
    found = report(tmp_path, trace)
    assert (found.wrapper, found.step_mark) == ("torch DDP", "forward")
    assert found.ranks[0].step_ms == pytest.approx((100,) * 4)
    assert [one.bucket for one in found.buckets] == [0, 1, 2]
    assert [one.start for one in found.buckets] == pytest.approx([50, 65, 80 + late])
    assert [one.ready for one in found.buckets] == pytest.approx([60, 60, 60])  # all that was launched before is done


def test_without_marks_a_note_says_which_option_brings_them(tmp_path: Path) -> None:
    found = report(tmp_path, ChromeTrace().operator(0, 30).gloo(29, 30, 40, None))
    assert found.ranks[0].step_ms == pytest.approx((40,))
    assert any("no second step" in note and "profile.step()" in note for note in found.notes)
    (note, *_) = report(tmp_path, NsightExport().launch(0, 0, 50).nccl(1, 50, 60)).notes
    assert "no second step" in note
    assert "--pytorch=autograd-nvtx" in note
    assert "--step-range NAME" in note


# ------------------------------------------------------------------------------------------------------- --step-range


def steps(trace: AnyTrace, mark: str) -> AnyTrace:
    """Steps of 100 ms; ``mark`` has a place for their number."""
    for step in range(4):
        t = 100.0 * step
        trace.range(t, t + 90, mark.format(step, 10 + step)).launch(t, t, t + 50)
        trace.nccl(t + 20, t + 50, t + 70).nccl(t + 21, t + 70, t + 90)
    return trace


@pytest.mark.parametrize("mark", ["train", "train {}", "train #{}/40", "train, op_id = {1}"])
def test_a_range_of_the_scripts_own_is_a_step(tmp_path: Path, mark: str) -> None:
    trace = steps(NsightExport() if "op_id" in mark else ChromeTrace(), mark)
    trace.range(3, 5, "train_model")  # has letters after it
    trace.range(40, 45, "train", thread=77)  # on another thread
    found = report(tmp_path, trace, step_range="train")
    assert found.step_mark == "--step-range"
    assert found.ranks[0].step_ms == pytest.approx((100, 100, 100, 100), abs=11)
    assert (found.split.compute, found.split.exposed) == pytest.approx((50, 40), abs=1)


def test_ranges_with_numbers_are_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    traces = [steps(ChromeTrace(rank, world_size=2), "step {}").without(f"step {rank}") for rank in range(2)]
    paths = [trace.write(tmp_path / f"{rank}.json") for rank, trace in enumerate(traces)]
    views = [view(rank, files.read(path, step_range="step")[0], "step") for rank, path in enumerate(paths)]
    assert [one.steps.numbers for one in views] == [(1, 2, 3), (0, 2, 3)]
    assert bring_together(views).begin.tolist() == [[200, 300], [200, 300]]
    command = ["trace", str(tmp_path), "--no-files", "--step-range", "step"]
    assert "3 steps" in CliRunner().invoke(app, command).output


def test_a_range_that_is_not_there_is_an_error_that_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"0\.sqlite has no range 'epoch'.*nvtx\.range\(\"epoch\"\).*record_function"):
        report(tmp_path, steps(NsightExport(), "train"), step_range="epoch")


# ------------------------------------------------------------------------------------------------------ other recorders


@pytest.mark.parametrize("with_numbers", [True, False], ids=["from torch alone", "from both"])
def test_names_that_torch_repeats_to_nvtx_count_once(tmp_path: Path, with_numbers: bool) -> None:
    """fastddp gives NVTX its names itself; with autograd-nvtx torch gives them again, with a number."""
    trace = NsightExport()
    for step in range(3):
        t, number = 100.0 * step, f", op_id = {step}"
        for added in (number,) if with_numbers else ("", f", seq = -1{number}, sizes = [[2]]"):
            trace.moment(t, "fastddp.step" + added).moment(t + 5, gradient("layer0.weight", 0) + added)
            trace.moment(t + 6, bucket("ready", 0, of=1) + added)
            trace.range(t + 7, t + 9, bucket("collective", 0, of=1) + added)
        trace.launch(t + 1, t + 10, t + 60).nccl(t + 8, t + 60, t + 80)
    recording = seen(tmp_path, trace).recording
    assert [len(recording.ranges_of(what)) for what in ("step", "gradient", "ready", "collective")] == [3] * 4
    (only,) = report(tmp_path, trace).buckets
    assert (only.last_parameter, only.last, only.start) == ("layer0.weight", "layer0.weight", pytest.approx(50))
