"""What ranks tell each other about a window that cannot end: how much of the store it takes, and what can be known."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fastddp.window.reports import Report, Reports, WindowLog, decoded, encoded

LONG = 60.0  # seconds, of which none is used
MISSING = Report(frozenset({3, 4, 5}), waits=False)
NOTHING = Report(frozenset(), waits=True)


class CountedStore:
    """A store that counts what one rank asks it for, and the bytes of what that rank writes."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()
        self.written = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            if name in ("append", "set"):
                self.written += len(args[1])
            return getattr(self._store, name)(*args)

        return call


def ask_all(
    store: dist.Store, ranks: int, silent: int = 0, patience: float = LONG
) -> tuple[list[CountedStore], list[Reports], list[WindowLog]]:
    """All ranks but the last ``silent`` miss something, each in a thread of its own."""
    stores = [CountedStore(store) for _ in range(ranks - silent)]
    logs = [WindowLog(store, "window", rank, ranks) for rank, store in enumerate(stores)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(ranks) as pool:
        found = [*pool.map(lambda log: log.ask(MISSING, patience), logs)]
    return stores, found, logs


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_asks_by_four_calls_however_many_ranks_there_are_and_who_wrote_deletes(ranks: int) -> None:
    store = dist.HashStore()
    stores, found, logs = ask_all(store, ranks)
    for rank, reports in enumerate(found):
        assert reports == {other: MISSING for other in range(ranks) if other != rank}
    (first,) = [store for store in stores if store.calls["set"]]
    for other in stores:
        if other is not first:
            assert other.calls["append"] == other.calls["add"] == other.calls["wait"] == 1
            assert other.calls.total() <= 5  # once the answer; and the log, if that was written before this rank came
            assert other.written <= len("63:3-5;")
    assert first.calls.keys() == {"append", "add", "get", "set"}
    assert first.written <= len("63:3-5;") + len("0-63:3-5;")  # what ranks have in common is written once
    assert store.num_keys() == 3
    for log in logs:
        log.delete()
    assert store.num_keys() == 0
    assert sum(store.calls["delete_key"] for store in stores) == ranks + 2


@pytest.mark.tier("nightly")
def test_a_silent_rank_makes_nobody_but_the_first_read_the_log() -> None:
    stores, found, _ = ask_all(dist.HashStore(), 8, silent=1, patience=5.0)
    for rank, reports in enumerate(found):
        assert reports == {other: MISSING for other in range(7) if other != rank}
    assert sorted(store.calls["get"] > 1 for store in stores) == [False] * 6 + [True]


def test_the_log_is_read_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("fastddp.window.reports.time.sleep", pauses.append)
    monkeypatch.setattr("fastddp.window.reports.time.monotonic", lambda: sum(pauses))
    assert WindowLog(dist.HashStore(), "window", 0, 16_384).ask(MISSING, 5.0) == {}
    assert len(pauses) < 20
    assert 5.0 <= sum(pauses) <= 5.5


def test_silent_ranks_are_none_of_those_found_and_the_last_report_of_a_rank_counts() -> None:
    store = dist.HashStore()
    for rank, report in [(1, NOTHING), (3, NOTHING), (3, MISSING)]:
        WindowLog(store, "window", rank, 8).write(report)
    assert WindowLog(store, "window", 0, 8).ask(MISSING, 0.1) == {1: NOTHING, 3: MISSING}


def test_if_the_rank_that_reads_for_all_dies_the_others_read_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastddp.window.reports._FOR_THE_ANSWER", 0.0)
    store = dist.HashStore()
    store.add("window/askers", 1)
    WindowLog(store, "window", 2, 3).write(NOTHING)
    assert WindowLog(store, "window", 1, 3).ask(MISSING, 0.1) == {2: NOTHING}


def test_who_asks_later_also_finds_what_came_after_the_answer() -> None:
    store = dist.HashStore()
    assert WindowLog(store, "window", 0, 3).ask(MISSING, 0.1) == {}
    WindowLog(store, "window", 1, 3).write(NOTHING)
    assert WindowLog(store, "window", 2, 3).ask(MISSING, LONG) == {0: MISSING, 1: NOTHING}


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        (set(), "7:;"),
        ({0, 1, 2, 90, 110}, "7:0-2,90,110;"),
        ({*range(10_000)}, "7:0-9999;"),
        ({*range(0, 400, 2)}, f"7:x{sum(1 << bit for bit in range(0, 400, 2)):x};"),
    ],
)
def test_a_report_is_ranges_or_bits_whichever_is_shorter(lacking: set[int], text: str) -> None:
    reports = {7: Report(frozenset(lacking), waits=False)}
    assert encoded(reports) == text
    assert decoded(text.encode()) == reports
