"""The doctor under torchrun: each rank looks for itself, all exchange, and rank 0 collects answers in a time limit.

Rank 0 does its own share in a thread, so that it can report even if that hangs. If another rank hangs, the launcher
ends it after rank 0 has ended with a status other than 0.
"""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from fastddp.listing import ranks
from fastddp.tools.doctor import exchange, software
from fastddp.tools.doctor.board import Answers, Board
from fastddp.tools.doctor.examination import Examination, examine
from fastddp.tools.doctor.exchange import Timing
from fastddp.tools.doctor.findings import Finding, remark, wrong
from fastddp.tools.doctor.report import Report, choose_backend, write
from fastddp.tools.doctor.seat import Seat

_STAGES = 3  # each may take the limit
_KINDS: dict[str, Any] = {
    "software": dict[str, str],
    "examination": Examination,
    "backend": str | None,
    "exchange": Timing,
    "verdict": bool,
}
"""What ranks post, by stage."""


def follow(seat: Seat, store: dist.Store, seconds: float) -> None:
    """A rank's share; returns when rank 0 no longer needs it.

    Args:
        seat: of this rank.
        store: the launcher's.
        seconds: the limit of each stage.
    """
    with suppress(dist.DistError):  # rank 0 has ended, and the store with it
        _work(seat, store, seconds)
        # A rank that leaves a process group early may end a collective of another.
        Board(store, _KINDS).wait_for("verdict", 0, seconds)


def lead(seat: Seat, store: dist.Store, seconds: float) -> Report:
    """Rank 0's share, and the report; arguments as for :func:`follow`. From now on SIGTERM only ends the waiting."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # torchrun sends it when a rank has died
    threading.Thread(target=_work, args=(seat, store, seconds), daemon=True).start()
    board = Board(store, _KINDS)
    report = _Hearing(seat, board, seconds, ended).report()
    board.post("verdict", 0, lambda: True)
    return report


def _work(seat: Seat, store: dist.Store, seconds: float) -> None:
    board = Board(store, _KINDS)

    def examined() -> Examination:
        return examine(seat.local_rank, lambda words: board.tell(seat.rank, 0, words))

    def measured() -> Timing:
        assert mine is not None
        device = torch.device(mine.device if backend == "nccl" else "cpu")
        group_store = dist.PrefixStore("group", store)
        # Twice the limit: rank 0 knows which rank is missing, and is to speak first.
        return exchange.measure(
            backend,
            group_store,
            seat.rank,
            seat.size,
            device,
            2 * seconds,
            lambda number, words: board.tell(seat.rank, 1 + number, words),
        )

    board.tell(seat.rank, 0, "asking for versions")
    board.post("software", seat.rank, lambda: software.look().lines())
    mine = board.post("examination", seat.rank, examined)
    backend = board.wait_for("backend", 0, _STAGES * seconds)
    if backend is not None:
        board.post("exchange", seat.rank, measured)


class _Hearing:
    """The ranks' answers to rank 0, stage by stage."""

    def __init__(self, seat: Seat, board: Board, seconds: float, ended: threading.Event) -> None:
        self._everyone = range(seat.size)
        self._board = board
        self._seconds = seconds
        self._ended = ended
        self._found: list[Finding] = []

    def report(self) -> Report:
        size = len(self._everyone)
        versions = self._hear("software", self._everyone).values
        self._found += software.differences(versions)
        facts = self._hear("examination", _alike(versions)).values
        why_not = ""
        if size == 1:
            why_not = "there is one rank, which exchanges with nobody"
        elif len(facts) < size:
            why_not = "not all ranks came that far"
        backend = None if why_not else choose_backend(facts)
        self._board.post("backend", 0, lambda: backend)
        if backend is None:
            self._found.append(remark("allreduce", f"Nothing was measured: {why_not}."))
            return write(size, facts, self._found)
        timings = self._hear("exchange", self._everyone, together=True)
        return write(size, facts, self._found, backend, None if timings.failed() else timings.values)

    def _hear(self, stage: str, wanted: list[int] | range, together: bool = False) -> Answers:
        """Collect a stage. After the launcher has ended the run, do not wait, and do not report missing ranks again."""
        had_ended = self._ended.is_set()
        answers = self._board.collect(stage, wanted, self._seconds, self._ended.is_set, together)
        if not had_ended:
            self._found += missed(answers, self._seconds)
        return answers


def _alike(versions: dict[int, dict[str, str]]) -> list[int]:
    """The ranks with the first one's version of fastddp: other versions may post other values."""
    first = versions[min(versions)].get("fastddp") if versions else None
    return [rank for rank, lines in versions.items() if lines.get("fastddp") == first]


def missed(answers: Answers, seconds: float) -> list[Finding]:
    """Findings on ranks that raised or said nothing. If ranks wait for each other, those behind are named."""
    found = [
        wrong(f"rank {rank}", f"It failed: {error.rstrip('.')}.", "Its own output may say more.")
        for rank, error in sorted(answers.errors.items())
    ]
    if answers.is_cut_short:
        others = sorted(rank for rank in answers.silent if rank != 0)  # rank 0 lives: it says this
        what = "The launcher ended the run before an answer: a rank has died."
        return [*found, wrong(ranks(others), what, "The launcher's own output names the rank and its exit status.")]
    if answers.silent:
        found += _silent(answers, seconds)
    return found


def _silent(answers: Answers, seconds: float) -> list[Finding]:
    farthest = max(answers.silent.values(), key=lambda step: step.number)
    behind = {rank: step for rank, step in answers.silent.items() if step.number < farthest.number}
    if farthest.number > 0 and not behind:
        return [
            wrong(
                ranks(sorted(answers.silent)),
                f"None came back from {farthest.words} within {seconds:g} s.",
                "Ranks reach the store but not each other: check firewalls, and name the network interface "
                "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME). If the network is only slow, raise --time-limit.",
            )
        ]
    waiting = f" Others wait for it, at: {farthest.words}." if behind else ""
    return [
        wrong(
            f"rank {rank}",
            f"It did not answer within {seconds:g} s. Last seen at: {step.words}.{waiting}",
            "See what its process does (py-spy dump, nvidia-smi), and whether its machine is reached.",
        )
        for rank, step in sorted((behind or answers.silent).items())
    ]
