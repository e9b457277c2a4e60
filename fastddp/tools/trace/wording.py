"""Numbers and sentences about a report, shared by tables, pages and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastddp.times.split import Split
from fastddp.tools.trace.names import OF_NO_BUCKET
from fastddp.tools.trace.report import BucketReport, RankReport, Report

UNKNOWN = "–"
LONGEST_NAME = 40  # characters of a parameter's name in a table
PARTS = {  # of a Split, in the order in which they are shown
    "compute": "compute only",
    "overlapped": "overlapped",
    "exposed": "exposed",
    "copy": "copies",
    "idle": "idle",
}
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
UNIT = re.compile(r"(?<=\d) (?=%|(?:ms|µs|B|KiB|MiB|GB/s)\b)")
DEFINITIONS = (
    "On each rank the intervals of all compute (kernels of a device, operators on the CPU, fastddp's pack and unpack) "
    "are merged, and so are those of all collectives; waiting is neither. Compute only is the time with compute and no "
    "communication, overlapped that with both, exposed that with communication and no compute (what a step would save "
    "if communication took no time), copies that in which a device only copies or sets memory, idle that with none of "
    "them: they add up to the step."
)


def ms(value: float) -> str:
    """A time in ms, for a sentence: three digits, or all before the point."""
    digits = 0 if abs(value) >= 100 or value == 0 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} ms"


def in_words(value: float) -> str:
    """The change of a time in ms, for a sentence."""
    return f"{'+' if value >= 0 else '−'}{ms(abs(value))}"


def size(count: int | None) -> str:
    """A number of bytes."""
    if count is None:
        return UNKNOWN
    if count < 1024:
        return f"{count} B"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def percent(part: float, whole: float) -> str:
    """A part of a whole, rounded; 100 % (0 %) only if it is all (nothing)."""
    if whole == 0:
        return UNKNOWN
    ratio = part / whole
    if 0.995 <= ratio < 1:
        return "more than 99 %"
    if 0 < ratio < 0.005:
        return "less than 1 %"
    return f"{ratio:.0%}".replace("%", " %")


def plural(count: int, noun: str) -> str:
    """``3 buckets``, ``1 bucket``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shortened(text: str, length: int) -> str:
    """At most ``length`` characters. The middle is left out, because names differ at their ends."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def printable(text: str) -> str:
    """The text, with U+FFFD for characters that UTF-8 or fonts lack: control characters, halves of surrogate pairs."""
    return UNPRINTABLE.sub("\ufffd", text)


def unbroken(text: str) -> str:
    """The text, with no line break allowed between a number and its unit."""
    return UNIT.sub("\u00a0", text)


def parameters(bucket: BucketReport) -> str:
    """A bucket's parameters, by its first and last one; empty if the trace does not say."""
    ends = [shortened(name, LONGEST_NAME) for name in (bucket.first, bucket.last) if name is not None]
    return " … ".join(dict.fromkeys(ends))


def headline(report: Report) -> str:
    """A step in one or two sentences."""
    split = report.split
    step = f"A step takes {ms(split.step)}"
    if split.communication == 0:
        return f"{step}. No communication was recorded in it."
    hidden = f"{percent(split.overlapped, split.communication)} of its {ms(split.communication)} of communication"
    if split.exposed == 0:
        return f"{step}. All of its {ms(split.communication)} of communication is hidden behind compute."
    exposed = f"{ms(split.exposed)} is exposed, {percent(split.exposed, split.step)} of the step"
    return f"{step}. {hidden} is hidden behind compute; {exposed}{_blame(report)}."


def _blame(report: Report) -> str:
    """What has the largest share of the exposed time, on the mean over ranks."""
    exposed = [bucket for bucket in report.buckets if bucket.exposed > 0]
    worst = max(exposed, key=lambda bucket: (bucket.mean_exposed, bucket.exposed), default=None)
    others = [one for one in report.collectives if not one.of_buckets]
    other = max(others, key=lambda one: one.exposed, default=None)
    if other and other.exposed > (worst.mean_exposed if worst else 0.0):
        whose = other.kind if other.kind in OF_NO_BUCKET else f"{other.kind} of no bucket"
        return f". The largest share is that of {whose}: {ms(other.exposed)}"
    if worst is None:
        return ""
    return f". The largest share is that of bucket {worst.bucket}: {ms(worst.mean_exposed)}"


def wrapper(report: Report) -> str:
    """Whose buckets the run had."""
    return {"torch DDP": "torch's DDP", "unknown": "an unknown wrapper"}.get(report.wrapper, report.wrapper)


def setting(report: Report) -> str:
    """Ranks, wrapper, steps and recorder."""
    world = plural(report.world_size, "rank") if report.world_size else "number of ranks unknown"
    read = len(report.ranks)
    if report.world_size and read != report.world_size:
        world += f", of which {read} {'was' if read == 1 else 'were'} read"
    steps = sorted({len(rank.step_ms) for rank in report.ranks})
    counted = (
        plural(steps[0], "step") if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps" if steps else "no steps"
    )
    return f"{world} · {wrapper(report)} · {counted} · recorded by {report.recorder}"


def shown_parts(splits: Iterable[Split]) -> dict[str, str]:
    """The parts to show. Copies are left out if no split has any: on a CPU they are not known."""
    has_copies = any(split.copy for split in splits)
    return {field: name for field, name in PARTS.items() if field != "copy" or has_copies}


def collective_name(kind: str, of_buckets: bool) -> str:
    """``all_reduce of buckets``, ``broadcast``."""
    return f"{kind} of buckets" if of_buckets else kind


def quantile(values: tuple[float, ...], part: float) -> float:
    """The value below which a part, 0 to 1, of all values lies; ``values`` must not be empty."""
    return sorted(values)[round(part * (len(values) - 1))]


def all_steps(ranks: tuple[RankReport, ...]) -> tuple[float, ...]:
    """The times of all steps of all ranks."""
    return tuple(time for rank in ranks for time in rank.step_ms)
