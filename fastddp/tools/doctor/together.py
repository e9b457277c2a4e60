"""The doctor under torchrun: each rank looks for itself, all exchange, and rank 0 collects answers in a time limit.

Ranks answer by named entries in the launcher's store. No collective is used, so the number of a rank that does not
answer is known. Entries are JSON, and are only accepted as values of their stage's type: anyone who reaches the store
can write to it, and must not make a rank run the entry.

Rank 0 does its own share in a thread, so that it can report even if that hangs. If another rank hangs, the launcher
ends it after rank 0 has ended with a status other than 0.
"""

from __future__ import annotations

import datetime
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from fastddp.documents.typed_json import parsed, restored
from fastddp.ranks.listing import ranks
from fastddp.tools.doctor import exchange, software
from fastddp.tools.doctor.examination import Examination, examine
from fastddp.tools.doctor.exchange import Timing
from fastddp.tools.doctor.findings import Finding, in_a_line, remark, wrong
from fastddp.tools.doctor.report import Report, write

_POLL_SECONDS = 0.02
KINDS: dict[str, Any] = {"examination": Examination, "backend": str, "exchange": Timing, "verdict": bool}
"""What ranks post, by stage."""


@dataclass(frozen=True)
class Seat:
    """One rank's place."""

    rank: int
    size: int
    local_rank: int  # among the ranks of its machine
    address: str  # of the store
    port: int
    has_agent: bool  # torchrun holds the store; otherwise rank 0 does

    def store(self, seconds: float) -> dist.Store:
        """The launcher's store; raises DistError if it cannot be reached in time."""
        holds = self.rank == 0 and not self.has_agent
        timeout = datetime.timedelta(seconds=seconds)
        # Does not wait for others: missing ranks are to be named.
        store = dist.TCPStore(self.address, self.port, self.size, holds, timeout, wait_for_workers=False)
        return dist.PrefixStore("fastddp doctor", store)


def seat(environment: Mapping[str, str]) -> Seat | None:
    """Of a process that torchrun or its like has started; None: it is alone; ValueError: a variable makes no sense."""
    if "RANK" not in environment:
        return None
    try:
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank, address = int(environment.get("LOCAL_RANK", rank)), environment["MASTER_ADDR"]
        if not (0 <= rank < size and local_rank >= 0 and 0 < port < 2**16 and address):
            raise ValueError
    except (KeyError, ValueError):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        told = ", ".join(f"{name} is {environment.get(name, 'not set')[:20]!r}" for name in names)
        raise ValueError(f"{told}: unset RANK, or start with torchrun") from None
    return Seat(rank, size, local_rank, address, port, environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


@dataclass(frozen=True)
class Step:
    """What a rank is doing."""

    number: int  # grows on each rank in the same way
    words: str


@dataclass
class Answers:
    """The answers of one stage."""

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    silent: dict[int, Step] = field(default_factory=dict)  # and their last known steps
    is_cut_short: bool = False  # the launcher ended the run


class Board:
    """One thread's access to the store, which serves one thread at a time."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs

    def post(self, stage: str, rank: int, make: Callable[[], Any]) -> Any:
        """Make a value, post it or the error that was raised, and return the value."""
        value = None
        try:
            value = make()
            entry = json.dumps({"value": value}, default=asdict, allow_nan=False)
        except Exception as error:
            entry = json.dumps({"error": in_a_line(error)})
        self._store.set(f"{stage}/{rank}", entry)
        return value

    def tell(self, rank: int, number: int, words: str) -> None:
        """Post what the rank does from now on."""
        self._store.set(f"step/{rank}", json.dumps(asdict(Step(number, words))))

    def wait_for(self, stage: str, rank: int, seconds: float) -> Any:
        """The value that this rank has posted, or None if none came in time."""
        return self.collect(stage, [rank], seconds).values.get(rank)

    def collect(
        self,
        stage: str,
        ranks: Iterable[int],
        seconds: float,
        is_over: Callable[[], bool] = lambda: False,
        together: bool = False,
    ) -> Answers:
        """Collect the entries of these ranks; after so many seconds those without one count as silent.

        ``is_over`` says True when no other rank will answer. ``together``: stop at the first failure, after which no
        other rank can succeed.
        """
        answers, missing, end = Answers(), list(ranks), time.monotonic() + seconds
        while True:
            over = is_over()
            for rank in [rank for rank in missing if self._store.check([f"{stage}/{rank}"])]:
                missing.remove(rank)
                self._read(stage, rank, answers)
            if not missing or (together and answers.errors):
                return answers
            if over or time.monotonic() > end:
                answers.is_cut_short = over
                answers.silent = {rank: self._last_step(rank) for rank in missing}
                return answers
            time.sleep(_POLL_SECONDS)

    def _read(self, stage: str, rank: int, answers: Answers) -> None:
        name = f"{stage}/{rank}"
        try:
            entry: dict[str, Any] = restored(parsed(self._store.get(name)), dict[str, Any], name)
            if "error" in entry:
                answers.errors[rank] = restored(entry["error"], str, name)
            else:
                answers.values[rank] = restored(entry.get("value"), KINDS[stage], name)
        except ValueError as error:
            why = "has it another version of fastddp?"
            answers.errors[rank] = f"what it put up cannot be read ({why}): {in_a_line(error)}"

    def _last_step(self, rank: int) -> Step:
        name = f"step/{rank}"
        if not self._store.check([name]):
            return Step(-1, "nowhere: it has not come")
        try:
            return cast(Step, restored(parsed(self._store.get(name)), Step, name))
        except ValueError:
            return Step(-1, "something that cannot be read")


def follow(seat: Seat, store: dist.Store, seconds: float) -> None:
    """A rank's share; returns when rank 0 no longer needs it. ``seconds``: the limit of each of two stages."""
    with suppress(dist.DistError):  # rank 0 has ended, and the store with it
        _work(seat, store, seconds)
        # A rank that leaves a process group early may end a collective of another.
        Board(store).wait_for("verdict", 0, seconds)


def _work(seat: Seat, store: dist.Store, seconds: float) -> None:
    board, rank = Board(store), seat.rank
    mine: Examination | None = board.post(
        "examination", rank, lambda: examine(seat.local_rank, lambda words: board.tell(rank, 0, words))
    )
    backend = board.wait_for("backend", 0, 2 * seconds)
    if not backend or mine is None:
        return
    device = torch.device(mine.device if backend == "nccl" else "cpu")
    group = dist.PrefixStore("group", store)

    def measured() -> Timing:
        # Twice the limit: rank 0 knows which rank is missing, and is to speak first.
        return exchange.measure(
            backend, group, rank, seat.size, device, 2 * seconds, lambda *step: board.tell(rank, *step)
        )

    board.post("exchange", rank, measured)


def lead(seat: Seat, store: dist.Store, seconds: float) -> Report:
    """Rank 0's share, and the report; arguments as for :func:`follow`. From now on SIGTERM only ends the waiting."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # torchrun sends it when a rank has died
    threading.Thread(target=_work, args=(seat, store, seconds), daemon=True).start()
    board = Board(store)
    found: list[Finding] = []

    def hear(stage: str, together: bool = False) -> dict[int, Any]:
        """A stage's values. After the launcher has ended the run, do not report missing ranks again."""
        had_ended = ended.is_set()
        answers = board.collect(stage, range(seat.size), seconds, ended.is_set, together)
        if not had_ended:
            found.extend(missed(answers, seconds))
        return answers.values

    facts: dict[int, Examination] = hear("examination")
    found += software.differences({rank: one.software.lines() for rank, one in facts.items()})
    backend = ""
    if seat.size == 1:
        found.append(remark("allreduce", "Nothing was measured: there is one rank, which exchanges with nobody."))
    elif len(facts) < seat.size:
        found.append(remark("allreduce", "Nothing was measured: not all ranks came that far."))
    else:
        gpus = [one.gpu for one in facts.values()]
        backend = exchange.choose_backend(gpus, all(one.software.nccl for one in facts.values()))
    board.post("backend", 0, lambda: backend)
    timings: dict[int, Timing] = hear("exchange", together=True) if backend else {}
    report = write(seat.size, facts, found, backend, timings if len(timings) == seat.size else None)
    board.post("verdict", 0, lambda: True)
    return report


def missed(answers: Answers, seconds: float) -> list[Finding]:
    """Findings on ranks that raised or said nothing. If ranks wait for each other, those behind are named."""
    found = [
        wrong(f"rank {rank}", f"It failed: {error.rstrip('.')}.", "Its own output may say more.")
        for rank, error in sorted(answers.errors.items())
    ]
    silent = dict(sorted(answers.silent.items()))
    if answers.is_cut_short:
        others = [rank for rank in silent if rank != 0]  # rank 0 lives: it says this
        what = "The launcher ended the run before an answer: a rank has died."
        return [*found, wrong(ranks(others), what, "The launcher's own output names the rank and its exit status.")]
    farthest = max(silent.values(), key=lambda step: step.number, default=Step(0, ""))
    behind = {rank: step for rank, step in silent.items() if step.number < farthest.number}
    if farthest.number > 0 and not behind:
        what = f"None came back from {farthest.words} within {seconds:g} s."
        network = (
            "Ranks reach the store but not each other: check firewalls, and name the network interface "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME). If the network is only slow, raise --time-limit."
        )
        return [*found, wrong(ranks(list(silent)), what, network)]
    waiting = f" Others wait for it, at: {farthest.words}." if behind else ""
    look = "See what its process does (py-spy dump, nvidia-smi), and whether its machine is reached."
    for rank, step in (behind or silent).items():
        what = f"It did not answer within {seconds:g} s. Last seen at: {step.words}.{waiting}"
        found.append(wrong(f"rank {rank}", what, look))
    return found
