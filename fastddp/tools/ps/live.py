"""What this node's ranks are doing, as their pages say (csrc/observe/progress.h), and which of them stand out.

Words, tables and JSON are made of it in :mod:`fastddp.tools.ps.printing`.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from fastddp import _C

if TYPE_CHECKING:
    from fastddp._C import Doing, Snapshot, State

FOLDER = Path("/dev/shm")

Process: TypeAlias = Literal["runs", "stopped", "uninterruptible", "gone", "unknown"]
Concern: TypeAlias = Literal["gone", "stopped", "long"]

_LONG = 10.0  # seconds; what takes less is not worth a look, however short the steps are
_LONG_IN_STEPS = 5


@dataclass(frozen=True)
class Collectives:
    """Of one process group, by the numbers that c10d gives them."""

    lane: int
    """From 0, which is the model's own group."""
    first: int
    last: int


@dataclass(frozen=True)
class LiveRank:
    """What a rank does with one of its models."""

    host: str
    ranks: int
    rank: int
    pid: int
    wrapper: int
    """The number of the wrapper in its process, from 0."""
    process: Process
    """Unknown: it is in another container, where numbers of processes mean other ones."""
    step: int
    """The number of the window that is open, or else of the one that ended last, from 1; 0: there was none."""
    window: State
    doing: Doing
    seconds: float
    """For which it has been doing this."""
    bucket: int | None
    """Which ``doing`` is about; in backward the first one that lacks gradients."""
    collectives: tuple[Collectives, ...]
    """That have been started for ``bucket``, if it is waited for."""
    buckets: int
    missing: tuple[str, ...]
    """Gradients that have not come, of ``bucket``; and after a backward that left some out, of the model."""
    all_came: bool
    runs_user_code: bool
    """Its buckets travel by a communication hook in Python."""
    last_parameter: str | None
    """Whose gradient came last."""
    last_bucket: int | None
    """That of ``last_parameter``."""
    step_seconds: tuple[float, ...]
    """Of the last steps."""
    path: str
    """Of its page."""

    @property
    def steps_per_second(self) -> float | None:
        """By the median of the last steps, so that one with an evaluation behind it does not count; None: no step."""
        return 1 / statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def concern(self) -> Concern | None:
        """Why a person should look at it first; None: no reason.

        What is long is known by comparison: as long as no step has a time, nothing is.
        """
        if self.process in ("gone", "stopped"):
            return self.process
        longest = max(self.step_seconds, default=float("inf"))
        return "long" if self.seconds > max(_LONG, _LONG_IN_STEPS * longest) else None


@dataclass(frozen=True)
class Unreadable:
    """A page that says nothing: another version's, one that is being made, or what is left of one."""

    pid: int | None
    """By the page's name."""
    problem: str
    path: str


@dataclass(frozen=True)
class Node:
    """What there is, in the order in which it is shown."""

    ranks: tuple[LiveRank, ...]
    unreadable: tuple[Unreadable, ...] = ()


def live_rank(snapshot: Snapshot, path: str) -> LiveRank:
    """What ``snapshot``, read from ``path``, comes to.

    Raises:
        RuntimeError: it makes no sense.
        UnicodeDecodeError: its names are none.
    """
    names, state, doing = snapshot.names, snapshot.state, snapshot.doing
    # A window is idle while its first forward runs, and also where none has begun.
    is_open = state in ("accumulating", "armed", "reducing", "partial") or (
        state == "idle" and doing in ("forward", "after_forward")
    )
    bucket, missing = _about(snapshot)
    last = snapshot.last_parameter
    return LiveRank(
        host=snapshot.host,
        ranks=snapshot.ranks,
        rank=snapshot.rank,
        pid=snapshot.pid,
        wrapper=snapshot.number,
        process=snapshot.life,
        step=snapshot.windows + is_open,
        window=state,
        doing=doing,
        seconds=snapshot.seconds,
        bucket=bucket,
        collectives=_collectives(snapshot, bucket),
        buckets=len(snapshot.buckets),
        missing=tuple(names[i] for i in missing),
        all_came=all(snapshot.came),
        runs_user_code=snapshot.runs_user_code,
        last_parameter=None if last is None else names[last],
        last_bucket=next((i for i, of in enumerate(snapshot.buckets) if last in of.members), None),
        step_seconds=tuple(snapshot.step_seconds),
        path=path,
    )


def _collectives(snapshot: Snapshot, bucket: int | None) -> tuple[Collectives, ...]:
    if snapshot.doing != "finish" or bucket is None or bucket >= len(snapshot.buckets):
        return ()
    return tuple(Collectives(of.lane, of.first, of.last) for of in snapshot.buckets[bucket].collectives)


def _about(snapshot: Snapshot) -> tuple[int | None, list[int]]:
    """The bucket that a rank is busy with, and the parameters whose gradients it lacks."""
    if snapshot.doing in ("tick", "finish"):
        return snapshot.bucket, []
    if snapshot.doing == "backward" and snapshot.state in ("armed", "reducing"):
        # Not only the next one: as long as it is not known what is used, all buckets start at the end.
        for bucket in range(snapshot.tick, len(snapshot.buckets)):
            if missing := snapshot.missing(bucket):
                return bucket, missing
    elif snapshot.state == "partial":
        return None, [i for i, came in enumerate(snapshot.came) if not came]
    return None, []


def look(pids: Collection[int] = ()) -> Node:
    """Read the pages of this user's processes, or of those in ``pids``."""
    ranks, unreadable = [], []
    for path in _C.shared_pages():
        pid = pid_of(path)
        if pids and pid not in pids:
            continue
        try:
            ranks.append(live_rank(_C.read_progress(path), path))
        except RuntimeError as error:
            unreadable.append(Unreadable(pid, _first_line(error), path))
        except UnicodeDecodeError:
            unreadable.append(Unreadable(pid, f"{path} cannot be read: its names are no text", path))
    # One that went while it was read is left out: its owner has ended.
    unreadable = [of for of in unreadable if Path(of.path).exists()]
    return Node(in_order(ranks), tuple(unreadable))


def in_order(ranks: Iterable[LiveRank]) -> tuple[LiveRank, ...]:
    """Ranks of a job next to each other, as far as it is known: a page has no name of a job."""
    return tuple(sorted(ranks, key=lambda of: (of.ranks, of.rank, of.pid, of.wrapper)))


def without_page(pids: Iterable[int], node: Node) -> list[int]:
    """Those among ``pids`` of which ``node`` has nothing."""
    found = {of.pid for of in node.ranks} | {of.pid for of in node.unreadable}
    return [pid for pid in dict.fromkeys(pids) if pid not in found]


def remove_gone(ranks: Iterable[LiveRank]) -> list[str]:
    """Remove pages whose process is gone; returns their paths.

    They are read again: the number of a process, and with it the name of a page, may have been given to a new one.
    """
    removed = []
    for path in (of.path for of in ranks if of.process == "gone"):
        try:
            is_gone = _C.read_progress(path).life == "gone"
        except RuntimeError:  # somebody else has removed it, or a new one is being made
            continue
        if is_gone:
            _C.remove_page(path)
            removed.append(path)
    return removed


def pid_of(path: str) -> int | None:
    """By its name, fastddp-<user>-<pid>-<number>."""
    parts = Path(path).name.split("-")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdecimal() else None


def _first_line(error: Exception) -> str:
    """Without the stack that c10 adds, and without who says it."""
    return str(error).splitlines()[0].removeprefix("fastddp: ")
