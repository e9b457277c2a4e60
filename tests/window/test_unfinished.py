"""A window without all gradients: what the error says about the other ranks."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastddp
from fastddp.window.reports import Report, Reports, WindowLog, decoded, encoded
from hooks_by_name import register
from on_ranks import on_ranks
from parts import Parts
from parts import wrapped as with_options
from ranks import RankPool

X = torch.ones(3)


def wrapped(hook: str = "none", **options: object) -> fastddp.DistributedDataParallel:
    """A model of four buckets, in the order d, c, b, a."""
    model = with_options(Parts("abcd"), **options)
    register(model, hook)
    return model


def said_by_forward(model: fastddp.DistributedDataParallel) -> str:
    with pytest.raises(RuntimeError) as caught:
        model(X)
    return str(caught.value)


def send_what_others_wait_for(model: fastddp.DistributedDataParallel) -> None:
    with torch.no_grad():
        model(X)


def fails_elsewhere(loss: Tensor, rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"failed on rank {rank}"):
        loss.backward()


@on_ranks(2)
def test_every_rank_that_raises_says_who_has_what_it_misses(rank: int) -> None:
    # What rank 1 sends meets nothing, and leaving the group waits for it as long as the group has patience.
    model = wrapped(process_group=dist.new_group(timeout=timedelta(seconds=6)))
    model(X, ("acd", "bcd")[rank]).backward()
    began = time.monotonic()
    said = said_by_forward(model)
    assert time.monotonic() - began < 4  # nobody waited for the time limit
    assert f"on rank {rank} without a gradient for 1 of 4 parameters" in said
    parameter = ("parameter b (number 1, bucket 2)", "parameter a (number 0, bucket 3)")[rank]
    assert f"{parameter}: produced by rank {1 - rank}" in said


@pytest.mark.tier("nightly")
@on_ranks(2)
def test_ranks_that_do_not_answer_in_time_are_named(rank: int) -> None:
    model = wrapped()
    if rank == 0:
        model(X, "abc").backward()
        said = said_by_forward(model)
        assert "parameter d (number 3, bucket 0): no other rank has said whether it has it" in said
        assert "No report within 5 s from rank 1, which may have them or not." in said
        assert "produced by" not in said
    dist.barrier()  # the other one does not come to backward


def two_wait(rank: int, hook: str, used: str) -> str:
    """Ranks 0 and 1 wait; rank 2 comes when they have waited a while, and misses a later bucket's gradient."""
    model = wrapped(hook)
    if rank < 2:
        fails_elsewhere(model(X), rank=2)
        return ""
    loss = model(X, used)
    time.sleep(1)
    loss.backward()
    said = said_by_forward(model)
    send_what_others_wait_for(model)
    return said


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("hook", ["none", "bf16", "python"])
def test_ranks_that_wait_for_a_later_bucket_have_said_that_they_miss_nothing(ranks: RankPool, hook: str) -> None:
    message = ranks.run(two_wait, 3, hook, "acd")[2]
    assert "parameter b (number 1, bucket 2): produced by rank 0, 1" in message
    assert "No report" not in message


@pytest.mark.tier("nightly")
def test_what_ranks_have_not_come_to_yet_is_neither_produced_nor_missing(ranks: RankPool) -> None:
    # The sums of 16-bit gradients take two collectives: others wait for d's, before all gradients have come.
    message = ranks.run(two_wait, 3, "bf16", "b")[2]
    assert "parameter d (number 3, bucket 0): produced by rank 0, 1" in message
    assert "parameter a (number 0, bucket 3): not yet by rank 0, 1, which waits in backward" in message


@on_ranks(2)
def test_what_no_rank_has_is_said_so_only_if_all_have_reported(rank: int) -> None:
    model = wrapped()
    model(X, "acd").backward()
    assert "parameter b (number 1, bucket 2): produced by no rank\n" in said_by_forward(model)


@pytest.mark.tier("nightly")
@on_ranks(3)
def test_reports_are_deleted_once_all_is_well(rank: int) -> None:
    model = wrapped()
    store = dist.distributed_c10d._get_process_group_store(model.process_group)
    keys = [f"{window}/{part}" for window in range(4) for part in ("log", "askers", "answer")]

    def there() -> list[str]:
        return [key for key in keys if store.check([f"fastddp/missing/1/{key}"])]

    loss = model(X, "abcd" if rank < 2 else "acd")
    if rank == 2:
        loss.backward()
        said_by_forward(model)
        assert there() == ["0/log", "0/askers", "0/answer"]
    else:
        fails_elsewhere(loss, rank=2)
    for _ in range(2):
        model.zero_grad()
        model(X).backward()
    model(X)
    dist.barrier()
    assert there() == []


@on_ranks(2)
def test_without_a_store_the_error_is_still_the_missing_gradient(rank: int) -> None:
    model = wrapped()
    if rank == 1:
        fails_elsewhere(model(X), rank=0)
        return
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    groups = dist.distributed_c10d._world.pg_map
    backend, store = groups[model.process_group]
    groups[model.process_group] = (backend, client)
    del server  # as if its process had ended
    model(X, "acd").backward()
    said = said_by_forward(model)
    groups[model.process_group] = (backend, store)
    send_what_others_wait_for(model)
    assert said.startswith("fastddp: backward ended on rank 0 without a gradient for 1 of 4 parameters")
    assert "parameter b (number 1, bucket 2): no other rank has said whether it has it" in said
    assert "the store of the process group does not answer" in said
    assert "No report" not in said
    assert "find_unused_parameters=True" in said


# ------------------------------------------------------------------------------------------- what it takes of the store


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
