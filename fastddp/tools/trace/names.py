"""Reads the names that fastddp gives to profilers: ``fastddp.WHAT key=value ...``.

``csrc/observe/ranges.cpp`` makes them, and docs/traces.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

PREFIX = "fastddp."
PROFILER_STEP = "ProfilerStep#"  # of torch.profiler
FORWARD = "DistributedDataParallel.forward"  # of both wrappers
LOADER = "enumerate(DataLoader)"  # torch's, while the script waits for its next batch
STATUS = "fastddp.status"  # ends a step, with a few bytes
GATHER = "fastddp.gather"  # of parameters
OF_NO_BUCKET = (STATUS, GATHER)  # what is launched in these ranges is none of a bucket's gradients
NUMBERS = frozenset({"bucket", "of", "collective", "tick", "bytes"})
MOST_BUCKETS = 100_000  # a larger number is damage, and its tables would fill the memory
WORDS = frozenset({"wire", "first", "last", "parameter"})


def marks(step_range: str | None = None) -> tuple[str, ...]:
    """How the names of ranges begin that are read; ``step_range``: the user's own."""
    return (PREFIX, FORWARD, PROFILER_STEP, LOADER, *([step_range] if step_range else []))


@dataclass(frozen=True)
class Name:
    """What a range of fastddp is about; None: its name does not say."""

    what: str  # step, window, gradient, ready, pack, measure, collective, wait, unpack, project, status,
    # gather, await
    bucket: int | None = None
    of: int | None = None  # buckets
    collective: int | None = None  # which of the bucket's
    tick: int | None = None
    bytes: int | None = None  # of the wire
    wire: str | None = None  # its dtype
    first: str | None = None  # parameter of the bucket
    last: str | None = None
    parameter: str | None = None


@lru_cache(maxsize=1 << 16)
def parse(text: str) -> Name | None:
    """The name in ``text``; None if it is not fastddp's, or damaged. Keys of other versions are left out."""
    if not text.startswith(PREFIX):
        return None
    what, *pairs = text[len(PREFIX) :].split(" ")
    values: dict[str, str] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    numbers = {key: int(value) for key, value in values.items() if key in NUMBERS and _is_number(value)}
    if not numbers.get("bucket", -1) < min(numbers.get("of", MOST_BUCKETS), MOST_BUCKETS):
        return None
    words = {key: value for key, value in values.items() if key in WORDS}
    return Name(what, **numbers, **words)  # type: ignore[arg-type]


def _is_number(value: str) -> bool:
    return value.isdecimal() and len(value) < 19  # 64 bits
