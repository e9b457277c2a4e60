"""Two or more runs side by side: tables, and what changed in words."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

import trace_reports
from fastddp.trace.comparison import compare, for_screen
from fastddp.trace.grids import Column, Grid
from fastddp.trace.report import Report, Split


def run(name: str, split: Split, exposed: tuple[float, ...] = (0.0, 6.0), around: float = 0.01) -> Report:
    """Two buckets; steps lie within ``around`` (a part of them) of the mean."""
    made = trace_reports.report(name, buckets=2)
    steps = tuple(split.step * (1 + around * (i - 5) / 5) for i in range(11))
    return replace(
        made,
        split=split,
        ranks=tuple(replace(rank, step_ms=steps) for rank in made.ranks),
        buckets=tuple(replace(b, exposed=e, duration=8.0) for b, e in zip(made.buckets, exposed, strict=True)),
    )


BEFORE = run("before", Split(compute=40, overlapped=30, exposed=20, idle=10))
AFTER = run("after", Split(compute=36, overlapped=40, exposed=4, idle=0), exposed=(0.0, 1.5))


def cells(grid: Grid) -> dict[str, list[str]]:
    return {grid.cells(row)[0]: grid.cells(row)[1:] for row in grid.rows}


def names(grid: Grid) -> list[str]:
    return [column.name for column in grid.columns]


def test_times_of_a_step_stand_side_by_side_with_difference_and_ratio() -> None:
    grid = compare([BEFORE, AFTER]).steps
    assert names(grid) == ["", "before", "after", "difference", "ratio"]
    assert cells(grid) == {
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


def test_a_ratio_to_nothing_is_unknown() -> None:
    assert cells(compare([AFTER, BEFORE]).steps)["idle"] == ["0.00", "10.00", "+10.00", "–"]


def test_buckets_are_matched_by_number_and_need_not_be_in_all_runs() -> None:
    more = replace(AFTER, buckets=(AFTER.buckets[1], replace(AFTER.buckets[1], bucket=7, bytes=2048, duration=4.0)))
    grid = compare([BEFORE, more]).buckets
    assert names(grid) == [
        "bucket",
        "size, before",
        "size, after",
        "duration, ms, before",
        "duration, ms, after",
        "duration, ms, ratio",
        "exposed, ms, before",
        "exposed, ms, after",
        "exposed, ms, difference",
    ]
    assert cells(grid) == {
        "0": ["1.0 MiB", "–", "8.00", "–", "–", "0.00", "–", "–"],
        "1": ["25.0 MiB", "25.0 MiB", "8.00", "8.00", "1.00", "6.00", "1.50", "−4.50"],
        "7": ["–", "2.0 KiB", "–", "4.00", "–", "–", "1.50", "–"],
    }
    assert grid.buckets == (0, 1, 7)


def test_what_changed_is_said_in_words() -> None:
    (change,) = compare([BEFORE, AFTER]).changes
    assert change.headline == "A step of “after” takes 80.0 ms, 0.80 of the 100 ms of “before”."
    assert change.sentences == (
        (
            "The difference of −20.0 ms consists of exposed −16.0 ms, overlapped +10.0 ms, idle −10.0 ms, compute only "
            "−4.00 ms."
        ),
        "91 % of communication is hidden behind compute, instead of 60 %.",
        "The bucket whose exposed time changed most is 1: 1.50 ms instead of 6.00 ms.",
    )


def test_a_difference_as_small_as_that_between_steps_is_called_so() -> None:
    slower = run("after", Split(compute=41, overlapped=30, exposed=20, idle=10), around=0.05)
    (change,) = compare([BEFORE, slower]).changes
    assert change.headline == (
        "A step of “after” takes 101 ms, 1.01 of the 100 ms of “before”, which is no more than steps of one run differ."
    )


def test_equal_runs_have_changed_in_nothing() -> None:
    (change,) = compare([BEFORE, replace(BEFORE, name="again")]).changes
    assert change.sentences == ("60 % of communication is hidden behind compute, instead of 60 %.",)


def test_what_else_differs_between_runs_is_named() -> None:
    torchs = replace(trace_reports.of_torch(), recorder="Nsight Systems", world_size=None)
    (change,) = compare([torchs, trace_reports.report("after")]).changes
    assert change.sentences[-4:] == (
        "It ran under fastddp, not under torch's DDP: a bucket's number may mean other parameters.",
        "It was recorded by torch.profiler, not by Nsight Systems: what recording costs differs.",
        "It has 2 ranks instead of an unknown number of ranks.",
        "It has 6 buckets of 126.0 MiB in all (float32), instead of 5 buckets of 101.0 MiB in all (float32).",
    )


def test_runs_without_steps_communication_or_buckets_can_be_compared() -> None:
    empty = replace(trace_reports.empty(), world_size=1)
    for runs in ([empty, AFTER], [AFTER, empty], [empty, empty]):
        compare(runs)
    (change,) = compare([empty, AFTER]).changes
    assert change.headline == "A step of “after” takes 80.0 ms, not the 0 ms of “empty”."
    assert change.sentences[0].startswith("The difference of +80.0 ms")
    assert not any("hidden" in sentence for sentence in change.sentences)


def test_every_further_run_is_compared_with_the_first() -> None:
    third = run("third", Split(compute=50, overlapped=0, exposed=0, idle=0))
    comparison = compare([BEFORE, AFTER, third])
    assert [change.name for change in comparison.changes] == ["after", "third"]
    assert cells(comparison.steps)["step, mean"] == ["100.00", "80.00", "−20.00", "0.80", "50.00", "−50.00", "0.50"]


def test_one_run_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="needs two runs, and there is 1 run"):
        compare([BEFORE])


def on_screen(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen_shows_sentences_and_both_tables() -> None:
    screen = on_screen(for_screen(compare([BEFORE, AFTER])))
    assert "A step of “after” takes 80.0 ms" in screen
    assert "\n  91 % of communication is hidden" in screen
    assert "compute only 40.00 36.00 −4.00 0.90" in " ".join(screen.split())
    assert "■ 1" in screen


def test_names_are_shown_as_they_are_and_send_no_commands_to_the_terminal() -> None:
    screen = on_screen(for_screen(compare([BEFORE, replace(AFTER, name="[red]x[/] \x1b[31m")])))
    assert "[red]x[/] \ufffd[31m" in screen
    assert "\x1b" not in screen


def test_cells_are_shown_as_they_are() -> None:
    grid = Grid((Column("one"), Column("[b]two[/]")), (("[red]x[/]", "[i]y[/]"), (None, "\x1b[1m")), buckets=(0, 1))
    words = on_screen(grid.for_screen()).replace("━", "").split()
    assert words == ["one", "[b]two[/]", "■", "[red]x[/]", "[i]y[/]", "■", "–", "\ufffd[1m"]
