"""The picture of reports: a PNG, what is drawn in it, and names that would upset a text renderer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.image import imread

import trace_reports
from fastddp.split import Split
from fastddp.tools.trace import colours
from fastddp.tools.trace.picture import MOST_BARS, draw, write_picture


def labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_a_picture_is_a_png_that_fits_a_readme_and_names_are_no_formulas(tmp_path: Path) -> None:
    name = r"$\frac{$ \x $$ <b> \ud800"
    run = trace_reports.report(name, ranks=1)
    evil = replace(run, timelines=(replace(run.timelines[0], lanes=(name, "\x00\ud800", "")),))
    for runs in ([trace_reports.report(ranks=4)], [trace_reports.empty()], [evil, evil]):
        write_picture(tmp_path / "run.png", runs)
        height, width, _ = imread(tmp_path / "run.png").shape
        assert 1200 <= width <= 1600
        assert height <= 1200
    assert matplotlib.rcParams["text.parse_math"] is True  # for other pictures of the process
    with pytest.raises(ValueError, match="needs a report"):
        write_picture(tmp_path / "run.png", [])


def test_one_run_shows_its_split_and_the_step_of_its_first_rank() -> None:
    run = trace_reports.report(ranks=2)
    figure = draw([replace(run, timelines=run.timelines[::-1])])
    split, timeline = figure.axes
    assert labels(split) == ["mean", "rank 0", "rank 1"]
    exposed = [part.exposed for part in (run.split, run.ranks[0].split, run.ranks[1].split)]
    assert [bar.get_width() for bar in split.containers[2]] == pytest.approx(exposed)
    assert labels(timeline) == list(trace_reports.LANES)
    assert timeline.get_title("left").startswith("The median step of rank 0, ")
    assert figure.get_suptitle().startswith("A step takes")
    drawn = {to_hex(colour) for bars in timeline.collections for colour in bars.get_facecolor()}
    assert {colours.of_bucket(bucket) for bucket in range(6)} <= drawn
    assert [text.get_text() for text in timeline.texts] == ["1", "2", "3", "4", "5"]  # bucket 0 is too short for one


def test_several_runs_share_an_axis_and_show_their_means() -> None:
    before, after = trace_reports.of_torch("before"), trace_reports.report("after", bandwidth=6.0)
    split, *timelines = draw([before, after]).axes
    assert labels(split) == ["before", "after"]
    assert [axes.get_title("left").split(":")[0] for axes in timelines] == ["before", "after"]
    assert timelines[0].get_xlim() == timelines[1].get_xlim()


def test_of_many_ranks_the_shortest_and_the_longest_have_a_bar_and_a_long_timeline_is_thinned() -> None:
    run = trace_reports.with_many_ranks(16, trace_reports.with_many_intervals(20_000))
    ranks = tuple(replace(rank, split=Split(10 + rank.rank * 7 % 16, 1, 1, 1)) for rank in run.ranks)
    split, timeline = draw([replace(run, ranks=ranks)]).axes
    assert labels(split) == ["mean", "rank 0", "rank 9"]
    drawn = sum(len(bars.get_paths()) for bars in timeline.collections if isinstance(bars, PolyCollection))
    assert 100 < drawn <= MOST_BARS + 1
