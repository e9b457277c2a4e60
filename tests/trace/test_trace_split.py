"""Where the time of a step goes: the five parts, and what of it each bucket accounts for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fastddp.times.split import Split
from fastddp.tools.trace.ranks import RankView, view
from fastddp.tools.trace.recording import KINDS, Builder
from trace_files import BOTH_RECORDERS, GLOO, LAUNCHER, OTHER_STREAM, ChromeTrace, Trace, bucket, gradient, seen

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


def test_a_gradient_that_comes_twice_in_a_window_counts_when_it_comes_last(tmp_path: Path) -> None:
    trace = ChromeTrace().steps(0, 100).gloo(41, 42, 50, 0)
    for time, parameter in [(10, "weight"), (20, "bias"), (30, "scale"), (40, "weight")]:
        trace.moment(time, gradient(parameter, 0))
    trace.moment(40, bucket("ready", 0, of=1))
    times = seen(tmp_path, trace).times
    assert (times.last_parameter.tolist(), times.half.tolist()) == ([["weight"]], [[30]])


TWO_STREAMS: dict[str, tuple[Callable[[Trace], Trace], Callable[[RankView], np.ndarray], list[object]]] = {
    "a step begins with its own earliest kernel": (
        lambda trace: trace.steps(0, 10).launch(2, 20, 50).launch(12, 120, 150)
        .launch(3, 50, 60, stream=OTHER_STREAM).launch(13, 150, 160, stream=OTHER_STREAM),
        lambda found: found.steps.start,
        [20],
    ),
    "it begins on the stream that computes most": (
        lambda trace: trace.steps(0, 10).launch(1, 10, 15, stream=OTHER_STREAM).launch(2, 20, 30).launch(11, 120, 130),
        lambda found: found.steps.start,
        [20],
    ),
    "the last one ends with its kernels where nothing is launched after it": (
        lambda trace: trace.steps(0, 10).launch(1, 20, 70).launch(2, 20, 40, stream=OTHER_STREAM),
        lambda found: found.steps.end,
        [70],
    ),
    "a bucket is ready when both have computed": (
        lambda trace: trace.steps(0, 50).launch(1, 50, 70, stream=OTHER_STREAM).launch(2, 10, 60)
        .moment(5, bucket("ready", 0, of=1)).launch(51, 110, 120),
        lambda found: found.times.ready,
        [[70]],
    ),
}  # fmt: skip


@BOTH_RECORDERS
@pytest.mark.parametrize("which", TWO_STREAMS)
def test_on_a_gpu_with_two_compute_streams(tmp_path: Path, which: str, recorder: type[Trace]) -> None:
    build, read, expected = TWO_STREAMS[which]
    assert read(seen(tmp_path, build(recorder()))).tolist() == expected


def test_what_powersgd_sends_in_its_last_tick_is_no_buckets(tmp_path: Path) -> None:
    trace = ChromeTrace().steps(0, 100).moment(0, bucket("ready", 0)).moment(10, bucket("ready", 1))
    for tick in range(3):  # of two buckets
        trace.range(10 * tick + 1, 10 * tick + 2, f"fastddp.collective tick={tick} bytes=64 wire=float32", LAUNCHER)
        trace.gloo(10 * tick + 1.5, 10 * tick + 2, 10 * tick + 8, None)
    found = seen(tmp_path, trace)
    assert found.times.exposed.tolist() == [[6, 6]]
    assert found.splits[0].exposed == 18


@BOTH_RECORDERS
def test_kernels_of_pack_and_unpack_are_drawn_as_that(tmp_path: Path, recorder: type[Trace]) -> None:
    trace = recorder().steps(0, 100).range(10, 12, bucket("pack", 1)).range(30, 32, bucket("unpack", 1))
    trace.launch(11, 15, 18, "pack_kernel").nccl(21, 20, 30, 1, of=2).launch(31, 30, 35, "unpack_kernel")
    activities = seen(tmp_path, trace).recording.activities
    on_device = np.flatnonzero(np.isfinite(activities.launched))
    kinds = activities.kind[on_device[np.argsort(activities.start[on_device])]]
    assert [KINDS[kind] for kind in kinds] == ["pack", "collective", "unpack"]


# ------------------------------------------------------------------------------------- against counting milliseconds

LENGTH = 40
spans = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)
operators = st.lists(spans, max_size=8)
travelling = st.lists(st.tuples(st.integers(-1, 2), spans), max_size=6)
boundaries = st.sets(st.integers(0, LENGTH), min_size=2, max_size=5).map(sorted)


def built(computes: list, travels: list, moments: list[int]) -> RankView:
    builder = Builder()
    for number, (start, end) in enumerate(computes):
        builder.add_operator(builder.lane(number, "a thread each"), start, end, "aten::mm")
    for number, (index, (start, end)) in enumerate(travels):
        launcher = builder.lane(("launcher", number), "launcher")
        if index >= 0:
            builder.add_range(launcher, start, start + 0.5, bucket("collective", index, of=3))
        builder.add_launch(number, launcher, start)
        builder.add("collective", builder.lane(("gloo", number), "gloo"), start, end, "gloo:all_reduce", number)
    for moment in moments:
        builder.add_range(builder.lane("host", "host"), moment, moment, "fastddp.step")
    return view(0, builder.finish("synthetic", "torch.profiler"))


def counted(computes: list, travels: list, begin: int, end: int) -> tuple[Split, list[float]]:
    parts = {(True, False): 0, (True, True): 0, (False, True): 0, (False, False): 0}
    exposed = [0.0, 0.0, 0.0]
    for cell in range(begin, end):
        computing = any(start <= cell < stop for start, stop in computes)
        on_the_wire = {index for index, (start, stop) in travels if start <= cell < stop}
        parts[computing, bool(on_the_wire)] += 1
        for index in on_the_wire - {-1} if not computing else ():
            exposed[index] += 1 / len(on_the_wire)
    return Split(parts[True, False], parts[True, True], parts[False, True], parts[False, False]), exposed


@given(operators, travelling, boundaries)
def test_parts_are_those_that_counting_milliseconds_finds(computes: list, travels: list, moments: list[int]) -> None:
    found = built(computes, travels, moments)
    pairs = list(itertools.pairwise(moments))
    assert len(found.splits) == len(pairs)
    for step, (begin, end) in enumerate(pairs):
        split, exposed = counted(computes, travels, begin, end)
        assert found.splits[step] == pytest.approx(split)
        known = found.times.exposed[step].tolist()
        assert known + [0.0] * (3 - len(known)) == pytest.approx(exposed)
