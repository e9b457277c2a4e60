"""Fewer intervals than a trace has: those narrower than a pixel are drawn together with their neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from fastddp.tools.trace.report import Interval, Timeline, What
from fastddp.tools.trace.wording import plural, shortened

MERGED: frozenset[What] = frozenset({"compute", "copy"})  # what concerns a bucket is never merged


@dataclass(frozen=True)
class Thinned:
    """A timeline that can be drawn."""

    timeline: Timeline
    merged: int = 0  # how many intervals of the recorded timeline are not drawn one by one
    pixel: float = 0.0  # ms below which intervals were merged

    @property
    def note(self) -> str | None:
        """What a reader has to know; None: everything is drawn."""
        if not self.merged:
            return None
        return (
            f"{plural(self.merged, 'interval')} of compute shorter than {self.pixel * 1e3:,.1f} µs are drawn together "
            "with their neighbours."
        )


def thin(timeline: Timeline, most: int) -> Thinned:
    """At most ``most`` intervals of compute. If there are few enough, none are merged.

    Pixels are so wide that all lanes together have ``most`` of them. So the merged intervals fit, one a pixel, and so
    do those longer than a pixel.
    """
    lanes = {(interval.lane, interval.what) for interval in timeline.intervals if interval.what in MERGED}
    if len(timeline.intervals) <= most or not lanes:
        return Thinned(timeline)
    return merge(timeline, timeline.length * len(lanes) / most)


def merge(timeline: Timeline, pixel: float) -> Thinned:
    """Merge short intervals of a lane that begin in one pixel."""
    drawn: list[Interval] = []
    short: list[Interval] = []
    for interval in timeline.intervals:
        is_short = interval.what in MERGED and interval.end - interval.start < pixel
        (short if is_short else drawn).append(interval)
    merged = 0
    short.sort(key=lambda interval: (interval.lane, interval.what, interval.start))
    for _, of_pixel in groupby(short, lambda interval: (interval.lane, interval.what, interval.start // pixel)):
        run = list(of_pixel)
        if len(run) == 1:
            drawn += run
            continue
        longest = max(run, key=lambda interval: interval.end - interval.start)
        name = f"{len(run):,} short ones, the longest: {shortened(longest.name, 80)}"
        drawn.append(replace(run[0], end=max(interval.end for interval in run), name=name, bucket=None))
        merged += len(run)
    return Thinned(replace(timeline, intervals=tuple(drawn)), merged, pixel)
