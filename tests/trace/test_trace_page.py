"""The page of a report: what stands in it, in which order, and that nothing from a file is more than text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

import trace_reports
from fastddp.tools.trace import colours
from fastddp.tools.trace.page import MOST_BARS_OF_A_PAGE, page, write_page
from fastddp.tools.trace.report import Report, Timeline
from fastddp.tools.trace.wording import headline

WITHOUT_END = {"meta", "link", "img", "br", "hr", "input"}


class Parser(HTMLParser):
    """A strict one: what begins has to end, in the right order."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in WITHOUT_END:
            self.tree.end(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.tree.end(tag).tag == tag

    def handle_data(self, data: str) -> None:
        self.tree.data(data)


def html_of(*reports: Report) -> str:
    return page(reports).replace(get_plotlyjs(), "")


def parsed(*reports: Report) -> Element:
    parser = Parser()
    parser.feed(html_of(*reports))
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


def test_tables_have_a_row_for_each_bucket_with_its_colour_and_for_each_rank_with_its_file() -> None:
    document = parsed(trace_reports.report(buckets=12, ranks=3))
    _, *rows = table(document, 0)
    assert [row[0] for row in rows] == [str(number) for number in range(12)]
    assert rows[1][1:4] == ["blocks.2.weight … blocks.3.weight", "25.0 MiB", "float32"]
    swatches = [swatch.get("style") for swatch in next(document.iter("table")).iter("span")]
    assert swatches == [f"background:{colours.of_bucket(i)}" for i in range(12)]
    ranks = [(row[0], row[-1]) for row in table(document, 1)]
    assert ranks[1:] == [*((str(i), f"traces/rank{i}.json") for i in range(3)), ("mean", "–")]


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
    found = re.fullmatch(
        r"<b>nccl\w+\(\)</b><br>collective of bucket 1, 25.0 MiB<br>starts at (.*) ms, takes (.*) ms", text
    )
    assert found is not None
    shown = [float(number) for number in found.groups()]
    assert shown == pytest.approx([run.buckets[1].start, run.buckets[1].duration], abs=1e-3)


@pytest.mark.tier("nightly")
def test_a_page_of_64_ranks_stays_small() -> None:
    long = trace_reports.with_many_intervals(20_000)
    run = trace_reports.with_many_ranks(64, *(replace(long, rank=rank) for rank in range(64)))
    drawn = figures(parsed(run))
    bars = sum(len(trace["x"]) for name, one in drawn.items() if name != "split" for trace in one["figure"]["data"])
    assert 64 * 500 < bars < MOST_BARS_OF_A_PAGE + 64
    assert len(page([run])) < 20e6
    assert drawn["split"]["figure"]["layout"]["height"] < 800


@pytest.mark.parametrize("reports", [[trace_reports.report()], [trace_reports.of_torch(), trace_reports.report()]])
def test_plotly_knows_all_that_figures_say(reports: list[Report]) -> None:
    for entry in figures(parsed(*reports)).values():
        go.Figure(entry["figure"])  # raises for what it does not know


@pytest.mark.parametrize("runs", [1, 2])
def test_what_comes_from_files_is_text_wherever_it_stands(tmp_path: Path, runs: int) -> None:
    document = parsed(*[trace_reports.evil()] * runs)
    clean = parsed(*[trace_reports.report(ranks=2, buckets=2)] * runs)
    for tag in ("script", "b", "td", "li", "style"):
        assert len(list(document.iter(tag))) == len(list(clean.iter(tag)))
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
    assert not re.findall(r"https?://|url\(|@import", html_of(trace_reports.report()))
    (policy,) = (meta.attrib["content"] for meta in document.iter("meta") if "http-equiv" in meta.attrib)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "script-src", "style-src", "img-src"}
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}=' 'sha256-[\w+/]{43}='", rules["script-src"])
