"""The colours of all drawings, and their order. All can be told from white and from near-black."""

from __future__ import annotations

from fastddp.tools.trace.report import What

SPLIT = {"compute": "#4c78a8", "overlapped": "#72a65c", "exposed": "#e8853d", "copy": "#a89f8d", "idle": "#c4c8cd"}

FIXED = {"forward": "#b9cbe0", "compute": "#8496aa", "copy": "#a89f8d"}
NO_BUCKET = "#6e6e78"  # a collective of something else

# Neighbours in this list, which are neighbours in time, differ most.
BUCKETS = ["#e8853d", "#3a8fb7", "#c94f6d", "#5f9e4f", "#8e6bbf", "#d3a62a", "#2f9c8f", "#b5653a", "#d77fb4", "#5b6fc9"]

# A kind that may lie inside another is drawn later, and less high.
IN_DRAWING_ORDER: tuple[What, ...] = ("forward", "compute", "copy", "wait", "pack", "unpack", "collective")
HIGH: tuple[What, ...] = ("forward", "wait", "collective")


def of_bucket(bucket: int | None) -> str:
    """Buckets far from each other may share a colour."""
    return NO_BUCKET if bucket is None else BUCKETS[bucket % len(BUCKETS)]


def of_interval(what: What, bucket: int | None) -> str:
    """Only intervals about a bucket have its colour."""
    return FIXED.get(what) or of_bucket(bucket)
