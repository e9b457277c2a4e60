"""Sets of moments: sorted, disjoint intervals as an array of shape (n, 2), fp64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def union(starts: Floats, ends: Floats) -> Floats:
    """All moments that lie in one of the intervals."""
    longer = ends > starts
    starts, ends = starts[longer], ends[longer]
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = starts[1:] > reach[:-1]
    return np.stack([starts[begins], reach[np.roll(begins, -1)]], axis=1)


def unite(sets: list[Floats]) -> Floats:
    """All moments of any of the sets."""
    both = np.concatenate([*sets, np.empty((0, 2))])
    return union(both[:, 0], both[:, 1])


def contains(intervals: Floats, moments: Floats) -> NDArray[np.bool_]:
    """Whether each moment lies in the set."""
    begun = np.searchsorted(intervals[:, 0], moments, side="right")
    ended = np.searchsorted(intervals[:, 1], moments, side="right")
    return begun > ended


def intersection(a: Floats, b: Floats) -> Floats:
    """Moments of both sets."""
    lefts, rights = _pieces(a, b)
    kept = contains(a, lefts) & contains(b, lefts)
    return union(lefts[kept], rights[kept])


def difference(a: Floats, b: Floats) -> Floats:
    """Moments of ``a`` that are not in ``b``."""
    lefts, rights = _pieces(a, b)
    kept = contains(a, lefts) & ~contains(b, lefts)
    return union(lefts[kept], rights[kept])


def _pieces(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Starts and ends of the pieces into which all edges cut time. Each is entirely inside a set, or outside."""
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    return edges[:-1], edges[1:]


def length_before(intervals: Floats, moments: Floats) -> Floats:
    """How much of the set lies before each moment."""
    totals = np.concatenate([[0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
    ends = np.concatenate([[-np.inf], intervals[:, 1]])
    begun = np.searchsorted(intervals[:, 0], moments, side="right")
    return totals[begun] - np.maximum(ends[begun] - moments, 0.0)


def length_between(intervals: Floats, starts: Floats, ends: Floats) -> Floats:
    """How much of the set lies in each of the intervals [start, end)."""
    return length_before(intervals, ends) - length_before(intervals, starts)


def open_between(intervals: Floats, edges: Floats) -> tuple[Floats, Integers]:
    """Sorted moments (both ends of intervals, and ``edges``), and how many intervals are open after each."""
    moments = np.unique(np.concatenate([intervals.ravel(), edges]))
    begun = np.searchsorted(np.sort(intervals[:, 0]), moments[:-1], side="right")
    ended = np.searchsorted(np.sort(intervals[:, 1]), moments[:-1], side="right")
    return moments, begun - ended
