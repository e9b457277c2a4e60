"""Calls of a kernel that are timed beside others' ways to do the same: what `bench.kernels` and `bench.gpu` share.

Bytes are those of the payload, what has to be read and written at the least, whatever a contestant really moves: a way
with an intermediate buffer shows as slow, not as busy. All contestants work on the same tensors, in an order that
changes from round to round, and each finds them out of the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench import harness

# Everyone is a fraction of the first, a plain copy of as many bytes.
CEILING, FASTDDP, OPERATORS = "copy_", "fastddp", "operators"

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Job:
    """One operation on tensors that are there: by contestant what is timed, the plain copy first."""

    columns: harness.Row  # what was measured
    payload_bytes: int
    calls: Calls
    wrong: Collection[str]  # contestants
    # Launches, and uploads of tables of addresses, up to now; of contestants that count them.
    counts: Mapping[str, Callable[[], tuple[int, int]]] = field(default_factory=dict)

    def row(self, contestant: str, seconds: Mapping[str, Sequence[float]]) -> harness.Row:
        """One contestant's, of the seconds of all."""
        percentiles = harness.Percentiles.of(seconds[contestant])
        times = {
            **percentiles.columns("us", 1e6),
            "gb_per_s": self.payload_bytes / percentiles.median / 1e9,
            "fraction_of_copy": 1 / harness.paired_ratio(seconds[contestant], seconds[CEILING]),
        }
        facts = self.columns | {"payload_bytes": self.payload_bytes, "contestant": contestant}
        result = "WRONG" if contestant in self.wrong else "right"
        return facts | harness.rounded(times, 4) | {"result": result}


@dataclass(frozen=True)
class Family:
    """The jobs of one kernel, or of a few that belong together."""

    name: str
    about: str
    kind: str  # of its rows in bench.gpu
    keys: tuple[str, ...]  # the columns that tell its jobs apart
    # For a device, perhaps with little work: in words what comes next, and what makes it.
    jobs: Callable[[torch.device, bool], Iterator[tuple[str, Callable[[], list[Job]]]]]


def plain_copy(payload_bytes: int, device: torch.device) -> Calls:
    """The ceiling: half of the bytes read, half written."""
    source, destination = (torch.rand(payload_bytes // 8, device=device) for _ in range(2))
    return {CEILING: partial(destination.copy_, source)}


def name_of(dtype: torch.dtype) -> str:
    """As rows have it."""
    return str(dtype).removeprefix("torch.")


def time_calls(calls: Calls, rounds: int, eviction: torch.Tensor) -> dict[str, list[float]]:
    """On the CPU: seconds of each call, by contestant; a round that does not count goes first."""
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _, number, index in harness.turns(len(names), range(-1, rounds)):
        eviction.sum()
        start = time.perf_counter()
        calls[names[index]]()
        seconds = time.perf_counter() - start
        if number >= 0:
            samples[names[index]].append(seconds)
    return samples


def table(rows: Sequence[harness.Row], family: Family, title: str) -> Any:
    """A line for each job: µs of each contestant, and how near fastddp comes to the ceilings."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    ceilings = {"of copy_": "fraction_of_copy", "of ceiling": "fraction_of_ceiling"}
    cells = []
    for key, group in harness.grouped(rows, *family.keys).items():
        line = {row["contestant"]: f"{row['median_us']:.1f}" + _wrong(row) for row in group}
        fast = next(row for row in group if row["contestant"] == FASTDDP)
        near = [f"{100 * fast[column]:.0f} %" for column in ceilings.values() if column in fast]
        cells.append([*map(str, key), *(line.get(name, "-") for name in names), *near])
    headings = [heading for heading, column in ceilings.items() if column in rows[0]]
    about = f"{family.about}: {title}; µs, median of {rows[0]['rounds']} calls, cold caches"
    return harness.table(about, [*family.keys, *names, *headings], cells, left=len(family.keys))


def _wrong(row: harness.Row) -> str:
    return " WRONG" if row["result"] == "WRONG" else ""
