"""Numbers and sentences about a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trace_reports
from fastddp.trace.grids import as_change, bucket_grid, rank_grid
from fastddp.trace.report import Report, Split
from fastddp.trace.wording import headline, in_words, ms, percent, printable, setting, shortened, size, unbroken


def report(split: Split) -> Report:
    return replace(trace_reports.report(), split=split)


def test_the_headline_says_what_a_step_takes_what_is_hidden_and_whose_fault_the_rest_is() -> None:
    assert headline(report(Split(compute=30, overlapped=30, exposed=10, idle=10))) == (
        "A step takes 80.0 ms. 75 % of its 40.0 ms of communication is hidden behind compute; 10.0 ms is exposed, 12 % "
        "of the step. The largest share is that of bucket 5: 4.80 ms."
    )


def test_a_step_without_exposed_communication_has_no_culprit() -> None:
    assert headline(report(Split(compute=30, overlapped=30, exposed=0, idle=10))) == (
        "A step takes 70.0 ms. All of its 30.0 ms of communication is hidden behind compute."
    )


def test_a_step_without_communication_says_so() -> None:
    assert headline(report(Split(compute=30, overlapped=0, exposed=0, idle=10))) == (
        "A step takes 40.0 ms. No communication was recorded in it."
    )


def test_buckets_that_expose_nothing_of_their_own_are_not_blamed() -> None:
    run = report(Split(compute=30, overlapped=30, exposed=10, idle=10))
    run = replace(run, buckets=tuple(replace(bucket, exposed=0.0) for bucket in run.buckets))
    assert headline(run).endswith("10.0 ms is exposed, 12 % of the step.")


def test_the_largest_share_is_that_of_the_bucket_with_most_on_the_mean_over_ranks() -> None:
    run = report(Split(compute=30, overlapped=30, exposed=10, idle=10))
    first, second, *_ = run.buckets
    first, second = replace(first, exposed=12.0, mean_exposed=3.0), replace(second, exposed=7.0, mean_exposed=6.0)
    assert headline(replace(run, buckets=(first, second))).endswith("The largest share is that of bucket 1: 6.00 ms.")


def test_the_setting_says_how_much_of_the_run_was_read() -> None:
    run = trace_reports.report(ranks=2)
    assert setting(run) == "2 ranks · fastddp · 20 steps · recorded by torch.profiler"
    assert setting(replace(run, world_size=8)).startswith("8 ranks, of which 2 were read · ")
    assert setting(replace(run, world_size=8, ranks=run.ranks[:1])).startswith("8 ranks, of which 1 was read · ")
    assert setting(replace(run, world_size=None)).startswith("number of ranks unknown · ")
    assert "torch's DDP" in setting(trace_reports.of_torch())
    one = replace(run.ranks[0], step_ms=(1.0,))
    assert " · 1 to 20 steps · " in setting(replace(run, ranks=(one, run.ranks[1])))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ms"), (0.123, "0.12 ms"), (5.678, "5.68 ms"), (56.78, "56.8 ms"), (567.8, "568 ms"), (5678, "5,678 ms")],
)
def test_times_have_three_digits(value: float, text: str) -> None:
    assert ms(value) == text
    assert in_words(value) == f"+{text}"
    assert in_words(-value - 1e-9) == f"−{ms(value + 1e-9)}"


def test_a_change_that_is_shown_as_nothing_has_no_sign() -> None:
    assert [as_change(value) for value in (0.0, 0.004, -0.004, 0.006, -1.5)] == [
        "0.00",
        "0.00",
        "0.00",
        "+0.01",
        "−1.50",
    ]


def test_a_part_that_is_not_all_is_never_100_percent() -> None:
    assert [percent(part, 1000) for part in (0, 1, 500, 999, 1000)] == [
        "0 %",
        "less than 1 %",
        "50 %",
        "more than 99 %",
        "100 %",
    ]
    assert percent(0, 0) == "–"


def test_sizes_are_in_binary_units() -> None:
    assert [size(count) for count in (None, 12, 1536, 25 * 2**20)] == ["–", "12 B", "1.5 KiB", "25.0 MiB"]


def test_long_names_keep_both_ends() -> None:
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcd…ghijk"
    assert len(shortened("x" * 500, 41)) == 41


def test_control_characters_and_halves_of_surrogate_pairs_are_replaced() -> None:
    assert printable("a\x1b[31m\x9b\ud800\x7fé…\U0001f600") == "a\ufffd[31m\ufffd\ufffd\ufffdé…\U0001f600"


def test_numbers_stay_with_their_units() -> None:
    assert unbroken("2 ms of 25.0 MiB, 61 % of 3 buckets") == "2\u00a0ms of 25.0\u00a0MiB, 61\u00a0% of 3 buckets"


def test_columns_of_which_nothing_is_known_are_left_out() -> None:
    def names(report: Report) -> list[str]:
        return [column.name for column in bucket_grid(report).columns]

    everything = names(trace_reports.report())
    assert everything == [
        "bucket",
        "parameters",
        "size",
        "wire",
        "ready, ms",
        "delay, ms",
        "start, ms",
        "duration, ms",
        "exposed, ms",
        "bus, GB/s",
        "last on rank",
        "last gradient",
    ]
    unknown = {"parameters", "ready, ms", "delay, ms", "last on rank", "last gradient"}
    assert names(trace_reports.of_torch()) == [name for name in everything if name not in unknown]


def test_a_bucket_of_one_parameter_names_it_once() -> None:
    run = trace_reports.report(buckets=2)
    run = replace(run, buckets=(replace(run.buckets[0], last=run.buckets[0].first), run.buckets[1]))
    grid = bucket_grid(run)
    assert [grid.cells(row)[1] for row in grid.rows] == ["blocks.0.weight", "blocks.2.weight … blocks.3.weight"]


def test_ranks_and_their_mean() -> None:
    run = trace_reports.report()
    ranks = tuple(
        replace(rank, step_ms=(90.0, 110.0, 100.0), split=Split(60.0 + rank.rank, 20.0, 15.0, 5.0), waits_ms=2.5)
        for rank in run.ranks
    )
    grid = rank_grid(replace(run, ranks=ranks, split=Split(60.5, 20.0, 15.0, 5.0)))
    assert [grid.cells(row) for row in grid.rows] == [
        ["0", "3", "100.00", "60.00", "20.00", "15.00", "5.00", "2.50", "100.00", "110.00", "traces/rank0.json"],
        ["1", "3", "101.00", "61.00", "20.00", "15.00", "5.00", "2.50", "100.00", "110.00", "traces/rank1.json"],
        ["mean", "–", "100.50", "60.50", "20.00", "15.00", "5.00", "–", "–", "–", "–"],
    ]
    assert [column.name for column in grid.columns if column.in_page] == ["median step, ms", "longest step, ms", "file"]


def test_a_rank_without_steps_has_no_median() -> None:
    run = trace_reports.report()
    grid = rank_grid(replace(run, ranks=(replace(run.ranks[0], step_ms=(), waits_ms=None),)))
    assert grid.cells(grid.rows[0])[-4:] == ["–", "–", "–", "traces/rank0.json"]
