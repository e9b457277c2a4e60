"""The page in a real browser, opened as a file: it is drawn, can be zoomed, and asks nobody for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trace_reports
from browser import CHROMIUM, WHERE_TO_GET_IT, Browser, browser
from fastddp.tools.trace.page import write_page
from fastddp.tools.trace.report import Report

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WHERE_TO_GET_IT), pytest.mark.tier("nightly")]
Opened = Callable[..., Browser]

BARS = "document.querySelectorAll('.figure .bars .point').length"
ZOOM = "document.getElementById('timeline-0').layout.xaxis.range"
CAPTION = "document.getElementById('timeline-0-caption').textContent"
INK = {"light": "rgb(29, 35, 41)", "dark": "rgb(228, 232, 236)"}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Iterator[Opened]:

    def of(*reports: Report, width: int = 1280) -> Browser:
        write_page(tmp_path / "page.html", reports)
        chromium.open(tmp_path / "page.html", width=width)
        return chromium

    yield of
    assert chromium.errors == []
    assert chromium.requests == [(tmp_path / "page.html").as_uri()]


def test_figures_are_drawn_and_a_mouse_zooms_into_the_timeline_of_any_rank_and_out_again(opened: Opened) -> None:
    run = trace_reports.report(ranks=3)
    page = opened(run)
    assert page.evaluate(BARS) == 4 * 4 + len(run.timelines[0].intervals)
    assert page.evaluate(CAPTION).startswith("Step 12 of rank 0, ")
    whole = page.evaluate(ZOOM)
    page.evaluate("document.getElementById('timeline-0').scrollIntoView()")
    rectangle = "document.querySelector('#timeline-0 .nsewdrag').getBoundingClientRect()"
    x, y, width, height = page.evaluate(f"(({{x, y, width, height}}) => [x, y, width, height])({rectangle})")
    page.drag(x + 0.25 * width, x + 0.5 * width, y + height / 2)
    page.wait_for(f"{ZOOM}[0] > 0")
    zoomed = page.evaluate(ZOOM)
    assert zoomed == pytest.approx([0.25 * whole[1], 0.5 * whole[1]], rel=0.05)
    page.evaluate(
        "(() => { const s = document.querySelector('select'); s.value = 'timeline-0-2';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    page.wait_for(f"{CAPTION}.startsWith('Step 12 of rank 2, ')")
    assert page.evaluate(ZOOM) == zoomed
    page.evaluate("document.querySelector('#timeline-0 [data-title=\"Reset axes\"]').click()")
    page.wait_for(f"{ZOOM}[0] === 0")
    assert page.evaluate(ZOOM) == whole


def test_a_click_sorts_a_table_and_another_turns_it_around(opened: Opened) -> None:
    page = opened(trace_reports.report(buckets=12))

    def sorted_by(column: int) -> list[float]:
        table = "document.querySelectorAll('table')[0]"
        page.evaluate(f"{table}.tHead.rows[0].cells[{column}].click()")
        values = f"[...{table}.tBodies[0].rows].map((row) => row.cells[{column}].dataset.value)"
        return [float(value) for value in page.evaluate(values)]

    assert sorted_by(0) == list(reversed(range(12)))
    assert sorted_by(0) == list(range(12))
    durations = sorted_by(7)
    assert durations == sorted(durations, reverse=True)


def test_hostile_names_run_nothing_and_are_shown(opened: Opened) -> None:
    page = opened(trace_reports.evil())
    assert page.evaluate("[document.querySelectorAll('script').length, document.links.length]") == [3, 0]
    for shown in ("td:nth-child(2)", "#timeline-0 .annotation-text"):
        assert page.evaluate(f"document.querySelector('{shown}').textContent").startswith("<script>x()</script>")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_of_the_window(opened: Opened, width: int) -> None:
    page = opened(trace_reports.of_torch("before"), trace_reports.report("after"), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_dark_page_has_light_letters_and_is_printed_with_dark_ones(opened: Opened) -> None:
    page = opened(trace_reports.report(ranks=1))
    for scheme, media, ink in (("light", "screen", "light"), ("dark", "screen", "dark"), ("dark", "print", "light")):
        page.prefer(scheme, media)
        for of in (".annotation-text", ".xtick text", ".xtitle"):
            page.wait_for(f"getComputedStyle(document.querySelector('#timeline-0 {of}')).fill === {INK[ink]!r}")
    page.prefer("light")
