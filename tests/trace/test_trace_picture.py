"""The picture of reports: a PNG, what is drawn in it, and what is drawn together where intervals are too many."""

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
from fastddp.times.split import Split
from fastddp.tools.trace import colours
from fastddp.tools.trace.picture import MOST_BARS, draw, write_picture
from fastddp.tools.trace.report import Interval, Timeline, What
from fastddp.tools.trace.thinning import Thinned, merge, thin


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


# ------------------------------------------------------------------------------------------------------------- thinning


def short(start: float, end: float, lane: int = 0, what: What = "compute") -> Interval:
    return Interval(lane, start, end, what, f"{what} at {start}")


def test_only_compute_shorter_than_a_pixel_is_merged_with_what_begins_in_its_pixel() -> None:
    merged = (short(0.2, 0.3), short(0.1, 0.7), short(0.9, 1.6))
    kept = (short(1.9, 2.1), short(3.1, 4.2), short(4.1, 4.2))
    kept += (short(4.3, 4.4, what="copy"), short(4.5, 4.6, lane=1, what="copy"))
    whats: tuple[What, ...] = ("pack", "collective", "unpack", "wait", "forward")
    kept += tuple(short(5 + part, 5.1 + part, what=what) for what in whats for part in (0.1, 0.2))
    thinned = merge(Timeline(0, 0, ("a", "b"), (*merged, *kept), 10.0), 1.0)
    (new,) = set(thinned.timeline.intervals) - set(kept)
    assert set(kept) < set(thinned.timeline.intervals)
    assert (new.lane, new.start, new.end, new.what) == (0, 0.1, 1.6, "compute")
    assert new.name == "3 short ones, the longest: compute at 0.9"
    assert (thinned.merged, thinned.pixel) == (3, 1.0)


def test_thousands_of_kernels_become_few_bars_that_say_what_they_are() -> None:
    long = trace_reports.with_many_intervals(20_000)
    thinned = thin(long, 1000)
    assert len(thinned.timeline.intervals) == 1001
    assert sum(interval.what == "collective" for interval in thinned.timeline.intervals) == 1
    assert thinned.note.startswith("20,000 intervals of compute shorter than 100.0 µs are drawn together")
    assert thin(long, 20_001) == Thinned(long)
    lanes = tuple(replace(kernel, lane=lane) for lane in range(3) for kernel in long.intervals[:-1])
    assert len(thin(replace(long, intervals=lanes), 900).timeline.intervals) == 900  # which lanes share
