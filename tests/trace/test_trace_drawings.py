"""The page and the picture of a report: what stands in them, and that nothing from a file is more than text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder

import matplotlib
import plotly.graph_objects as go
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.image import imread
from plotly.offline import get_plotlyjs

import trace_reports
from fastddp.times.split import Split
from fastddp.tools.trace import colours
from fastddp.tools.trace.page import page, write_page
from fastddp.tools.trace.picture import MOST_BARS, draw, write_picture
from fastddp.tools.trace.report import Report, Timeline
from fastddp.tools.trace.thinning import Thinned, thin
from fastddp.tools.trace.wording import headline


class Parser(HTMLParser):
    """A strict one: what begins has to end, in the right order."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in ("meta", "link", "img", "br", "hr", "input"):
            self.tree.end(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.tree.end(tag).tag == tag

    def handle_data(self, data: str) -> None:
        self.tree.data(data)


def parsed(*reports: Report) -> Element:
    parser = Parser()
    parser.feed(page(reports).replace(get_plotlyjs(), ""))
    return parser.tree.close()


def texts(document: Element, *tags: str) -> list[str]:
    return [" ".join("".join(one.itertext()).split()) for one in document.iter() if one.tag in tags]


def figures(document: Element) -> dict[str, Any]:
    (text,) = ("".join(script.itertext()) for script in document.iter("script") if script.get("id") == "figures")
    assert "<" not in text  # so that nothing in it can end the script
    return json.loads(text)


def table(document: Element, number: int) -> list[list[str]]:
    return [texts(row, "th", "td") for row in list(document.iter("table"))[number].iter("tr")]


def test_the_page_of_a_run_has_its_parts_in_their_order() -> None:
    run = trace_reports.report("gpt", ranks=2)
    document = parsed(run)
    assert (texts(document, "title"), texts(document, "h1")) == (["gpt"], [headline(run)])
    parts = ["Where a step's time goes", "Advice", "One step", "Buckets", "Collectives", "Stragglers", "Notes"]
    assert texts(document, "h2") == [*parts, "Definitions"]
    assert texts(document, "li") == [*run.advice, *run.stragglers, *run.notes]
    assert texts(document, "option") == ["rank 0", "rank 1"]
    assert figures(document).keys() == {"split", "timeline-0-0", "timeline-0-1"}
    split = figures(document)["split"]["figure"]
    assert split["layout"]["yaxis"]["ticktext"] == ["<b>mean</b>", "rank 0", "rank 1"]
    assert split["data"][2]["x"] == [run.split.exposed, *(rank.split.exposed for rank in run.ranks)]


def test_what_a_trace_lacks_is_said() -> None:
    empty = replace(trace_reports.empty(), recorder="Nsight Systems", world_size=1)
    said = "\n".join(texts(parsed(empty), "main"))
    for words in ("asks for a change", "no complete step to draw", "names no buckets", "One rank was read"):
        assert words in said
    without_time = replace(empty, wrapper="fastddp", timelines=(Timeline(0, 0, (), (), 0.0),))
    assert "A step takes 0 ms" in texts(parsed(without_time), "h1")[0]
    with pytest.raises(ValueError, match="needs a report"):
        page([])


def test_several_runs_are_compared_before_each_is_shown() -> None:
    document = parsed(trace_reports.of_torch("before"), trace_reports.report("after", bandwidth=6.0))
    title, *runs = texts(document, "h1")
    assert title.startswith("A step of “after” takes")
    assert runs == ["before", "after"]
    assert texts(document, "h2")[:4] == ["What changed", "Where a step's time goes", "One step of each", "Advice"]
    drawn = {name: one["figure"]["layout"] for name, one in figures(document).items()}
    bars = ["<b>mean</b> · before", "<b>mean</b> · after", "rank 0 · before"]
    assert drawn["split"]["yaxis"]["ticktext"][:3] == bars
    assert drawn["timeline-0-0"]["xaxis"]["range"] == drawn["timeline-1-0"]["xaxis"]["range"]  # one axis for both


def test_every_interval_is_drawn_on_its_lane_in_the_colour_of_its_bucket_and_shown_to_the_pointer() -> None:
    run = trace_reports.report(ranks=1)
    traces = figures(parsed(run))["timeline-0-0"]["figure"]["data"]
    drawn = {
        (trace["name"], lane, base, colour)
        for trace in traces
        for lane, base, colour in zip(trace["y"], trace["base"], trace["marker"]["color"], strict=True)
    }
    assert drawn == {
        (i.what, i.lane, round(i.start, 6), colours.of_interval(i.what, i.bucket)) for i in run.timelines[0].intervals
    }
    (text,) = (trace["hovertext"][1] for trace in traces if trace["name"] == "collective")
    times = f"starts at {run.buckets[1].start:.3f} ms, takes {run.buckets[1].duration:.3f} ms"
    assert text == f"<b>ncclDevKernel_AllReduce_Sum_f32_RING_LL()</b><br>collective of bucket 1, 25.0 MiB<br>{times}"


@pytest.mark.parametrize("reports", [[trace_reports.report()], [trace_reports.of_torch(), trace_reports.report()]])
def test_plotly_knows_all_that_figures_say(reports: list[Report]) -> None:
    for entry in figures(parsed(*reports)).values():
        go.Figure(entry["figure"])  # raises for what it does not know


@pytest.mark.parametrize("runs", [1, 2])
def test_what_comes_from_files_is_text_wherever_it_stands(tmp_path: Path, runs: int) -> None:
    document = parsed(*[trace_reports.evil()] * runs)
    clean = parsed(*[trace_reports.report(ranks=2, buckets=2)] * runs)
    assert [element.tag for element in document.iter()] == [element.tag for element in clean.iter()]
    shown = "<script>x()</script>\"'&amp;<b>$x$\ufffd\ufffd"
    assert all(shown in text for text in texts(document, "title") + texts(document, "li")[-1:])
    assert shown in table(document, -2)[1][1]
    for name, entry in figures(document).items():
        tags = set(re.findall(r"<[^>]*>", json.dumps(entry)))
        assert tags <= {"<b>", "</b>", "<br>", "<extra>", "</extra>"}, name
    write_page(tmp_path / "page.html", [trace_reports.evil()] * runs)
    assert "Definitions" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_asks_nobody_for_anything_and_runs_nothing_but_its_own_scripts() -> None:
    document = parsed(trace_reports.report())
    for element in document.iter():
        assert not {"src", "href", "srcset", "action", "data", "poster", "ping"} & element.attrib.keys()
    html = page([trace_reports.report()]).replace(get_plotlyjs(), "")
    assert not re.findall(r"https?://|url\(|@import", html)
    (policy,) = (meta.attrib["content"] for meta in document.iter("meta") if "http-equiv" in meta.attrib)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "script-src", "style-src", "img-src"}
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}=' 'sha256-[\w+/]{43}='", rules["script-src"])


def labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_a_picture_is_a_png_that_fits_a_readme_and_names_are_no_formulas(tmp_path: Path) -> None:
    name = r"$\frac{$ \x $$ <b> \ud800"
    run = trace_reports.report(name, ranks=1)
    evil = replace(run, timelines=(replace(run.timelines[0], lanes=(name, "\x00\ud800", "")),))
    for runs in ([trace_reports.empty()], [trace_reports.report(ranks=4), evil]):
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


def test_of_many_ranks_the_shortest_and_the_longest_have_a_bar_and_a_long_timeline_is_thinned() -> None:
    run = trace_reports.with_many_ranks(16, trace_reports.with_many_intervals(20_000))
    ranks = tuple(replace(rank, split=Split(10 + rank.rank * 7 % 16, 1, 1, 1)) for rank in run.ranks)
    split, timeline = draw([replace(run, ranks=ranks)]).axes
    assert labels(split) == ["mean", "rank 0", "rank 9"]
    drawn = sum(len(bars.get_paths()) for bars in timeline.collections if isinstance(bars, PolyCollection))
    assert 100 < drawn <= MOST_BARS + 1


# ------------------------------------------------------------------------------------------------------------- thinning


def test_thousands_of_kernels_become_few_bars_that_say_what_they_are() -> None:
    long = trace_reports.with_many_intervals(20_000)
    thinned = thin(long, 1000)
    assert len(thinned.timeline.intervals) == 1001
    assert sum(interval.what == "collective" for interval in thinned.timeline.intervals) == 1
    assert thinned.note.startswith("20,000 intervals of compute shorter than 100.0 µs are drawn together")
    assert thin(long, 20_001) == Thinned(long)
    lanes = tuple(replace(kernel, lane=lane) for lane in range(3) for kernel in long.intervals[:-1])
    assert len(thin(replace(long, intervals=lanes), 900).timeline.intervals) == 900  # which lanes share
