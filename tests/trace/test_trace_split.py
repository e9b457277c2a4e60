"""Where the time of a step goes: the four parts, and what of it each bucket accounts for."""

from __future__ import annotations

import itertools
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fastddp.trace import chrome
from fastddp.trace.ranks import RankView, view
from fastddp.trace.recording import Builder
from fastddp.trace.report import Split
from trace_files import BACKWARD, LAUNCHER, NCCL, NCCL_STREAM, STREAM, ChromeTrace, bucket, gradient


def steps_at(trace: ChromeTrace, *moments: float) -> None:
    for moment in moments:
        trace.moment(moment, "fastddp.step")


def seen(trace: ChromeTrace, folder: Path) -> RankView:
    return view(0, chrome.read(trace.write(folder / "trace.json")))


def test_compute_and_a_collective_that_overlap_by_half(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    trace.operator(10, 50)
    trace.gloo(29, 30, 70, 0)
    assert seen(trace, tmp_path).splits == [Split(compute=20, overlapped=20, exposed=20, idle=40)]


def test_operators_inside_operators_and_on_other_threads_count_once(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    trace.operator(10, 50, "aten::linear")
    trace.operator(20, 30, "aten::addmm")
    trace.operator(40, 60, thread=BACKWARD)
    found = seen(trace, tmp_path)
    assert found.splits == [Split(compute=50, overlapped=0, exposed=0, idle=50)]
    assert sorted(found.recording.activities.start.tolist()) == [10, 40]


def test_packing_is_compute_and_waiting_is_not(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    trace.range(10, 30, bucket("pack", 0))
    trace.operator(40, 80, "autograd::engine::evaluate_function: AddmmBackward0")
    trace.range(50, 60, bucket("wait", 0))
    trace.range(90, 95, bucket("wait", 1))
    trace.gloo(49, 50, 60, 0)
    assert seen(trace, tmp_path).splits == [Split(compute=50, overlapped=0, exposed=10, idle=40)]


def test_what_a_thread_of_gloos_does_inside_a_collective_is_no_compute(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    trace.gloo(9, 10, 50, 0)
    trace.operator(20, 30, "aten::copy_", thread=9)
    assert seen(trace, tmp_path).splits == [Split(compute=0, overlapped=0, exposed=40, idle=60)]


def test_a_collective_that_lies_across_the_end_of_a_step_counts_in_both(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 50, 100)
    trace.gloo(39, 40, 70, 0)
    assert [split.exposed for split in seen(trace, tmp_path).splits] == [10, 20]


def test_exposed_time_is_divided_among_the_buckets_that_travel(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    trace.operator(0, 20)
    trace.gloo(9, 10, 50, 0)  # 10 hidden, 20 alone, 10 shared with bucket 1
    trace.gloo(39, 40, 60, 1)  # 10 alone
    found = seen(trace, tmp_path)
    assert found.times.exposed.tolist() == [[25, 15]]
    assert found.splits[0].exposed == 40


def test_on_a_gpu_only_kernels_compute_and_copies_are_shown_apart(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    trace.operator(0, 90)
    for correlation, time in enumerate([1, 2, 3, 101]):
        trace.call(time, correlation)
    trace.copy(10, 20, 0)
    trace.kernel(20, 60, 1)
    trace.kernel(50, 80, 2, NCCL, NCCL_STREAM)
    trace.kernel(110, 120, 3)
    assert seen(trace, tmp_path).splits == [Split(compute=30, overlapped=10, exposed=20, idle=30, copy=10)]


def test_a_copy_hides_no_communication_and_is_none_where_something_is_computed(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    for correlation, time in enumerate([1, 2, 3, 101]):
        trace.call(time, correlation)
    trace.kernel(10, 40, 1)
    trace.copy(30, 60, 0)  # 10 with compute, 10 alone, 10 with the collective
    trace.kernel(50, 80, 2, NCCL, NCCL_STREAM)
    trace.kernel(110, 120, 3)
    assert seen(trace, tmp_path).splits == [Split(compute=30, overlapped=0, exposed=30, idle=30, copy=10)]


def test_on_a_gpu_a_step_is_what_the_host_launched_in_it(tmp_path: Path) -> None:
    """The host is two steps ahead of the device."""
    trace = ChromeTrace()
    steps_at(trace, 0, 10, 20)
    for step in range(3):
        trace.call(10 * step + 1, step)
        trace.kernel(100 * (step + 1), 100 * (step + 1) + 70, step)
    found = seen(trace, tmp_path)
    assert found.steps.start.tolist() == [100, 200]
    assert found.splits == [Split(compute=70, overlapped=0, exposed=0, idle=30)] * 2


def test_on_a_gpu_a_bucket_is_ready_when_the_device_has_computed_its_last_gradient(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 50)
    trace.call(1, 1)  # forward
    trace.call(2, 2)  # backward of the first gradient
    trace.moment(3, gradient("layer0.weight", 0))
    trace.call(4, 3)  # backward of the second
    trace.moment(5, gradient("layer0.bias", 0))
    trace.moment(5, bucket("ready", 0, of=1))
    trace.range(6, 8, bucket("collective", 0, of=1))
    trace.call(7, 4)
    trace.call(51, 5)
    for start, end, correlation in [(10, 20, 1), (20, 40, 2), (40, 70, 3), (110, 120, 5)]:
        trace.kernel(start, end, correlation)
    trace.kernel(72, 90, 4, NCCL, NCCL_STREAM)
    times = seen(trace, tmp_path).times
    assert times.ready.tolist() == [[70]]
    assert times.half.tolist() == [[40]]
    assert times.last_parameter.tolist() == [["layer0.bias"]]
    assert (times.start.tolist(), times.end.tolist()) == ([[72]], [[90]])


def test_on_a_gpu_with_two_compute_streams_a_step_begins_with_its_own_earliest_kernel(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 10, 20)
    for step in range(3):
        trace.call(10 * step + 2, step)
        trace.kernel(100 * step + 20, 100 * step + 50, step)
    for step in range(3):
        trace.call(10 * step + 3, 3 + step)
        trace.kernel(100 * step + 50, 100 * step + 60, 3 + step, stream=STREAM + 1)
    assert seen(trace, tmp_path).steps.start.tolist() == [20, 120]


def test_on_a_gpu_a_step_begins_on_the_stream_that_computes_most(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 10)
    trace.call(1, 1)
    trace.call(2, 2)
    trace.call(11, 3)
    trace.kernel(10, 15, 1, stream=STREAM + 1)
    trace.kernel(20, 30, 2)
    trace.kernel(120, 130, 3)
    assert seen(trace, tmp_path).steps.start.tolist() == [20]


def test_on_a_gpu_the_last_step_ends_with_its_kernels_where_nothing_is_launched_after_it(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 10)
    trace.call(1, 1)
    trace.call(2, 2)
    trace.kernel(20, 70, 1)
    trace.kernel(20, 40, 2, stream=STREAM + 1)
    assert seen(trace, tmp_path).steps.end.tolist() == [70]


def test_on_a_gpu_with_two_compute_streams_a_bucket_is_ready_when_both_have_computed(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 50)
    trace.call(1, 1)
    trace.call(2, 2)
    trace.kernel(10, 70, 1)
    trace.kernel(20, 40, 2, stream=STREAM + 1)
    trace.moment(5, bucket("ready", 0, of=1))
    trace.call(51, 3)
    trace.kernel(110, 120, 3)
    assert seen(trace, tmp_path).times.ready.tolist() == [[70]]


def test_a_gradient_that_comes_twice_in_a_window_counts_when_it_comes_last(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    for time, parameter in [(10, "weight"), (20, "bias"), (30, "scale"), (40, "weight")]:
        trace.moment(time, gradient(parameter, 0))
    trace.moment(40, bucket("ready", 0, of=1))
    trace.gloo(41, 42, 50, 0)
    times = seen(trace, tmp_path).times
    assert times.last_parameter.tolist() == [["weight"]]
    assert times.half.tolist() == [[30]]


def test_what_powersgd_sends_in_its_last_tick_is_no_buckets(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    for tick in range(3):  # of two buckets
        if tick < 2:
            trace.moment(10 * tick, bucket("ready", tick))
        trace.range(10 * tick + 1, 10 * tick + 2, f"fastddp.collective tick={tick} bytes=64 wire=float32", LAUNCHER)
        trace.gloo(10 * tick + 1.5, 10 * tick + 2, 10 * tick + 8, None)
    found = seen(trace, tmp_path)
    assert found.times.exposed.tolist() == [[6, 6]]
    assert found.splits[0].exposed == 18


def test_kernels_of_pack_and_unpack_are_drawn_as_that(tmp_path: Path) -> None:
    trace = ChromeTrace()
    steps_at(trace, 0, 100)
    for time, what in ((10, "pack"), (20, "collective"), (30, "unpack")):
        trace.range(time, time + 2, bucket(what, 1))
        trace.call(time + 1, time)
    trace.kernel(15, 18, 10, "pack_kernel")
    trace.kernel(20, 30, 20, NCCL, NCCL_STREAM)
    trace.kernel(30, 35, 30, "unpack_kernel")
    activities = seen(trace, tmp_path).recording.activities
    order = np.argsort(activities.start[np.isfinite(activities.launched)])
    kinds = activities.kind[np.isfinite(activities.launched)][order]
    from fastddp.trace.recording import KINDS

    assert [KINDS[kind] for kind in kinds] == ["pack", "collective", "unpack"]


# ------------------------------------------------------------------------------------- against counting milliseconds

LENGTH = 40
spans = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)
operators = st.lists(st.tuples(st.integers(0, 2), spans), max_size=8)
collectives = st.lists(st.tuples(st.integers(-1, 2), spans), max_size=6)
boundaries = st.sets(st.integers(0, LENGTH), min_size=2, max_size=5).map(sorted)


def built(computes: list, travels: list, moments: list[int]) -> RankView:
    builder = Builder()
    lanes = [builder.lane(i, f"thread {i}") for i in range(3)]
    for lane, (start, end) in computes:
        builder.add_operator(lanes[lane], start, end, "aten::mm")
    for number, (index, (start, end)) in enumerate(travels):
        launcher = builder.lane(("launcher", number), "launcher")
        if index >= 0:
            builder.add_range(launcher, start, start + 0.5, bucket("collective", index, of=3))
        builder.add_launch(number, launcher, start)
        builder.add("collective", builder.lane(("gloo", number), "gloo"), start, end, "gloo:all_reduce", number)
    for moment in moments:
        builder.add_range(lanes[0], moment, moment, "fastddp.step")
    return view(0, builder.finish("synthetic", "torch.profiler"))


def counted(computes: list, travels: list, begin: int, end: int) -> tuple[Split, list[float]]:
    parts = {(True, False): 0, (True, True): 0, (False, True): 0, (False, False): 0}
    exposed = [0.0, 0.0, 0.0]
    for cell in range(begin, end):
        computing = any(start <= cell < stop for _, (start, stop) in computes)
        travelling = {index for index, (start, stop) in travels if start <= cell < stop}
        parts[computing, bool(travelling)] += 1
        for index in travelling - {-1} if not computing else ():
            exposed[index] += 1 / len(travelling)
    return Split(parts[True, False], parts[True, True], parts[False, True], parts[False, False]), exposed


@given(operators, collectives, boundaries)
def test_parts_are_those_that_counting_milliseconds_finds(computes: list, travels: list, moments: list[int]) -> None:
    computes = [entry for entry in computes if not _is_within_another(entry, computes)]
    found = built(computes, travels, moments)
    pairs = list(itertools.pairwise(moments))
    assert len(found.splits) == len(pairs)
    for step, (begin, end) in enumerate(pairs):
        split, exposed = counted(computes, travels, begin, end)
        assert found.splits[step] == pytest.approx(split)
        assert found.splits[step].step == pytest.approx(end - begin)
        assert found.splits[step].communication == pytest.approx(split.overlapped + split.exposed)
        known = found.times.exposed[step].tolist()
        assert known + [0.0] * (3 - len(known)) == pytest.approx(exposed)


def _is_within_another(entry: tuple, entries: list) -> bool:
    """Whether operators of one thread would overlap without being nested, which threads do not do."""
    lane, (start, end) = entry
    return any(other is not entry and other[0] == lane and other[1][0] < start < other[1][1] < end for other in entries)
