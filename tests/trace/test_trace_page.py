"""The page of a report: what stands in it, in which order, and that nothing from a file is more than text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

import trace_reports
from fastddp.trace import colours
from fastddp.trace.page import MOST_BARS, MOST_BARS_OF_A_PAGE, page, write_page
from fastddp.trace.report import Interval, Report, Timeline
from fastddp.trace.wording import headline

WITHOUT_END = {"meta", "link", "img", "br", "hr", "input"}
EVIL = "<script>x()</script>\"'&amp;<b>$x$\x1b\ud800\u2028"


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Elements inside, in their order."""
        found = []
        for child in self.children:
            if child.tag == tag and attributes.items() <= child.attributes.items():
                found.append(child)
            found += child.all(tag, **attributes)
        return found

    @property
    def whole_text(self) -> str:
        return " ".join(self.text.split()).replace("\u00a0", " ")


class Parser(HTMLParser):
    """A strict one: what begins has to end, in the right order."""

    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("document", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in WITHOUT_END:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data if element.tag != "document" else ""


def parse(html: str) -> Element:
    parser = Parser()
    parser.feed(html)
    parser.close()
    (document,) = parser.open
    return document


def parsed(*reports: Report) -> Element:
    """Without plotly's JavaScript, which takes long to read."""
    return parse(page(reports).replace(get_plotlyjs(), ""))


def texts(elements: Sequence[Element]) -> list[str]:
    return [element.whole_text for element in elements]


def figures(document: Element) -> dict[str, Any]:
    (element,) = document.all("script", id="figures")
    assert "<" not in element.text  # so that nothing in it can end the script
    return json.loads(element.text)


def table(document: Element, number: int) -> list[list[str]]:
    return [texts(row.all("th") + row.all("td")) for row in document.all("table")[number].all("tr")]


def test_the_page_of_a_run_has_its_parts_in_their_order() -> None:
    run = trace_reports.report("gpt", ranks=2)
    document = parsed(run)
    assert texts(document.all("title")) == ["gpt"]
    assert texts(document.all("h1")) == [headline(run)]
    assert texts(document.all("h2")) == [
        "Where a step's time goes",
        "Advice",
        "One step",
        "Buckets",
        "Collectives",
        "Stragglers",
        "Notes",
        "Definitions",
    ]
    assert texts(document.all("li")) == [*run.advice, *run.stragglers, *run.notes]
    assert [div.attributes["data-figure"] for div in document.all("div", role="figure")] == ["split", "timeline-0-0"]
    assert [option.whole_text for option in document.all("option")] == ["rank 0", "rank 1"]
    assert figures(document).keys() == {"split", "timeline-0-0", "timeline-0-1"}


def test_the_table_of_buckets_has_a_row_for_each_with_its_colour() -> None:
    run = trace_reports.report(buckets=12)
    document = parsed(run)
    head, *rows = table(document, 0)
    assert head[:4] == ["bucket", "parameters", "size", "wire"]
    assert [row[0] for row in rows] == [str(number) for number in range(12)]
    assert rows[1][1:4] == ["blocks.2.weight … blocks.3.weight", "25.0 MiB", "float32"]
    swatches = document.all("table")[0].all("span")
    assert [swatch.attributes["style"] for swatch in swatches] == [
        f"background:{colours.of_bucket(i)}" for i in range(12)
    ]


def test_the_table_of_ranks_names_their_files() -> None:
    head, *rows = table(parsed(trace_reports.report(ranks=3)), 1)
    assert head[-1] == "file"
    assert [(row[0], row[-1]) for row in rows[:-1]] == [(str(i), f"traces/rank{i}.json") for i in range(3)]
    assert (rows[-1][0], rows[-1][-1]) == ("mean", "–")


def test_what_a_trace_lacks_is_said() -> None:
    run = replace(trace_reports.empty(), recorder="Nsight Systems", world_size=1)
    text = parsed(run).all("main")[0].whole_text
    for sentence in (
        "Nothing in this trace asks for a change.",
        "The trace has no complete step to draw.",
        "The trace names no buckets.",
        "One rank was read.",
        "Nothing was missing, guessed or left out.",
    ):
        assert sentence in text


def test_several_runs_are_compared_before_each_is_shown() -> None:
    document = parsed(trace_reports.of_torch("before"), trace_reports.report("after", bandwidth=6.0))
    title, *runs = texts(document.all("h1"))
    assert title.startswith("A step of “after” takes")
    assert runs == ["before", "after"]
    assert texts(document.all("h2"))[:4] == ["What changed", "Where a step's time goes", "One step of each", "Advice"]
    assert [row[0] for row in table(document, 0)[1:4]] == ["step, mean", "compute only", "overlapped"]
    assert "It ran under fastddp, not under torch's DDP" in document.all("ul")[0].whole_text
    drawn = figures(document)
    assert drawn["split"]["figure"]["layout"]["yaxis"]["ticktext"][:3] == [
        "<b>mean</b> · before",
        "<b>mean</b> · after",
        "rank 0 · before",
    ]
    ends = {drawn[f"timeline-{run}-0"]["figure"]["layout"]["xaxis"]["range"][1] for run in (0, 1)}
    assert len(ends) == 1  # one axis for both


def test_the_split_has_a_bar_for_the_mean_and_each_rank() -> None:
    run = trace_reports.report(ranks=3)
    figure = figures(parsed(run))["split"]["figure"]
    assert figure["layout"]["yaxis"]["ticktext"] == ["<b>mean</b>", "rank 0", "rank 1", "rank 2"]
    assert [trace["name"] for trace in figure["data"]] == ["compute only", "overlapped", "exposed", "idle"]
    exposed = figure["data"][2]["x"]
    assert exposed == [run.split.exposed, *(rank.split.exposed for rank in run.ranks)]


def test_one_rank_has_one_bar() -> None:
    assert figures(parsed(trace_reports.report(ranks=1)))["split"]["figure"]["layout"]["yaxis"]["ticktext"] == [
        "rank 0"
    ]


def test_every_interval_is_drawn_on_its_lane_in_the_colour_of_its_bucket() -> None:
    run = trace_reports.report(ranks=1)
    (timeline,) = run.timelines
    traces = figures(parsed(run))["timeline-0-0"]["figure"]["data"]
    drawn = {
        (trace["name"], lane, base, colour)
        for trace in traces
        for lane, base, colour in zip(trace["y"], trace["base"], trace["marker"]["color"], strict=True)
    }
    assert drawn == {
        (i.what, i.lane, round(i.start, 6), colours.of_interval(i.what, i.bucket)) for i in timeline.intervals
    }


def test_the_pointer_shows_name_bucket_bytes_start_and_duration() -> None:
    run = trace_reports.report(ranks=1)
    collective = Interval(2, 1.25, 3.5, "collective", "nccl<float>", 3)
    run = replace(run, timelines=(replace(run.timelines[0], intervals=(collective,)),))
    (trace,) = figures(parsed(run))["timeline-0-0"]["figure"]["data"]
    assert trace["hovertext"] == [
        "<b>nccl&lt;float&gt;</b><br>collective of bucket 3, 25.0 MiB<br>starts at 1.250 ms, takes 2.250 ms"
    ]
    assert trace["text"] == ["3"]


def test_a_long_timeline_is_thinned_and_says_so() -> None:
    run = replace(trace_reports.report(ranks=1), timelines=(trace_reports.with_many_intervals(20_000),))
    entry = figures(parsed(run))["timeline-0-0"]
    assert sum(len(trace["x"]) for trace in entry["figure"]["data"]) <= MOST_BARS + 1
    assert entry["caption"] == (
        "Step 3 of rank 0, 100 ms. 20,000 intervals of compute shorter than 25.0 µs are drawn together with their "
        "neighbours."
    )


@pytest.mark.tier("nightly")
def test_a_page_of_64_ranks_stays_small() -> None:
    long = trace_reports.with_many_intervals(20_000)
    small = trace_reports.report(ranks=1, buckets=1)
    ranks = tuple(replace(small.ranks[0], rank=rank) for rank in range(64))
    run = replace(small, world_size=64, ranks=ranks, timelines=tuple(replace(long, rank=rank) for rank in range(64)))
    html = page([run])
    drawn = figures(parse(html.replace(get_plotlyjs(), "")))
    bars = sum(len(trace["x"]) for name, one in drawn.items() if name != "split" for trace in one["figure"]["data"])
    assert 64 * 500 < bars < MOST_BARS_OF_A_PAGE + 64
    assert len(html) < 20e6
    assert drawn["split"]["figure"]["layout"]["height"] < 800


@pytest.mark.parametrize("reports", [[trace_reports.report()], [trace_reports.of_torch(), trace_reports.report()]])
def test_plotly_knows_all_that_figures_say(reports: list[Report]) -> None:
    for entry in figures(parsed(*reports)).values():
        go.Figure(entry["figure"])  # raises for what it does not know


def evil_report() -> Report:
    """Everything that can come from a file or an argument is hostile."""
    run = trace_reports.report(EVIL, ranks=2, buckets=2, parameter=EVIL)
    timelines = tuple(
        replace(
            timeline,
            lanes=tuple(f"{EVIL}{lane}" for lane in timeline.lanes),
            intervals=tuple(replace(interval, name=EVIL) for interval in timeline.intervals),
        )
        for timeline in run.timelines
    )
    return replace(
        run,
        timelines=timelines,
        ranks=tuple(replace(rank, source=EVIL) for rank in run.ranks),
        buckets=tuple(replace(bucket, wire=EVIL) for bucket in run.buckets),
        stragglers=(EVIL,),
        advice=(EVIL, EVIL),
        notes=(EVIL,),
    )


@pytest.mark.parametrize("runs", [1, 2])
def test_what_comes_from_files_is_text_wherever_it_stands(runs: int) -> None:
    document = parsed(*[evil_report()] * runs)
    clean = parsed(*[trace_reports.report(ranks=2, buckets=2)] * runs)
    for tag in ("script", "b", "td", "li", "style"):
        assert len(document.all(tag)) == len(clean.all(tag))
    shown = "<script>x()</script>\"'&amp;<b>$x$\ufffd\ufffd"
    assert all(shown in text for text in texts(document.all("title") + document.all("li")[-1:]))
    assert shown in table(document, -2)[1][1]
    for name, entry in figures(document).items():
        for text in re.findall(r"<[^>]*>", json.dumps(entry)):
            assert text in ("<b>", "</b>", "<br>", "<extra>", "</extra>"), name


def test_a_page_asks_nobody_for_anything() -> None:
    document = parsed(trace_reports.report())
    everything = document.all("html")[0]

    def elements(inside: Element) -> list[Element]:
        return [inner for child in inside.children for inner in (child, *elements(child))]

    for element in elements(everything):
        assert not {"src", "href", "srcset", "action", "data", "poster", "ping"} & element.attributes.keys()
        assert not any("http:" in (value or "") or "https:" in (value or "") for value in element.attributes.values())
    html = page([trace_reports.report()]).replace(get_plotlyjs(), "")
    assert not re.findall(r"https?://|url\(|@import", html)


def test_the_policy_lets_nothing_run_but_the_scripts_of_the_page() -> None:
    document = parsed(trace_reports.report())
    (policy,) = [meta.attributes["content"] for meta in document.all("meta") if "http-equiv" in meta.attributes]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "script-src", "style-src", "img-src"}
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}=' 'sha256-[\w+/]{43}='", rules["script-src"])


def test_the_file_is_utf_8_whatever_names_there_are(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", [evil_report()])
    assert "Definitions" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_no_report_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a report"):
        write_page(tmp_path / "page.html", [])


def test_a_report_without_ranks_or_time_has_a_page() -> None:
    nothing = Timeline(0, 0, (), (), 0.0)
    run = replace(trace_reports.empty(), wrapper="fastddp", timelines=(nothing,))
    assert "A step takes 0 ms" in parsed(run).all("h1")[0].whole_text
