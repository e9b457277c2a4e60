"""Ranks of a run: which is which, how their clocks go, who waits for whom; and what would make a step shorter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastddp.times.split import Split
from fastddp.tools.trace.advice import advise
from fastddp.tools.trace.collectives import bus_bytes, is_collective_kernel, operation_of, wire_of
from fastddp.tools.trace.grids import collective_grid
from fastddp.tools.trace.names import GATHER, STATUS
from fastddp.tools.trace.reading import read_reports
from fastddp.tools.trace.report import Idle
from fastddp.tools.trace.stragglers import describe_stragglers
from fastddp.tools.trace.wording import headline
from trace_files import FORWARD, LAUNCHER, NCCL, ChromeTrace, NsightExport, Trace, bucket, gradient, report


def rank_trace(
    rank: int, late: float = 0.0, clock: float = 0.0, host: str = "machine", steps: int = 4, first: int = 0
) -> ChromeTrace:
    """Steps of 100 ms: two buckets, the second ready at 50 + late; its collective ends at 90 on all ranks."""
    trace = ChromeTrace(rank, world_size=2, host=host, base_ms=5e6 + clock)
    for step in range(first, first + steps + 1):
        t = 100.0 * step
        trace.steps(t).operator(t, t + 50 + late)
        trace.moment(t + 10, gradient("layer0.weight", 0)).moment(t + 20, gradient("layer0.bias", 0))
        trace.moment(t + 20, bucket("ready", 0)).gloo(t + 21, t + 22, t + 32, 0)
        trace.moment(t + 30, gradient("layer1.weight", 1)).moment(t + 50 + late, gradient("layer1.bias", 1))
        trace.moment(t + 50 + late, bucket("ready", 1)).gloo(t + 51 + late, t + 51 + late, t + 90, 1)
    return trace


def test_a_bucket_has_what_its_names_and_collectives_say(tmp_path: Path) -> None:
    found = report(tmp_path, rank_trace(0))
    first, second = found.buckets
    assert (first.first, first.last, first.bytes, first.wire) == ("layer0.bias", "layer0.weight", 4 << 20, "float32")
    assert (first.ready, first.delay, first.start, first.duration, first.exposed) == pytest.approx((20, 2, 22, 10, 0))
    assert first.bus_gb_per_s == pytest.approx((4 << 20) / 10e-3 / 1e9)  # 2 (n - 1) / n is 1 of two ranks
    assert (second.ready, second.delay, second.start, second.duration) == pytest.approx((50, 1, 51, 39))
    assert (second.exposed, second.last_rank, second.last_parameter) == (pytest.approx(39), 0, "layer1.bias")
    assert found.split.step == pytest.approx(100)
    assert found.ranks[0].waits_ms is None
    assert "1 of 2 ranks are here: what the others did is not known." in found.notes


def test_a_bucket_travels_from_its_first_collective_to_the_end_of_all_in_the_median_step(tmp_path: Path) -> None:
    """It sends twice, at once: 20 to 60 and 30 to 40. Its four gradients come at 1, 4, 9 and 16."""
    trace = ChromeTrace(0, world_size=2).steps(0, 100, 400, 510)
    for t in (0.0, 100.0, 400.0):
        trace.operator(t, t + 19).moment(t + 25, bucket("ready", 0, of=1))
        for moment in (1, 4, 9, 16):
            trace.moment(t + moment, gradient(f"weight{moment}", 0))
        trace.gloo(t + 19, t + 20, t + 60, 0).gloo(t + 29, t + 30, t + 40, 0)
    found = report(tmp_path, trace)
    (only,) = found.buckets
    assert (only.start, only.duration) == pytest.approx((20, 40))
    assert only.delay == 0  # it starts before it is known to be ready, which is not early
    assert "its first half would start 21.00 ms earlier" in found.advice[0]  # from 4, the middle gradient, to 25
    assert found.timelines[0].length == pytest.approx(110)


def test_the_timeline_is_that_of_the_median_step_from_its_start(tmp_path: Path) -> None:
    """An operator is where it computes: neither where a collective is launched in it, nor where it waits."""
    trace = rank_trace(0)
    for t in (0.0, 100.0, 200.0, 300.0, 400.0):
        trace.range(t + 12, t + 15, bucket("collective", 0)).range(t + 40, t + 44, bucket("wait", 0))
    found = report(tmp_path, trace)
    (timeline,) = found.timelines
    assert (timeline.length, timeline.lanes) == (pytest.approx(100), ("thread 1", "thread 9"))
    drawn = [(one.what, one.start, one.end, one.name, one.bucket) for one in timeline.intervals]
    assert [one for one in drawn if one[0] == "collective"] == [
        ("collective", 22, 32, "gloo:all_reduce", 0),
        ("collective", 51, 90, "gloo:all_reduce", 1),
    ]
    computes = [(0, 12), (15, 40), (44, 50)]
    assert [one for one in drawn if one[0] == "compute"] == [("compute", *span, "aten::mm", None) for span in computes]
    assert found.split.compute + found.split.overlapped == pytest.approx(sum(end - start for start, end in computes))


# ------------------------------------------------------------------------------------------------- who waits for whom


def test_a_collective_begins_when_the_last_rank_joins_and_the_others_wait(tmp_path: Path) -> None:
    found = report(tmp_path, rank_trace(0), rank_trace(1, late=8))
    second = found.buckets[1]
    assert (second.ready, second.delay, second.start, second.duration) == pytest.approx((58, 1, 59, 31))
    assert (second.last_rank, second.last_parameter) == (1, "layer1.bias")
    (sentence,) = found.stragglers
    assert "Rank 1 is the last to join collectives in 4 of 4 steps" in sentence
    assert "8.00 ms" in sentence
    # Who is last by little, or by chance, is no straggler.
    assert report(tmp_path, rank_trace(0), rank_trace(1, late=0.1)).stragglers == ()
    assert describe_stragglers([0, 1], np.array([[0.0, 9.0, 0.0, 9.0], [9.0, 0.0, 9.0, 0.0]]), 100.0) == ()


@pytest.mark.parametrize("late", [0, 1])
def test_times_of_buckets_count_from_where_the_first_rank_begins_its_step(tmp_path: Path, late: int) -> None:
    traces = [rank_trace(0), rank_trace(1)]
    for event in traces[late].events:
        if event["name"] == "fastddp.step":
            event["ts"] += 5_000
    first, second = report(tmp_path, *traces).buckets
    assert (first.ready, first.start, second.ready, second.start) == pytest.approx((20, 22, 50, 51))


def damaged(trace: ChromeTrace) -> ChromeTrace:
    """One end was recorded late, and one not at all."""
    ends = [event for event in trace.events if event["name"] == "gloo:all_reduce"]
    ends[3]["dur"] += 3_000
    trace.events.remove(ends[7])
    return trace


def about(trace: ChromeTrace, kind: str, group: str, ranks: tuple[int, ...], **more: object) -> None:
    named = {"Collective_name": kind, "Process_Group_Name": group, "Process_Group_Ranks": str(list(ranks))}
    trace.noting(**named, Group_size=len(ranks), In_msg_nelems=1000, dtype="Float", **more)


def recommender(rank: int) -> ChromeTrace:
    """Three ranks: an all-to-all that ends at 40, and a bucket's allreduce that ends at 90; ranks 2 and 1 are late."""
    trace = ChromeTrace(rank, world_size=3)
    for step in range(5):
        t = 100.0 * step
        trace.steps(t).launch(t, t, t + 1)
        trace.nccl(t + 1, t + (35 if rank == 2 else 10), t + 40, name="ncclDevKernel_SendRecv")
        about(trace, "all_to_allv", "0", (0, 1, 2))
        trace.nccl(t + 3, t + (85 if rank == 1 else 80), t + 90, 0)
        about(trace, "allreduce", "0", (0, 1, 2))
    return trace


def in_groups(rank: int, numbered: bool = True, clock: int = 0) -> ChromeTrace:
    """Ranks 0 and 1 are a group, 2 and 3 another; rank 1 and 3 are 10 and 20 ms late. Rank 0 lacks a collective."""
    group, ranks = ("a", (0, 1)) if rank < 2 else ("b", (2, 3))
    late = (0, 10, 0, 20)[rank]
    host = f"machine {rank}" if clock else "machine"
    trace = ChromeTrace(rank, world_size=4, host=host, base_ms=5e6 + clock * rank)
    for step in range(4):
        t = 100.0 * step
        trace.steps(t).launch(t, t, t + 1)
        for number in range(rank == 0, 2):
            start, end = t + 10 + 40 * number + late, t + 45 + 40 * number
            trace.nccl(t + 1 + number, start, end, name="ncclDevKernel_Generic")
            about(trace, "_reduce_scatter_base", group, ranks, **({"Seq": 2 * step + number} if numbered else {}))
    return trace


ALIGNED = "aligned by the ends of collectives"
FAR = {"clock": 70_000.0, "host": "other"}
WAITS: dict[str, tuple[list[ChromeTrace], list[float], str]] = {
    "one is late": ([rank_trace(0), rank_trace(1, late=8)], [8, 0], ""),
    "a wait behind compute is none": ([rank_trace(0), rank_trace(1, clock=3.0)], [3, 0], ""),  # 3 ms more are hidden
    "machines' clocks are aligned": ([rank_trace(0), rank_trace(1, late=8, **FAR)], [8, 0], ALIGNED),
    "... by what most collectives say": ([rank_trace(0), damaged(rank_trace(1, late=8, **FAR))], [8, 0], ALIGNED),
    "they began at different steps": ([rank_trace(0, steps=6), rank_trace(1, 8, steps=3, first=2)], [8, 0], "over 3"),
    "all collectives count": ([recommender(rank) for rank in range(3)], [30, 25, 5], ""),
    "groups and numbers match them": ([in_groups(rank) for rank in range(4)], [10, 0, 40, 0], ""),
    "ranks of a group count differently": ([in_groups(rank, numbered=False) for rank in range(4)], [0, 0, 40, 0], ""),
    "a group shares no rank with the first": ([in_groups(rank, clock=7) for rank in range(4)], [10, 0, 40, 0], ALIGNED),
}


@pytest.mark.parametrize("which", WAITS)
def test_ranks_wait_for_each_other_where(tmp_path: Path, which: str) -> None:
    traces, waits, note = WAITS[which]
    found = report(tmp_path, *traces)
    assert [rank.rank for rank in found.ranks] == list(range(len(waits)))
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx(waits)
    assert any(note in one for one in found.notes) or not note
    assert any("clock" in one for one in found.notes) == (note == ALIGNED)


# ------------------------------------------------------------------------------------------------ collectives by kind


def test_a_table_has_all_collectives_by_kind(tmp_path: Path) -> None:
    found = report(tmp_path, *(recommender(rank) for rank in range(3)))
    exchange, gradients = found.collectives
    assert (exchange.kind, exchange.of_buckets, exchange.count, exchange.bytes) == ("all_to_all", False, 1, 4000)
    assert (exchange.total, exchange.median) == pytest.approx((65 / 3, 30))
    assert exchange.bus_gb_per_s == pytest.approx(4000 * 2 / 3 / 5e-3 / 1e9)  # 5 ms: since the last rank had joined
    assert (gradients.kind, gradients.of_buckets, gradients.count) == ("all_reduce", True, 1)
    assert (gradients.total, gradients.exposed) == pytest.approx((25 / 3, 25 / 3))
    assert exchange.exposed + gradients.exposed == pytest.approx(found.split.exposed)
    assert collective_grid(found).cells(collective_grid(found).rows[1])[:3] == ["all_reduce of buckets", "1", "8.33"]
    assert headline(found).endswith("all_to_all of no bucket: 21.7 ms.")
    assert any("no bucket: all_to_all 21.67 ms" in sentence for sentence in found.advice)
    assert found.stragglers[0].startswith("Rank 2 is the last to join collectives in 4 of 4 steps")


@pytest.mark.parametrize(
    ("name", "operation", "wire"),
    [
        (NCCL, "all_reduce", "float32"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce", "float32"),
        ("void ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)", "reduce_scatter", "float16"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32", "all_reduce", "float32"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send/recv", None),
        ("ncclKernel_Generic", "other", None),
        ("mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)", "other", "bfloat16"),
    ],
)
def test_kernels_of_nccl_and_rccl_are_known_by_their_names(name: str, operation: str, wire: str | None) -> None:
    assert is_collective_kernel(name)
    assert (operation_of(name), wire_of(name)) == (operation, wire)
    sent = {"all_reduce": 150, "all_gather": 300, "reduce_scatter": 75, "all_to_all": 75, "broadcast": 100}
    assert {operation: bus_bytes(operation, 100, 4) for operation in sent} == sent


# ------------------------------------------------------------------------------------------------ which rank is which


def steps_on_a_gpu(trace: Trace, late: float = 0.0, buckets: int = 1) -> Trace:
    """Two steps of 100 ms; collectives of 20 ms begin at 50 + late, 70 + late, ..."""
    for t in (0.0, 100.0, 200.0):
        trace.steps(t).launch(t, t, t + 40)
        for index in range(buckets):
            trace.nccl(t + 5 + index, t + 50 + late + 20 * index, t + 70 + 20 * index, index, of=buckets)
    return trace


ORDERS = {
    "their names say": ("rank10 run_rank-2 RANK_0", {0: "RANK_0", 2: "run_rank-2", 10: "rank10"}),
    "they are counted by the numbers in their names": ("n2 n10 n9", {0: "n2", 1: "n9", 2: "n10"}),
    "... if one has none": ("rank2 rank10 other", {0: "other", 1: "rank2", 2: "rank10"}),
    "... if two have the same": ("a_rank2 b_rank2 c_rank2", {0: "a_rank2", 1: "b_rank2", 2: "c_rank2"}),
}


@pytest.mark.parametrize("which", ORDERS)
def test_recordings_that_say_no_rank_are_of_that_which(tmp_path: Path, which: str) -> None:
    names, expected = ORDERS[which]
    for place, name in enumerate(names.split()):
        steps_on_a_gpu(NsightExport(process=100 + place), late=float(place)).write(tmp_path / f"{name}.sqlite")
    (found,) = read_reports([tmp_path])
    assert {rank.rank: Path(rank.source).stem for rank in found.ranks} == expected
    taken = "from the names of files" if 10 in expected else "in the order of files and processes"
    assert any(taken in note for note in found.notes)


def test_a_process_that_only_used_the_gpu_is_no_rank(tmp_path: Path) -> None:
    trace = NsightExport(process=99).launch(None, 10, 11)
    for process in (100, 101):
        trace.process = process
        steps_on_a_gpu(trace)
    found = report(tmp_path, trace)
    assert [len(rank.step_ms) for rank in found.ranks] == [2, 2]
    assert [(one.start, one.duration) for one in found.buckets] == [(50, 20)]
    assert any("0.sqlite: 1 recording without steps and collectives" in note for note in found.notes)
    assert not any("clocks" in note for note in found.notes)  # of processes of one file


def test_a_rank_that_recorded_fewer_buckets_takes_none_from_the_others(tmp_path: Path) -> None:
    traces = [steps_on_a_gpu(ChromeTrace(rank, world_size=2), buckets=rank + 1) for rank in range(2)]
    found = report(tmp_path, *traces)
    assert [(one.bucket, one.start, one.duration) for one in found.buckets] == [(0, 50, 20), (1, 70, 20)]
    assert [one.exposed for one in found.buckets] == pytest.approx([20, 20])
    assert [one.mean_exposed for one in found.buckets] == pytest.approx([20, 10])
    assert found.split.exposed == pytest.approx(30)


def without_names(*buckets: tuple[float, float, float], name: str = NCCL, **noted: object) -> ChromeTrace:
    """Torch's DDP. Of each bucket: the end of what was launched before it, and start and end of its kernel."""
    trace = ChromeTrace(0, world_size=2)
    for t in (0.0, 100.0, 200.0, 300.0):
        trace.range(t, t + 1, FORWARD)
        before = 0.0
        for index, (computed, start, end) in enumerate(buckets):
            trace.launch(t + index, t + before, t + computed)
            trace.nccl(t + index + 0.5, t + start, t + end, name=name).noting(**noted)
            before = computed
    return trace


def of_no_bucket(launched_in: str) -> ChromeTrace:
    trace = rank_trace(0)
    for t in (0.0, 100.0, 200.0, 300.0, 400.0):
        trace.range(t + 89.75, t + 90.25, launched_in, LAUNCHER).gloo(t + 90, t + 90, t + 95, None)
    return trace


HIDDEN = rank_trace(0).operator(0, 600, thread=4)
TORCHS = without_names((30, 30, 35), (70, 70, 90))
FIRST_OF_TORCH = ChromeTrace(0, 2).range(0, 1, FORWARD).range(100, 101, FORWARD).gloo(40, 41, 51, None)
TRACES: dict[str, tuple[list[ChromeTrace], str]] = {
    "what is hidden needs none": ([HIDDEN], "hidden: of 49.00 ms a step, 0.00 ms are exposed"),
    "a run that sends nothing": ([ChromeTrace().operator(0, 30)], "No communication was recorded"),
    # Half of its gradients came at 30, the others at 50.
    "a smaller cap": (
        [rank_trace(0)],
        '2 MiB (bucket_cap_mb; under "auto", a plan of your own: buckets=) its first half would start 20.00 ms earlier',
    ),
    # Under torch they come evenly since the launch before, and torch's first bucket has none before it.
    "half the cap of torch": ([TORCHS], "half its cap (bucket_cap_mb) its first half would start 20.00 ms earlier"),
    "torch's first bucket": ([FIRST_OF_TORCH], "Bucket 0 is exposed 10.00 ms, and the trace does not say when"),
    "where ranks wait for one": ([rank_trace(0), rank_trace(1, late=30)], "15.00 ms are waits for the last rank"),
    "what is exposed of no bucket": ([of_no_bucket("another's")], "belong to no bucket: all_reduce 5.00 ms (sparse"),
    "the status of a step": ([of_no_bucket(STATUS)], "no bucket: fastddp.status 5.00 ms (fastddp.status ends each"),
    "parameters": ([of_no_bucket(f"{GATHER} bucket=1")], "no bucket: fastddp.gather 5.00 ms (fastddp.gather brings"),
}
ALONE = ("what is hidden needs none", "a run that sends nothing")
FIRST = (*ALONE, "where ranks wait for one", "half the cap of torch")


@pytest.mark.parametrize("which", TRACES)
def test_advice(tmp_path: Path, which: str) -> None:
    traces, words = TRACES[which]
    found = report(tmp_path, *traces).advice
    places = [place for place, sentence in enumerate(found) if words in sentence]
    assert len(places) == 1
    assert places == [0] or which not in FIRST
    assert len(found) == 1 or which not in ALONE
    assert any("no bucket" in sentence for sentence in found) == ("no bucket" in words)


# -------------------------------------------------------------------------------------------------------------- idle


def test_idle_time_is_divided_by_what_the_device_waits_for(tmp_path: Path) -> None:
    """Of 100 ms: 20 compute; up to 30 the batch is loaded, up to 50 nothing is launched, up to 60 it does not start."""
    trace = ChromeTrace()
    for t in (0.0, 100.0, 200.0, 300.0):
        trace.steps(t).launch(t, t, t + 10).launch(t + 50, t + 60, t + 70)
        trace.range(t + 5, t + 30, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    found = report(tmp_path, trace)
    assert found.split.idle == pytest.approx(80)
    assert found.idle == Idle(on_device=True, host=pytest.approx(50), data=20, launched=10, unknown=0)
    parts = ["idle 80 %", "50.00 ms for the host", "20.00 ms for the next batch", "10.00 ms between", "larger batches"]
    places = [found.advice[-1].index(part) for part in parts]  # raises where one lacks
    assert places == sorted(places)


def test_on_the_cpu_idle_time_is_what_is_no_operator(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for t in (0.0, 100.0, 200.0):
        trace.steps(t).operator(t, t + 30)
        trace.range(t + 40, t + 90, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    found = report(tmp_path, trace)
    assert found.idle == Idle(on_device=False, host=20, data=50, launched=0, unknown=0)
    assert "CPU is idle 70 % of a step: 50.00 ms for the next batch, 20.00 ms outside operators" in found.advice[-1]


def test_idle_time_of_which_no_launch_is_known_is_said_and_below_a_fifth_of_a_step_none(tmp_path: Path) -> None:
    found = report(tmp_path, ChromeTrace().launch(None, 0, 10).launch(None, 60, 100))
    assert found.idle == Idle(True, 0, 0, 0, pytest.approx(50))
    assert "50.00 ms for what the trace does not tell" in found.advice[-1]
    assert len(advise(Split(81, 0, 0, 19), [], {}, idle=found.idle)) == 1
    assert len(advise(Split(79, 0, 0, 21), [], {}, idle=found.idle)) == 2
