"""Numbers and sentences about a report, and the tables of its buckets and ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trace_reports
from fastddp.split import Split
from fastddp.tools.trace.grids import as_change, bucket_grid, rank_grid
from fastddp.tools.trace.wording import headline, in_words, ms, percent, printable, setting, shortened, size, unbroken

RUN = trace_reports.report()
FIRST, SECOND, *_ = RUN.buckets
LATE_ON_A_RANK = replace(FIRST, exposed=12.0, mean_exposed=3.0)
LATE_ON_ALL = replace(SECOND, exposed=7.0, mean_exposed=6.0)
SOME = Split(compute=30, overlapped=30, exposed=10, idle=10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"split": SOME},
            ["75 % of its 40.0 ms", "10.0 ms is exposed, 12 %", "that of bucket 5: 2.50 ms."],
        ),
        ({"split": Split(30, 30, 0, 10)}, ["All of its 30.0 ms of communication is hidden behind compute."]),
        ({"split": Split(30, 0, 0, 10)}, ["A step takes 40.0 ms. No communication was recorded in it."]),
        # Buckets that expose nothing of their own are not blamed ...
        ({"split": SOME, "buckets": (replace(FIRST, exposed=0.0),)}, ["10.0 ms is exposed, 12 % of the step."]),
        # ... and of others that with most on the mean over ranks.
        ({"split": SOME, "buckets": (LATE_ON_A_RANK, LATE_ON_ALL)}, ["that of bucket 1: 6.00 ms."]),
    ],
)
def test_the_headline_says_what_is_hidden_and_whose_fault_the_rest_is(
    changes: dict[str, object], words: list[str]
) -> None:
    said = headline(replace(RUN, **changes))  # type: ignore[arg-type]
    assert said.startswith("A step takes ")
    assert said.endswith(words[-1])
    assert all(word in said for word in words)


def test_the_setting_says_how_much_of_the_run_was_read() -> None:
    assert setting(RUN) == "2 ranks · fastddp · 20 steps · recorded by torch.profiler"
    assert setting(replace(RUN, world_size=8)).startswith("8 ranks, of which 2 were read · ")
    assert setting(replace(RUN, world_size=8, ranks=RUN.ranks[:1])).startswith("8 ranks, of which 1 was read · ")
    assert setting(replace(RUN, world_size=None)).startswith("number of ranks unknown · ")
    assert "torch's DDP" in setting(trace_reports.of_torch())
    one = replace(RUN.ranks[0], step_ms=(1.0,))
    assert " · 1 to 20 steps · " in setting(replace(RUN, ranks=(one, RUN.ranks[1])))


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ([ms(0), ms(0.123), ms(56.78), ms(567.8), ms(5678)], "0 ms, 0.12 ms, 56.8 ms, 568 ms, 5,678 ms"),
        ([in_words(5.678), in_words(-56.78), in_words(0)], "+5.68 ms, −56.8 ms, +0 ms"),
        # What is not all or nothing is not shown as that, and a change that is shown as nothing has no sign.
        ([percent(part, 1000) for part in (0, 1, 500)], "0 %, less than 1 %, 50 %"),
        ([percent(999, 1000), percent(1, 1), percent(0, 0)], "more than 99 %, 100 %, –"),
        ([as_change(value) for value in (0.0, 0.004, -0.004, 0.006, -1.5)], "0.00, 0.00, 0.00, +0.01, −1.50"),
        ([size(None), size(12), size(1536), size(25 * 2**20)], "–, 12 B, 1.5 KiB, 25.0 MiB"),
        ([shortened("abcdefghij", 10), shortened("abcdefghijk", 10)], "abcdefghij, abcd…ghijk"),
        ([printable("a\x1b[31m\x9b\ud800\x7fé…\U0001f600")], "a\ufffd[31m\ufffd\ufffd\ufffdé…\U0001f600"),
        ([unbroken("2 ms of 25.0 MiB, 61 % of 3 buckets")], "2\xa0ms of 25.0\xa0MiB, 61\xa0% of 3 buckets"),
    ],
)
def test_numbers_and_names_are_shown_so(shown: list[str], text: str) -> None:
    assert ", ".join(shown) == text


def test_a_bucket_names_one_parameter_once_and_columns_of_which_nothing_is_known_are_left_out() -> None:
    grid = bucket_grid(replace(RUN, buckets=(replace(FIRST, last=FIRST.first), SECOND)))
    assert [grid.cells(row)[1] for row in grid.rows] == ["blocks.0.weight", "blocks.2.weight … blocks.3.weight"]
    known = bucket_grid(trace_reports.of_torch()).columns
    unknown = {column.name for column in grid.columns if column not in known}
    assert unknown == {"parameters", "ready, ms", "delay, ms", "last on rank", "last gradient"}


def test_ranks_have_a_row_each_and_their_mean() -> None:
    ranks = tuple(
        replace(rank, step_ms=(90.0, 110.0, 100.0), split=Split(60.0 + rank.rank, 20.0, 15.0, 5.0), waits_ms=2.5)
        for rank in RUN.ranks
    )
    without_steps = replace(ranks[1], step_ms=(), waits_ms=None)
    grid = rank_grid(replace(RUN, ranks=(ranks[0], without_steps), split=Split(60.5, 20.0, 15.0, 5.0)))
    assert [grid.cells(row) for row in grid.rows] == [
        ["0", "3", "100.00", "60.00", "20.00", "15.00", "5.00", "2.50", "100.00", "110.00", "traces/rank0.json"],
        ["1", "0", "101.00", "61.00", "20.00", "15.00", "5.00", "–", "–", "–", "traces/rank1.json"],
        ["mean", "–", "100.50", "60.50", "20.00", "15.00", "5.00", "–", "–", "–", "–"],
    ]
    assert [column.name for column in grid.columns if column.in_page] == ["median step, ms", "longest step, ms", "file"]
