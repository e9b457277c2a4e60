"""Reports: buckets, ranks together, stragglers, advice, notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastddp.trace import chrome
from fastddp.trace.advice import advise
from fastddp.trace.analysis import analyse
from fastddp.trace.recording import TraceError
from fastddp.trace.report import BucketReport, Report, Split
from fastddp.trace.stragglers import describe_stragglers
from fastddp.trace.wording import headline
from trace_files import ChromeTrace, bucket, gradient


def rank_trace(
    rank: int, late: float = 0.0, clock: float = 0.0, host: str = "machine", steps: int = 4, first: int = 0
) -> ChromeTrace:
    """Steps of 100 ms: two buckets, the second ready at 50 + late; its collective ends at 90 on all ranks."""
    trace = ChromeTrace(rank, world_size=2, host=host, base_ms=5e6 + clock)
    for step in range(first, first + steps + 1):
        t = 100.0 * step
        trace.moment(t, "fastddp.step")
        trace.operator(t, t + 50 + late)
        trace.moment(t + 10, gradient("layer0.weight", 0))
        trace.moment(t + 20, gradient("layer0.bias", 0))
        trace.moment(t + 20, bucket("ready", 0))
        trace.gloo(t + 21, t + 22, t + 32, 0)
        trace.moment(t + 30, gradient("layer1.weight", 1))
        trace.moment(t + 50 + late, gradient("layer1.bias", 1))
        trace.moment(t + 50 + late, bucket("ready", 1))
        trace.gloo(t + 51 + late, t + 51 + late, t + 90, 1)
    return trace


def report(folder: Path, *traces: ChromeTrace) -> Report:
    return analyse([chrome.read(trace.write(folder / f"{i}.json")) for i, trace in enumerate(traces)], "run")


def test_a_bucket_has_what_its_names_and_collectives_say(tmp_path: Path) -> None:
    found = report(tmp_path, rank_trace(0))
    first, second = found.buckets
    assert (first.first, first.last, first.bytes, first.wire) == ("layer0.bias", "layer0.weight", 4 << 20, "float32")
    assert (first.ready, first.delay, first.start, first.duration, first.exposed) == pytest.approx((20, 2, 22, 10, 0))
    assert first.bus_gb_per_s == pytest.approx((4 << 20) / 10e-3 / 1e9)  # 2 (n - 1) / n is 1 of two ranks
    assert (second.ready, second.delay, second.start, second.duration) == pytest.approx((50, 1, 51, 39))
    assert second.exposed == pytest.approx(39)
    assert (second.last_rank, second.last_parameter) == (0, "layer1.bias")
    assert found.split.step == pytest.approx(100)


def test_a_collective_begins_when_the_last_rank_joins_and_the_others_wait(tmp_path: Path) -> None:
    found = report(tmp_path, rank_trace(0), rank_trace(1, late=8))
    second = found.buckets[1]
    assert (second.ready, second.delay, second.start, second.duration) == pytest.approx((58, 1, 59, 31))
    assert (second.last_rank, second.last_parameter) == (1, "layer1.bias")
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([8, 0])
    assert found.stragglers == (
        "Rank 1 is the last to join collectives in 4 of 4 steps: the others wait 8.00 ms a step for it.",
    )


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    assert report(tmp_path, rank_trace(0), rank_trace(1, late=0.1)).stragglers == ()


def test_of_one_rank_nothing_is_said_about_waiting(tmp_path: Path) -> None:
    found = report(tmp_path, rank_trace(1))
    assert found.ranks[0].rank == 1
    assert found.ranks[0].waits_ms is None
    assert "1 of 2 ranks are here: what the others did is not known." in found.notes


def test_clocks_of_one_machine_are_taken_as_they_are(tmp_path: Path) -> None:
    """Rank 1's profiler began 3 ms later, and times are counted from there."""
    late = rank_trace(1, clock=3.0)
    found = report(tmp_path, rank_trace(0), late)
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([6, 0])
    assert not any("clock" in note for note in found.notes)


def test_clocks_of_two_machines_are_aligned_by_the_ends_of_collectives(tmp_path: Path) -> None:
    found = report(tmp_path, rank_trace(0), rank_trace(1, late=8, clock=70_000.0, host="other"))
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([8, 0])
    assert found.buckets[1].duration == pytest.approx(31)
    assert any("aligned by the ends of collectives" in note for note in found.notes)


def test_clocks_of_machines_are_aligned_by_what_most_collectives_say(tmp_path: Path) -> None:
    """One end that a rank recorded late moves nothing, and neither does a collective that never ended there."""
    other = rank_trace(1, late=8, clock=70_000.0, host="other")
    ends = [event for event in other.events if event["name"] == "gloo:all_reduce"]
    ends[3]["dur"] += 3_000
    other.events.remove(ends[5])
    found = report(tmp_path, rank_trace(0), other)
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([8, 0])


@pytest.mark.parametrize("late", [0, 1])
def test_times_of_buckets_count_from_where_the_first_rank_begins_its_step(tmp_path: Path, late: int) -> None:
    traces = [rank_trace(0), rank_trace(1)]
    for event in traces[late].events:
        if event["name"] == "fastddp.step":
            event["ts"] += 5_000
    first, second = report(tmp_path, *traces).buckets
    assert (first.ready, first.start, second.ready, second.start) == pytest.approx((20, 22, 50, 51))


def test_ranks_that_began_to_record_at_different_steps_are_compared_over_those_in_common(tmp_path: Path) -> None:
    found = report(tmp_path, rank_trace(0, steps=6), rank_trace(1, late=8, steps=3, first=2))
    assert [len(rank.step_ms) for rank in found.ranks] == [6, 3]
    assert [rank.waits_ms for rank in found.ranks] == pytest.approx([8, 0])
    assert any("compared over 3" in note for note in found.notes)


def test_the_timeline_is_that_of_the_median_step_from_its_start(tmp_path: Path) -> None:
    (timeline,) = report(tmp_path, rank_trace(0)).timelines
    assert timeline.length == pytest.approx(100)
    assert timeline.lanes == ("thread 1", "thread 9")
    collectives = [interval for interval in timeline.intervals if interval.what == "collective"]
    assert [(one.start, one.end, one.bucket) for one in collectives] == [(22, 32, 0), (51, 90, 1)]
    compute = [interval for interval in timeline.intervals if interval.what == "compute"]
    assert [(one.start, one.end, one.name, one.bucket) for one in compute] == [(0, 50, "aten::mm", None)]


def test_in_the_timeline_an_operator_is_where_it_computes(tmp_path: Path) -> None:
    trace = rank_trace(0)
    for step in range(5):
        trace.range(100.0 * step + 12, 100.0 * step + 15, bucket("collective", 0))
        trace.range(100.0 * step + 40, 100.0 * step + 44, bucket("wait", 0))
    found = report(tmp_path, trace)
    compute = [one for one in found.timelines[0].intervals if one.what == "compute"]
    assert [(one.start, one.end) for one in compute] == [(0, 12), (15, 40), (44, 50)]
    assert {one.name for one in compute} == {"aten::mm"}
    assert found.split.compute + found.split.overlapped == pytest.approx(sum(one.end - one.start for one in compute))


def test_two_files_of_one_rank_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"0\.json and .*1\.json are both of rank 0.*folder of its own"):
        report(tmp_path, rank_trace(0), rank_trace(0))


def test_ranks_that_are_not_named_are_counted(tmp_path: Path) -> None:
    traces = [rank_trace(0), rank_trace(1, late=8)]
    for trace in traces:
        del trace.header["distributedInfo"]
    found = report(tmp_path, *traces)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert any("which rank is which" in note for note in found.notes)


# -------------------------------------------------------------------------------------------------- what marks steps


def test_profiler_steps_are_steps_where_nothing_of_fastddp_is(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number in (5, 6):
        trace.range(100 * number, 100 * number + 90, f"ProfilerStep#{number}")
        trace.operator(100 * number, 100 * number + 30)
    found = report(tmp_path, trace)
    assert found.ranks[0].step_ms == pytest.approx((90, 90))
    assert found.wrapper == "unknown"


def torch_trace(collectives: int = 2) -> ChromeTrace:
    trace = ChromeTrace(0, world_size=2)
    for step in range(3):
        t = 100.0 * step
        trace.range(t, t + 30, "DistributedDataParallel.forward")
        trace.gloo(t + 1, t + 2, t + 3, None, "broadcast")
        for number in range(collectives):
            trace.gloo(t + 40 + 20 * number, t + 41 + 20 * number, t + 51 + 20 * number, None)
    return trace


def test_buckets_of_torchs_ddp_are_guessed_from_the_order_of_its_allreduces(tmp_path: Path) -> None:
    found = report(tmp_path, torch_trace())
    assert found.wrapper == "torch DDP"
    assert [one.bucket for one in found.buckets] == [0, 1]
    assert [one.start for one in found.buckets] == pytest.approx([41, 61])
    assert all(one.first is None for one in found.buckets)
    assert [one.ready for one in found.buckets] == pytest.approx([40, 60])  # when torch launched them
    assert any("guessed from the order" in note for note in found.notes)


def test_a_trace_without_marks_is_one_step(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.operator(0, 30)
    trace.gloo(29, 30, 40, None)
    found = report(tmp_path, trace)
    assert found.ranks[0].step_ms == pytest.approx((40,))
    assert any("no second step" in note for note in found.notes)


def step_of_two_collectives() -> ChromeTrace:
    """Bucket 0 sends twice, at once: 20 to 60 and 30 to 40. Its four gradients come at 1, 4, 9 and 16."""
    trace = ChromeTrace(0, world_size=2)
    for step, length in enumerate([100, 300, 110, 0]):
        t = float(sum([100, 300, 110][:step]))
        trace.moment(t, "fastddp.step")
        if not length:
            continue
        trace.operator(t, t + 19)
        for place, moment in enumerate((1, 4, 9, 16)):
            trace.moment(t + moment, gradient(f"weight{place}", 0))
        trace.moment(t + 25, bucket("ready", 0, of=1))
        trace.gloo(t + 19, t + 20, t + 60, 0)
        trace.gloo(t + 29, t + 30, t + 40, 0)
    return trace


def test_a_bucket_travels_from_its_first_collective_to_the_end_of_all_in_the_median_step(tmp_path: Path) -> None:
    found = report(tmp_path, step_of_two_collectives())
    (only,) = found.buckets
    assert (only.start, only.duration) == pytest.approx((20, 40))
    assert only.delay == 0  # it starts before it is known to be ready, which is not early
    assert "its first half would start 21.00 ms earlier" in found.advice[0]  # from 4, the middle gradient, to 25
    (timeline,) = found.timelines
    assert timeline.length == pytest.approx(110)


def test_what_a_bucket_exposes_is_said_of_the_worst_rank_and_in_the_headline_on_the_mean(tmp_path: Path) -> None:
    busy = rank_trace(1)
    for step in range(5):
        busy.operator(100.0 * step, 100.0 * step + 95, thread=4)
    found = report(tmp_path, rank_trace(0), busy)
    assert found.buckets[1].exposed == pytest.approx(39)
    assert [one.mean_exposed for one in found.buckets] == pytest.approx([0, 19.5])
    assert found.split.exposed == pytest.approx(19.5)
    assert headline(found).endswith("largest share is that of bucket 1: 19.5 ms.")


def test_a_rank_that_is_last_by_chance_is_no_straggler() -> None:
    assert describe_stragglers([0, 1], np.array([[0.0, 9.0, 0.0, 9.0], [9.0, 0.0, 9.0, 0.0]]), 100.0) == ()


# ------------------------------------------------------------------------------------------------------------ advice


def test_hidden_communication_needs_no_advice(tmp_path: Path) -> None:
    trace = rank_trace(0)
    for step in range(5):
        trace.operator(100.0 * step, 100.0 * step + 95, thread=4)
    (sentence,) = report(tmp_path, trace).advice
    assert (
        sentence == "Communication is hidden: of 49.00 ms a step, 0.00 ms are exposed. There is nothing to gain there."
    )


def test_an_exposed_bucket_is_told_what_a_smaller_cap_would_gain(tmp_path: Path) -> None:
    first = report(tmp_path, rank_trace(0)).advice[0]
    assert first.startswith(
        "Bucket 1 is exposed 39.00 ms: with a cap of 2 MiB (bucket_cap_mb) its first half would start"
    )
    assert "20.00 ms earlier" in first  # layer1.weight comes at 30, layer1.bias at 50


def three_steps(trace: ChromeTrace) -> Iterator[float]:
    """Their beginnings; 50 ms of compute in each."""
    for t in (0.0, 100.0, 200.0):
        trace.moment(t, "fastddp.step")
        trace.operator(t, t + 50)
        yield t


def test_a_bucket_that_queues_behind_others_is_not_told_to_be_smaller(tmp_path: Path) -> None:
    trace = ChromeTrace(0, world_size=2)
    for t in three_steps(trace):
        trace.moment(t + 10, gradient("layer0.weight", 0))
        trace.moment(t + 11, bucket("ready", 0))
        trace.gloo(t + 11, t + 12, t + 70, 0)
        trace.moment(t + 48, bucket("ready", 1))
        trace.gloo(t + 49, t + 70, t + 80, 1)
    advice = report(tmp_path, trace).advice
    assert any(
        "Bucket 1 is exposed 10.00 ms: it was ready 22.00 ms before its collective began" in one for one in advice
    )
    assert any("bf16_compress_hook" in one for one in advice)  # 68 ms of communication, 50 of compute


def test_a_bucket_that_began_late_behind_nothing_is_told_so(tmp_path: Path) -> None:
    trace = ChromeTrace(0, world_size=2)
    for t in three_steps(trace):
        trace.moment(t + 50, bucket("ready", 0))
        trace.gloo(t + 60, t + 60, t + 70, 0)
    (sentence, *_) = report(tmp_path, trace).advice
    assert "it was ready 10.00 ms before its collective began, with no other collective before it" in sentence


def test_where_ranks_wait_for_one_that_is_said_before_anything_else(tmp_path: Path) -> None:
    advice = report(tmp_path, rank_trace(0), rank_trace(1, late=30)).advice
    assert advice[0].startswith(
        "On the mean over all ranks, the last one included, collectives wait 15.00 ms a step for the last rank to join "
        "them, and 24.00 ms of communication are exposed"
    )


def test_exposed_communication_of_no_bucket_is_told_apart(tmp_path: Path) -> None:
    trace = rank_trace(0)
    for step in range(5):
        trace.gloo(100.0 * step + 90, 100.0 * step + 90, 100.0 * step + 95, None)
    unowned = "5.00 ms of exposed communication belong to no bucket: all_reduce 5.00 ms (sparse gradients, which"
    assert any(sentence.startswith(unowned) for sentence in report(tmp_path, trace).advice)
    assert not any("no bucket" in sentence for sentence in report(tmp_path, rank_trace(0)).advice)


def test_an_exposed_bucket_of_torchs_ddp_is_named_though_its_gradients_are_not_known(tmp_path: Path) -> None:
    found = report(tmp_path, torch_trace(collectives=1))
    (worst,) = found.buckets
    sentence, _ = found.advice
    assert sentence.startswith(
        f"Bucket {worst.bucket} is exposed {worst.exposed:.2f} ms, and the trace does not say when"
    )
    assert f"{worst.start:.2f} ms, when its collective began" in sentence


def a_bucket(number: int, **values: float | None) -> BucketReport:
    """Of a step of 100 ms; exposed where it is not said."""
    of = {"ready": 80.0, "delay": 0.0, "start": 80.0, "duration": 10.0, "exposed": 10.0, **values}
    of["mean_exposed"] = of["exposed"]
    return BucketReport(
        number, "first", "last", 4 << 20, "float16", bus_gb_per_s=1.0, last_rank=0, last_parameter="first", **of  # type: ignore[arg-type]
    )  # fmt: skip


def advice(*buckets: BucketReport, half: float = 5.0) -> tuple[str, ...]:
    exposed = sum(bucket.exposed for bucket in buckets)
    split = Split(compute=100 - exposed, overlapped=0, exposed=exposed, idle=0)
    return advise(split, buckets, {bucket.bucket: half for bucket in buckets})


def test_a_bucket_is_spoken_of_from_two_hundredths_of_a_step() -> None:
    (sentence,) = advice(a_bucket(0), a_bucket(1, exposed=1.9))
    assert sentence.startswith("Bucket 0 ")
    assert len(advice(a_bucket(0), a_bucket(1, exposed=2.1))) == 2


def test_a_cap_is_advised_where_it_gains_a_tenth_of_what_is_exposed() -> None:
    assert len(advice(a_bucket(0), half=1.1)) == 1
    assert advice(a_bucket(0), half=0.9) == ()


def test_a_late_collective_is_behind_others_where_they_end_in_the_second_half_of_its_delay() -> None:
    late = a_bucket(1, ready=60.0, delay=20.0)
    (sentence, _) = advice(a_bucket(0, start=50.0, duration=21.0), late)
    assert "behind other collectives" in sentence
    (sentence, _) = advice(a_bucket(0, start=50.0, duration=19.0), late)
    assert "no other collective before it" in sentence


def test_a_late_collective_is_why_a_bucket_is_exposed_from_half_of_that_time_on() -> None:
    (sentence,) = advice(a_bucket(0, delay=5.1))
    assert "it was ready 5.10 ms before" in sentence
    (sentence,) = advice(a_bucket(0, delay=4.9))
    assert "with a cap of 2 MiB" in sentence


def test_a_run_that_sends_nothing_gets_no_advice(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.operator(0, 30)
    (sentence,) = report(tmp_path, trace).advice
    assert sentence.startswith(
        "No communication was recorded: no collective of gloo's, and no kernel of NCCL's or RCCL's."
    )
