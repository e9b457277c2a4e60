"""What marks steps and buckets, what a step that holds several wrappers says, and where the time of steps goes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fastddp.times.split import Split
from fastddp.tools.trace.buckets import SEVERAL, SHARED
from fastddp.tools.trace.recording import TraceError
from trace_files import (
    BOTH_RECORDERS,
    FORWARD,
    GLOO,
    LAUNCHER,
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


def test_ranks_steps_of_one_number_belong_together_unless_they_are_marked_in_different_ways(tmp_path: Path) -> None:
    found = report(tmp_path, two_windows_a_step(0), two_windows_a_step(1, first=5))
    assert [len(rank.step_ms) for rank in found.ranks] == [3, 1]
    assert any("compared over 1" in note for note in found.notes)
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([0, 0])
    found = report(tmp_path, two_windows_a_step(0), two_windows_a_step(1).without("ProfilerStep"))
    assert any("not marked alike (ProfilerStep#, fastddp.step)" in note for note in found.notes)


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


ON_THE_CPU = {
    "packing is compute": (
        ChromeTrace().steps(0, 100).range(10, 30, bucket("pack", 0)),
        Split(20, 0, 0, 80),
    ),
    "waiting is not, and neither is an operator that waits": (
        ChromeTrace().steps(0, 100).operator(40, 80).range(50, 60, bucket("wait", 0)).gloo(49, 50, 60, 0)
        .range(90, 95, bucket("wait", 1)),
        Split(30, 0, 10, 60),
    ),
    "what a thread of gloo's does inside a collective is no compute": (
        ChromeTrace().steps(0, 100).gloo(9, 10, 50, 0).operator(20, 30, "aten::copy_", thread=GLOO),
        Split(0, 0, 40, 60),
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", ON_THE_CPU)
def test_on_the_cpu_a_step_is_split_into(tmp_path: Path, which: str) -> None:
    trace, split = ON_THE_CPU[which]
    assert seen(tmp_path, trace).splits == [split]


ON_A_GPU: dict[str, tuple[Callable[[Trace], Trace], list[Split]]] = {
    "only kernels compute, and copies are apart": (
        lambda trace: trace.steps(0, 100).operator(0, 90).copy(1, 10, 20).launch(2, 20, 60).nccl(3, 50, 80)
        .launch(101, 110, 120),
        [Split(30, 10, 20, 30, copy=10)],
    ),
    "a copy hides no communication, and is none where something is computed": (
        lambda trace: trace.steps(0, 100).launch(1, 10, 40).copy(2, 30, 60).nccl(3, 50, 80).launch(101, 110, 120),
        [Split(30, 0, 30, 30, copy=10)],
    ),
    "what the host launched in it, two steps ahead": (
        lambda trace: trace.steps(0, 10, 20).launch(1, 100, 170).launch(11, 200, 270).launch(21, 300, 370),
        [Split(70, 0, 0, 30)] * 2,
    ),
    "the profiler's, which ends where the device reaches what the host launches then": (
        lambda trace: trace.range(0, 9, "ProfilerStep#0").range(10, 19, "ProfilerStep#1").steps(1, 11)
        .launch(2, 100, 170).launch(12, 200, 270),
        [Split(70, 0, 0, 30), Split(70, 0, 0, 0)],
    ),
    "all of the trace without marks, from a kernel on that was launched before": (
        lambda trace: trace.launch(None, 0, 40).launch(50, 60, 100),
        [Split(80, 0, 0, 20)],
    ),
    "all of the trace with one mark": (
        lambda trace: trace.launch(None, 0, 40).steps(45).nccl(47, 60, 100, 0),
        [Split(40, 0, 40, 20)],
    ),
}  # fmt: skip


@BOTH_RECORDERS
@pytest.mark.parametrize("which", ON_A_GPU)
def test_on_a_gpu_a_step_is(tmp_path: Path, which: str, recorder: type[Trace]) -> None:
    build, splits = ON_A_GPU[which]
    assert seen(tmp_path, build(recorder())).splits == splits


@BOTH_RECORDERS
def test_on_a_gpu_a_bucket_is_ready_when_its_last_gradient_is_computed(tmp_path: Path, recorder: type[Trace]) -> None:
    trace = recorder().steps(0, 50)
    trace.launch(1, 10, 20)  # forward
    trace.launch(2, 20, 40).moment(3, gradient("layer0.weight", 0))
    trace.launch(4, 40, 70).moment(5, gradient("layer0.bias", 0)).moment(5, bucket("ready", 0, of=1))
    trace.nccl(7, 72, 90, 0).launch(51, 110, 120)
    times = seen(tmp_path, trace).times
    assert (times.ready.tolist(), times.half.tolist()) == ([[70]], [[40]])
    assert times.last_parameter.tolist() == [["layer0.bias"]]
    assert (times.start.tolist(), times.end.tolist()) == ([[72]], [[90]])


TWO_STREAMS: dict[str, tuple[Callable[[Trace], Trace], str, list[object]]] = {
    "a step begins with its own earliest kernel": (
        lambda trace: trace.steps(0, 10).launch(2, 20, 50).launch(12, 120, 150)
        .launch(3, 50, 60, stream=OTHER_STREAM).launch(13, 150, 160, stream=OTHER_STREAM),
        "steps.start", [20],
    ),
    "it begins on the stream that computes most": (
        lambda trace: trace.steps(0, 10).launch(1, 10, 15, stream=OTHER_STREAM).launch(2, 20, 30).launch(11, 120, 130),
        "steps.start", [20],
    ),
    "the last one ends with its kernels where nothing is launched after it": (
        lambda trace: trace.steps(0, 10).launch(1, 20, 70).launch(2, 20, 40, stream=OTHER_STREAM),
        "steps.end", [70],
    ),
    "a bucket is ready when both have computed": (
        lambda trace: trace.steps(0, 50).launch(1, 50, 70, stream=OTHER_STREAM).launch(2, 10, 60)
        .moment(5, bucket("ready", 0, of=1)).launch(51, 110, 120),
        "times.ready", [[70]],
    ),
}  # fmt: skip


@BOTH_RECORDERS
@pytest.mark.parametrize("which", TWO_STREAMS)
def test_on_a_gpu_with_two_compute_streams(tmp_path: Path, which: str, recorder: type[Trace]) -> None:
    build, what, expected = TWO_STREAMS[which]
    assert attrgetter(what)(seen(tmp_path, build(recorder()))).tolist() == expected


def test_what_powersgd_sends_in_its_last_tick_is_no_buckets(tmp_path: Path) -> None:
    trace = ChromeTrace().steps(0, 100).moment(0, bucket("ready", 0)).moment(10, bucket("ready", 1))
    for tick in range(3):  # of two buckets
        trace.range(10 * tick + 1, 10 * tick + 2, f"fastddp.collective tick={tick} bytes=64 wire=float32", LAUNCHER)
        trace.gloo(10 * tick + 1.5, 10 * tick + 2, 10 * tick + 8, None)
    found = seen(tmp_path, trace)
    assert found.times.exposed.tolist() == [[6, 6]]
    assert found.splits[0].exposed == 18


# ------------------------------------------------------------------------------------- against counting milliseconds

LENGTH = 40
SPANS = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)
TRAVELS = st.tuples(st.sampled_from([None, 0, 1]), SPANS)  # of a bucket, if it is one's


@given(
    st.lists(SPANS, max_size=8),
    st.lists(TRAVELS, max_size=6, unique_by=lambda travel: travel[1][0]),
    st.sets(st.integers(0, LENGTH), min_size=2, max_size=5).map(sorted),
)
def test_parts_are_those_that_counting_milliseconds_finds(
    tmp_path_factory: pytest.TempPathFactory, computes: list, travels: list, moments: list[int]
) -> None:
    trace = ChromeTrace(base_ms=0).steps(*moments)
    for thread, (start, stop) in enumerate(computes, start=100):
        trace.operator(start, stop, thread=thread)
    for index, (start, stop) in travels:
        trace.gloo(start, start, stop, index)
    found = seen(tmp_path_factory.getbasetemp(), trace)
    for step, (begin, end) in enumerate(itertools.pairwise(moments)):
        parts: Counter[tuple[bool, bool]] = Counter()
        exposed = [0.0, 0.0]
        for cell in range(begin, end):
            computing = any(start <= cell < stop for start, stop in computes)
            on_the_wire = {index for index, (start, stop) in travels if start <= cell < stop}
            parts[computing, bool(on_the_wire)] += 1
            for index in on_the_wire - {None} if not computing else ():
                exposed[index] += 1 / len(on_the_wire)
        split = Split(parts[True, False], parts[True, True], parts[False, True], parts[False, False])
        assert found.splits[step] == split
        known = found.times.exposed[step].tolist()
        assert known + [0.0] * (2 - len(known)) == pytest.approx(exposed)
