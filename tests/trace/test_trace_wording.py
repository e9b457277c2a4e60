"""Numbers and sentences about a report, and the tables of its buckets and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import trace_reports
from fastddp.split import Split
from fastddp.tools.trace.grids import as_change, bucket_grid, rank_grid
from fastddp.tools.trace.wording import headline, percent, printable, setting

RUN = trace_reports.report()
FIRST, SECOND, *_ = RUN.buckets
LATE_ON_A_RANK = replace(FIRST, exposed=12.0, mean_exposed=3.0)
LATE_ON_ALL = replace(SECOND, exposed=7.0, mean_exposed=6.0)
SOME = Split(compute=30, overlapped=30, exposed=10, idle=10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": SOME}, ["75 % of its 40.0 ms", "10.0 ms is exposed, 12 %", "that of bucket 5: 2.50 ms."]),
        ({"split": Split(30, 30, 0, 10)}, ["All of its 30.0 ms of communication is hidden behind compute."]),
        ({"split": Split(30, 0, 0, 10)}, ["A step takes 40.0 ms. No communication was recorded in it."]),
        # Buckets that expose nothing of their own are not blamed ...
        ({"split": SOME, "buckets": (replace(FIRST, exposed=0.0),)}, ["10.0 ms is exposed, 12 % of the step."]),
        # ... and of others that with most on the mean over ranks.
        ({"split": SOME, "buckets": (LATE_ON_A_RANK, LATE_ON_ALL)}, ["that of bucket 1: 6.00 ms."]),
    ],
)
def test_the_headline_says_what_is_hidden_and_whose_fault_the_rest_is(changes: Any, words: list[str]) -> None:
    said = headline(replace(RUN, **changes))
    assert said.endswith(words[-1])
    assert all(word in said for word in words)


def test_the_setting_says_how_much_of_the_run_was_read() -> None:
    assert setting(RUN) == "2 ranks · fastddp · 20 steps · recorded by torch.profiler"
    assert setting(replace(RUN, world_size=8)).startswith("8 ranks, of which 2 were read · ")
    assert setting(replace(RUN, world_size=None)).startswith("number of ranks unknown · ")


def test_names_send_a_terminal_no_commands_and_what_is_not_all_or_nothing_is_not_shown_as_that() -> None:
    assert printable("a\x1b[31m\x9b\ud800\x7fé…\U0001f600") == "a\ufffd[31m\ufffd\ufffd\ufffdé…\U0001f600"
    shown = [percent(part, 1000) for part in (0, 1, 500, 999, 1000)]
    assert shown == ["0 %", "less than 1 %", "50 %", "more than 99 %", "100 %"]
    assert [as_change(value) for value in (0.004, -0.004, 0.006, -1.5)] == ["0.00", "0.00", "+0.01", "−1.50"]


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
