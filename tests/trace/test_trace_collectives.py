"""Collectives of all kinds: whose step they are of, who waits for whom in them, and the table of their kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import trace_reports
from fastddp.trace import chrome
from fastddp.trace.analysis import analyse
from fastddp.trace.collectives import bus_bytes, is_collective_kernel, operation_of, wire_of
from fastddp.trace.comparison import compare
from fastddp.trace.grids import collective_grid
from fastddp.trace.report import CollectiveReport, Report
from fastddp.trace.wording import headline
from trace_files import NCCL, NCCL_STREAM, STREAM, ChromeTrace, bucket

COPY_STREAM = STREAM + 30


def report(folder: Path, *traces: ChromeTrace) -> Report:
    return analyse([chrome.read(trace.write(folder / f"{i}.json")) for i, trace in enumerate(traces)], "run")


# ------------------------------------------------------------------------------------------------------------ steps


def with_copies_ahead(steps: int = 4, buckets: int = 3) -> ChromeTrace:
    """Steps of 100 ms under torch's DDP. The host launches a step's work 90 ms ahead of the device.

    The batch of a step is copied on a stream of its own, which is free: while the step before still computes.
    """
    trace = ChromeTrace(0, world_size=2)
    for step in range(steps + 1):
        t = 100.0 * step
        trace.range(t, t + 5, "DistributedDataParallel.forward")
        trace.call(t, 100 * step)
        trace.event(
            "gpu_memcpy", "Memcpy HtoD", t + 10, t + 12, 1, device=0, stream=COPY_STREAM, correlation=100 * step
        )
        trace.call(t + 2, 100 * step + 1)
        trace.kernel(t + 90, t + 150, 100 * step + 1)
        for index in range(buckets):
            number = 100 * step + 10 + index
            trace.call(t + 20 + index, number)
            trace.kernel(t + 140 + 15 * index, t + 155 + 15 * index, number, NCCL, NCCL_STREAM)
    return trace


def test_a_copy_ahead_on_a_stream_of_its_own_begins_no_step(tmp_path: Path) -> None:
    found = report(tmp_path, with_copies_ahead())
    assert found.ranks[0].step_ms == pytest.approx((100,) * 4)
    assert [one.bucket for one in found.buckets] == [0, 1, 2]
    assert [one.start for one in found.buckets] == pytest.approx([50, 65, 80])


def test_a_collective_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    """The last bucket of each step begins when the next step has begun."""
    trace = with_copies_ahead()
    for event in trace.events:
        if event["cat"] == "kernel" and event["args"]["correlation"] % 100 == 12:
            event["ts"] += 40_000
    found = report(tmp_path, trace)
    assert [one.bucket for one in found.buckets] == [0, 1, 2]
    assert [one.start for one in found.buckets] == pytest.approx([50, 65, 120])


def test_without_marks_all_counts_from_the_first_activity(tmp_path: Path) -> None:
    """What was launched before recording began has no launch."""
    trace = ChromeTrace()
    trace.kernel(0, 40, 1)
    trace.call(50, 2)
    trace.kernel(60, 100, 2)
    found = report(tmp_path, trace)
    assert (found.split.compute, found.split.idle, found.split.step) == pytest.approx((80, 20, 100))


def test_with_one_mark_all_counts_too(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.kernel(0, 40, 1)
    trace.moment(45, "fastddp.step")
    trace.range(46, 48, bucket("collective", 0, of=1))
    trace.call(47, 2)
    trace.kernel(60, 100, 2, NCCL, NCCL_STREAM)
    found = report(tmp_path, trace)
    assert (found.split.compute, found.split.exposed) == pytest.approx((40, 40))
    assert [one.start for one in found.buckets] == [60]


# ------------------------------------------------------------------------------------------------------------- ranks


def about(
    kind: str, group: str = "0", ranks: tuple[int, ...] = (0, 1, 2), sequence: int | None = None
) -> dict[str, object]:
    known = {"Collective name": kind, "Process Group Name": group, "Process Group Ranks": str(list(ranks))}
    known |= {"Group size": len(ranks), "In msg nelems": 1000, "dtype": "Float"}
    return {**known} if sequence is None else {**known, "Seq": sequence}


def recommender(rank: int, late_exchange: int, late_gradients: int) -> ChromeTrace:
    """Three ranks; 100 ms a step: an all-to-all that ends at 40, and a bucket's allreduce that ends at 90."""
    trace = ChromeTrace(rank, world_size=3)
    for step in range(5):
        t = 100.0 * step
        trace.moment(t, "fastddp.step")
        trace.call(t, 10 * step)
        trace.kernel(t, t + 1, 10 * step)
        trace.call(t + 1, 10 * step + 1)
        start = t + 10 + 25 * (rank == late_exchange)
        trace.kernel(start, t + 40, 10 * step + 1, "ncclDevKernel_SendRecv", NCCL_STREAM, **about("all_to_allv"))
        trace.range(t + 2, t + 4, bucket("collective", 0, of=1))
        trace.call(t + 3, 10 * step + 2)
        start = t + 80 + 5 * (rank == late_gradients)
        trace.kernel(start, t + 90, 10 * step + 2, NCCL, NCCL_STREAM, **about("allreduce"))
    return trace


def test_the_rank_that_all_wait_for_is_found_in_all_collectives(tmp_path: Path) -> None:
    found = report(tmp_path, *(recommender(rank, late_exchange=2, late_gradients=1) for rank in range(3)))
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([30, 25, 5])
    (sentence,) = found.stragglers
    assert sentence.startswith("Rank 2 is the last to join collectives in 4 of 4 steps")


def in_groups(rank: int, numbered: bool) -> ChromeTrace:
    """Ranks 0 and 1 are a group, 2 and 3 another; rank 1 and 3 are 10 and 20 ms late. Rank 0 lacks a collective."""
    group, ranks = ("a", (0, 1)) if rank < 2 else ("b", (2, 3))
    late = {1: 10, 3: 20}.get(rank, 0)
    trace = ChromeTrace(rank, world_size=4)
    for step in range(4):
        t = 100.0 * step
        trace.moment(t, "fastddp.step")
        trace.call(t, 10 * step)
        trace.kernel(t, t + 1, 10 * step)
        for number in range(2):
            if rank == 0 and number == 0:
                continue
            trace.call(t + 1 + number, 10 * step + 1 + number)
            start, sequence = t + 10 + 40 * number + late, 2 * step + number if numbered else None
            facts = about("_reduce_scatter_base", group, ranks, sequence)
            trace.kernel(
                start, t + 45 + 40 * number, 10 * step + 1 + number, "ncclDevKernel_Generic", NCCL_STREAM, **facts
            )
    return trace


def test_collectives_are_matched_by_group_and_number(tmp_path: Path) -> None:
    found = report(tmp_path, *(in_groups(rank, numbered=True) for rank in range(4)))
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([10, 0, 40, 0])


def test_without_numbers_those_that_ranks_count_differently_are_not_compared(tmp_path: Path) -> None:
    found = report(tmp_path, *(in_groups(rank, numbered=False) for rank in range(4)))
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([0, 0, 40, 0])


def test_groups_that_share_no_rank_with_the_first_keep_their_clocks_and_others_are_aligned(tmp_path: Path) -> None:
    traces = [in_groups(rank, numbered=True) for rank in range(4)]
    for trace in traces:
        trace.header["host_name"] = f"machine {trace.header['distributedInfo']['rank']}"
        for event in trace.events:
            event["ts"] += 7_000 * trace.header["distributedInfo"]["rank"]
    found = report(tmp_path, *traces)
    assert found.ranks[0].waits_ms == pytest.approx(10)


# ------------------------------------------------------------------------------------------------------------ table


def test_a_table_has_all_collectives_by_kind(tmp_path: Path) -> None:
    found = report(tmp_path, *(recommender(rank, late_exchange=2, late_gradients=1) for rank in range(3)))
    exchange, gradients = found.collectives
    assert (exchange.kind, exchange.of_buckets, exchange.count, exchange.bytes) == ("all_to_all", False, 1, 4000)
    assert (exchange.total, exchange.median) == pytest.approx((65 / 3, 30))
    assert exchange.bus_gb_per_s == pytest.approx(4000 * 2 / 3 / 5e-3 / 1e9)  # 5 ms: since the last rank had joined
    assert (gradients.kind, gradients.of_buckets, gradients.count) == ("all_reduce", True, 1)
    assert (gradients.total, gradients.exposed) == pytest.approx((25 / 3, 25 / 3))
    assert exchange.exposed + gradients.exposed == pytest.approx(found.split.exposed)
    grid = collective_grid(found)
    assert [column.name for column in grid.columns] == [
        "collective", "count", "total, ms", "median, ms", "bytes", "bus, GB/s", "exposed, ms",
    ]  # fmt: skip
    assert grid.cells(grid.rows[1])[:3] == ["all_reduce of buckets", "1", "8.33"]


def test_the_largest_share_may_be_no_buckets(tmp_path: Path) -> None:
    found = report(tmp_path, *(recommender(rank, late_exchange=2, late_gradients=1) for rank in range(3)))
    assert headline(found).endswith("The largest share is that of all_to_all of no bucket: 21.7 ms.")
    assert any("belong to no bucket: all_to_all 21.67 ms" in sentence for sentence in found.advice)


def test_kinds_of_two_runs_stand_side_by_side() -> None:
    one = CollectiveReport("all_reduce", True, 6.0, 12.0, 2.0, None, None, 3.0)
    runs = [
        replace(trace_reports.report("before"), collectives=(one,)),
        replace(
            trace_reports.report("after"),
            collectives=(replace(one, total=6.0, exposed=1.0), replace(one, kind="broadcast", of_buckets=False)),
        ),
    ]
    grid = compare(runs).collectives
    assert [grid.cells(row) for row in grid.rows] == [
        ["all_reduce of buckets", "6", "6", "12.00", "6.00", "0.50", "3.00", "1.00", "−2.00"],
        ["broadcast", "–", "6", "–", "12.00", "–", "–", "3.00", "–"],
    ]


@pytest.mark.parametrize(
    ("name", "operation", "wire"),
    [
        (NCCL, "all_reduce", "float32"),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce", "bfloat16"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce", "float32"),
        ("void ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)", "reduce_scatter", "float16"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32", "all_reduce", "float32"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send/recv", None),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "other", None),
        ("mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)", "other", "bfloat16"),
    ],
)  # fmt: skip
def test_kernels_of_nccl_and_rccl_are_known_by_their_names(name: str, operation: str, wire: str | None) -> None:
    assert is_collective_kernel(name)
    assert (operation_of(name), wire_of(name)) == (operation, wire)


def test_what_travels_on_the_bus_depends_on_the_operation() -> None:
    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    assert [bus_bytes(operation, 100, 4) for operation in operations] == [150, 300, 75, 75, 100]
