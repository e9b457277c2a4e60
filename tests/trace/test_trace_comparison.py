"""Numbers, sentences and tables about a report, and about several side by side."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import trace_reports
from fastddp.times.split import Split
from fastddp.tools.trace.comparison import compare, for_screen
from fastddp.tools.trace.grids import Column, Grid, as_change, rank_grid
from fastddp.tools.trace.report import CollectiveReport, Interval, Report
from fastddp.tools.trace.wording import headline, percent, printable


def run(name: str, split: Split, exposed: float = 6.0) -> Report:
    """Two buckets, the second exposed; steps lie within a hundredth of the mean."""
    made = trace_reports.report(name, buckets=2)
    steps = tuple(split.step * (1 + 0.002 * (i - 5)) for i in range(11))
    ranks = tuple(replace(rank, step_ms=steps) for rank in made.ranks)
    buckets = tuple(replace(one, exposed=exposed * one.bucket, duration=8.0) for one in made.buckets)
    return replace(made, split=split, ranks=ranks, buckets=buckets)


BEFORE = run("before", Split(compute=40, overlapped=30, exposed=20, idle=10))
AFTER = run("after", Split(compute=36, overlapped=40, exposed=4, idle=0), exposed=1.5)


def cells(grid: Grid) -> dict[str, list[str]]:
    return {grid.cells(row)[0]: grid.cells(row)[1:] for row in grid.rows}


def test_times_of_a_step_stand_side_by_side_with_difference_and_ratio() -> None:
    assert cells(compare([BEFORE, AFTER]).steps) == {
        "step, mean": ["100.00", "80.00", "−20.00", "0.80"],
        "compute only": ["40.00", "36.00", "−4.00", "0.90"],
        "overlapped": ["30.00", "40.00", "+10.00", "1.33"],
        "exposed": ["20.00", "4.00", "−16.00", "0.20"],
        "idle": ["10.00", "0.00", "−10.00", "0.00"],
        "communication": ["50.00", "44.00", "−6.00", "0.88"],
        "step, median": ["100.00", "80.00", "−20.00", "0.80"],
        "step, 10 %": ["99.20", "79.36", "−19.84", "0.80"],
        "step, 90 %": ["100.80", "80.64", "−20.16", "0.80"],
    }
    third = compare([AFTER, BEFORE, replace(AFTER, name="third")])  # is compared with the first too
    assert cells(third.steps)["idle"] == ["0.00", "10.00", "+10.00", "–", "0.00", "0.00", "–"]
    assert [change.name for change in third.changes] == ["before", "third"]


def test_buckets_and_kinds_of_collectives_need_not_be_in_all_runs() -> None:
    reduced = CollectiveReport("all_reduce", True, 6.0, 12.0, 2.0, None, None, 3.0)
    broadcast = replace(reduced, kind="broadcast", of_buckets=False)
    seventh = replace(AFTER.buckets[1], bucket=7, bytes=2048, duration=4.0)
    both = (replace(reduced, total=6.0, exposed=1.0), broadcast)
    after = replace(AFTER, buckets=(AFTER.buckets[1], seventh), collectives=both)
    found = compare([replace(BEFORE, collectives=(reduced,)), after])
    assert cells(found.buckets) == {
        "0": ["1.0 MiB", "–", "8.00", "–", "–", "0.00", "–", "–"],
        "1": ["25.0 MiB", "25.0 MiB", "8.00", "8.00", "1.00", "6.00", "1.50", "−4.50"],
        "7": ["–", "2.0 KiB", "–", "4.00", "–", "–", "1.50", "–"],
    }
    assert cells(found.collectives) == {
        "all_reduce of buckets": ["6", "6", "12.00", "6.00", "0.50", "3.00", "1.00", "−2.00"],
        "broadcast": ["–", "6", "–", "12.00", "–", "–", "3.00", "–"],
    }


def test_a_difference_as_small_as_that_between_steps_is_called_so() -> None:
    slower = run("after", Split(compute=41, overlapped=30, exposed=20, idle=10))
    (change,) = compare([BEFORE, slower]).changes
    assert "1.01 of the 100 ms of “before”, which is no more than steps of one run differ" in change.headline
    (change,) = compare([BEFORE, replace(BEFORE, name="again")]).changes
    assert change.sentences == ("60 % of communication is hidden behind compute, instead of 60 %.",)


@pytest.mark.parametrize(
    ("compute", "exposed", "packing", "says_other"),
    [
        (31, 23, 0, True),  # the other way: the run of which the step is longer is the first
        (52.3, 21.1, 0, True),
        (52.3, 21.1, 7, False),
        (45, 28.4, 0, False),
    ],
)
def test_a_difference_that_is_mostly_other_compute_is_not_put_down_to_ddp(
    compute: float, exposed: float, packing: float, says_other: bool
) -> None:
    after = run("after", Split(compute, 30, exposed, idle=10))
    packed = tuple(
        replace(one, intervals=(*one.intervals, Interval(0, 0.0, packing, "pack", "fastddp.pack")))
        for one in after.timelines
    )
    (change,) = compare([BEFORE, replace(after, timelines=packed)]).changes
    assert ("That says nothing about DDP." in change.headline) == says_other
    if says_other:
        assert f"Compute outside of DDP changed by {'+12.3' if compute > 40 else '−9.00'} ms" in change.headline


def test_runs_without_steps_communication_or_buckets_can_be_compared() -> None:
    empty = replace(trace_reports.empty(), world_size=1)
    for runs in ([AFTER, empty], [empty, empty]):
        compare(runs)
    (change,) = compare([empty, AFTER]).changes
    assert change.headline == "A step of “after” takes 80.0 ms, not the 0 ms of “empty”."
    assert change.sentences[0].startswith("The difference of +80.0 ms")
    assert not any("hidden" in sentence for sentence in change.sentences)
    with pytest.raises(ValueError, match="needs two runs, and there is 1 run"):
        compare([BEFORE])


def test_the_screen_shows_sentences_and_tables_and_names_send_it_no_commands() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(for_screen(compare([BEFORE, replace(AFTER, name="[red]x[/] \x1b[31m")])))
    console.print(Grid((Column("[b]two[/]"),), (("[i]y[/]",), ("\x1b[1m",))).for_screen())
    screen = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "A step of “[red]x[/] \ufffd[31m” takes 80.0 ms, 0.80 of the 100 ms of “before”. The difference" in screen
    assert "91 % of communication is hidden behind compute, instead of 60 %. The bucket whose exposed time" in screen
    assert "changed most is 1: 1.50 ms instead of 6.00 ms" in screen
    assert all(words in screen for words in ("compute only 40.00 36.00 −4.00 0.90", "■ 1", "[b]two[/]", "[i]y[/]"))
    assert "\x1b" not in screen


# ----------------------------------------------------------------------------------------------------------- one report


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


def test_names_send_a_terminal_no_commands_and_what_is_not_all_or_nothing_is_not_shown_as_that() -> None:
    assert printable("a\x1b[31m\x9b\ud800\x7fé…\U0001f600") == "a\ufffd[31m\ufffd\ufffd\ufffdé…\U0001f600"
    shown = [percent(part, 1000) for part in (0, 1, 500, 999, 1000)]
    assert shown == ["0 %", "less than 1 %", "50 %", "more than 99 %", "100 %"]
    assert [as_change(value) for value in (0.004, -0.004, 0.006, -1.5)] == ["0.00", "0.00", "+0.01", "−1.50"]


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
