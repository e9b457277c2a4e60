"""What ranks tell each other about a window that some cannot finish, through the store of their process group.

Note [Reports of a window]
A rank whose backward ended without some gradients asks. A rank that has waited in backward for long only reports. Each
appends a few bytes to one log. The first rank that asks reads the log until all ranks are in it or its patience ends,
and writes down what it found. The other askers wait for this answer. So a report costs a rank four operations of the
store, and the first asker a dozen more. No rank has to read from every other one.

A rank deletes its entries after a later forward, which shows that the window is over on all ranks: ranks that had not
sent all of it were waited for. While no gradient is missing, nobody writes, reads or deletes anything.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks at the log
_FOR_THE_ANSWER = 1.0  # seconds that it may take to write down and to send


@dataclass(frozen=True)
class Report:
    """What one rank has in a window."""

    lacking: frozenset[int]
    """Parameters without a gradient."""
    waits: bool
    """Whether the rank waits in backward, so that what it lacks may still come."""


Reports: TypeAlias = dict[int, Report]
"""By rank."""


class WindowLog:
    """The log of one window, as one rank reads and writes it.

    Args:
        store: of the process group.
        key: the same on all ranks, and of this window only.
        rank: this one.
        ranks: how many there are.

    Errors of the store are those of :class:`torch.distributed.Store`: a ``RuntimeError`` if nobody serves it.
    """

    def __init__(self, store: dist.Store, key: str, rank: int, ranks: int) -> None:
        self._store = store
        self._log, self._askers, self._answer = (f"{key}/{part}" for part in ("log", "askers", "answer"))
        self._rank = rank
        self._ranks = ranks
        self._is_first = False

    def write(self, report: Report) -> None:
        """Append what this rank has; of several reports the last one counts."""
        self._store.append(self._log, encoded({self._rank: report}))  # type: ignore[attr-defined]

    def ask(self, report: Report, patience: float) -> Reports:
        """Write, and return the reports that other ranks have written within ``patience`` seconds."""
        self.write(report)
        self._is_first = self._store.add(self._askers, 1) == 1
        if self._is_first:
            found = self._read_until_complete(patience)
            self._store.set(self._answer, encoded(found))
        else:
            found = self._answered(patience + _FOR_THE_ANSWER)
            if self._rank not in found:  # the first asker died, or asked long ago
                found |= self._read()
        found.pop(self._rank, None)
        return found

    def delete(self) -> None:
        """Delete what this rank has written."""
        for key in (self._log, self._askers, self._answer) if self._is_first else (self._log,):
            self._store.delete_key(key)

    def _read_until_complete(self, patience: float) -> Reports:
        deadline = time.monotonic() + patience
        pause = _FIRST_PAUSE
        found = self._read()
        while len(found) < self._ranks and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
            found = self._read()
        return found

    def _answered(self, patience: float) -> Reports:
        try:
            self._store.wait([self._answer], timedelta(seconds=patience))
        except RuntimeError:  # no answer; or no store, and the next read raises
            return {}
        return decoded(self._store.get(self._answer))

    def _read(self) -> Reports:
        return decoded(self._store.get(self._log))


# Note [Numbers of parameters and ranks]
# Ranges, "0-3,7", or the same as bits if that is shorter: "x8f". A report is ranks, "+" (they wait) or ":" (they do
# not), and parameters. Reports follow each other: "0,2-9:4-5;1+7;".


def encoded(reports: Reports) -> str:
    """As text: equal reports are written once."""
    alike: dict[Report, list[int]] = {}
    for rank, report in sorted(reports.items()):
        alike.setdefault(report, []).append(rank)
    return "".join(
        f"{_numbers(ranks)}{'+' if report.waits else ':'}{_numbers(report.lacking)};" for report, ranks in alike.items()
    )


def decoded(text: bytes) -> Reports:
    """The opposite of :func:`encoded`. A rank's last report counts."""
    reports: Reports = {}
    for entry in text.decode().split(";")[:-1]:
        ranks, waits, lacking = entry.partition("+") if "+" in entry else entry.partition(":")
        report = Report(frozenset(_in(lacking)), waits == "+")
        reports.update(dict.fromkeys(_in(ranks), report))
    return reports


def _numbers(numbers: Collection[int]) -> str:
    ordered = sorted(numbers)
    firsts = [number for place, number in enumerate(ordered) if place == 0 or ordered[place - 1] != number - 1]
    lasts = [number for place, number in enumerate(ordered, 1) if place == len(ordered) or ordered[place] != number + 1]
    ranges = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
    if not ordered or len(ranges) <= ordered[-1] // 4 + 2:
        return ranges
    return f"x{sum(1 << number for number in ordered):x}"


def _in(text: str) -> Iterator[int]:
    if text.startswith("x"):
        bits = int(text[1:], 16)
        yield from (number for number in range(bits.bit_length()) if bits >> number & 1)
    elif text:
        for run in text.split(","):
            first, _, last = run.partition("-")
            yield from range(int(first), int(last or first) + 1)
