"""What this node's ranks are doing, as their pages say (csrc/pages/snapshot.h), and which of them stand out.

:mod:`fastddp.tools.ps.printing` makes words, tables and JSON of it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from fastddp import _pages

if TYPE_CHECKING:
    from fastddp._pages import Doing, Life, Snapshot, State

FOLDER = Path("/dev/shm")

Concern: TypeAlias = Literal["gone", "stopped", "long"]

_LONG = 10.0  # seconds; less is not worth a look, however short the steps are
_LONG_IN_STEPS = 5


@dataclass(frozen=True)
class Collectives:
    """Collectives of one process group, by c10d's numbers."""

    lane: int  # from 0, which is the model's own group
    first: int
    last: int


@dataclass(frozen=True)
class LiveRank:
    """What a rank does with one of its models."""

    host: str
    ranks: int
    rank: int
    pid: int
    wrapper: int  # the number of the wrapper in its process, from 0
    process: Life  # "unknown": it is in another container, whose process numbers differ from ours
    step: int  # the number, from 1, of the open window, or else of the one that ended last; 0: there was none
    window: State
    doing: Doing
    seconds: float  # for how long it has been doing this
    bucket: int | None  # the one that ``doing`` is about; in backward the first one that lacks gradients
    collectives: tuple[Collectives, ...]  # those started for ``bucket``, if the rank waits for it
    buckets: int
    missing: tuple[str, ...]
    """Gradients of ``bucket`` that have not come; after a backward that left some out, the model's."""
    all_came: bool
    runs_user_code: bool  # its buckets travel by a communication hook in Python
    last_parameter: str | None  # the one whose gradient came last
    last_bucket: int | None  # the bucket of ``last_parameter``
    step_seconds: tuple[float, ...]  # of the last steps
    path: str  # of its page
    generation: int  # how often the model has been given other ranks
    job: int  # the same for all ranks that train one model together; 0: not said
    script: str  # that the process runs; empty: not said
    started: float | None  # when the process was, in seconds since 1970; None: not known

    @property
    def steps_per_second(self) -> float | None:
        """By the median of the last steps, so that a step with an evaluation after it does not count; None: no step."""
        return 1 / statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def concern(self) -> Concern | None:
        """Why a person should look at it first; None: no reason. Before any step has a time, nothing is "long"."""
        if self.process in ("gone", "stopped"):
            return self.process
        longest = max(self.step_seconds, default=float("inf"))
        return "long" if self.seconds > max(_LONG, _LONG_IN_STEPS * longest) else None


@dataclass(frozen=True)
class Unreadable:
    """A page that cannot be read: another version's, one being made, or a remainder."""

    pid: int | None  # by the page's name
    process: Life
    problem: str
    path: str


@dataclass(frozen=True)
class Node:
    """All pages, in the order in which they are shown."""

    ranks: tuple[LiveRank, ...]
    unreadable: tuple[Unreadable, ...] = ()


def live_rank(snapshot: Snapshot, path: str) -> LiveRank:
    """The rank that a page says; RuntimeError: it makes no sense; UnicodeDecodeError: its names are no text."""
    names, state, doing = snapshot.names, snapshot.state, snapshot.doing
    # A window is idle while its first forward runs, and also before any has begun.
    is_open = state in ("accumulating", "armed", "reducing", "partial") or (
        state == "idle" and doing in ("forward", "gather", "after_forward")
    )
    bucket, missing = _about(snapshot)
    awaited = snapshot.buckets[bucket : bucket + 1] if snapshot.doing == "finish" and bucket is not None else []
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
        collectives=tuple(Collectives(of.lane, of.first, of.last) for one in awaited for of in one.collectives),
        buckets=len(snapshot.buckets),
        missing=tuple(names[i] for i in missing),
        all_came=all(snapshot.came),
        runs_user_code=snapshot.runs_user_code,
        last_parameter=None if last is None else names[last],
        last_bucket=next((i for i, of in enumerate(snapshot.buckets) if last in of.members), None),
        step_seconds=tuple(snapshot.step_seconds),
        path=path,
        generation=snapshot.generation,
        job=snapshot.job,
        script=Path(snapshot.script).name,
        started=_started(snapshot.start),
    )


def _started(ticks: int) -> float | None:
    """A process's start, from ticks of the kernel's clock since the machine started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    booted = next((int(line.split()[1]) for line in lines if line.startswith("btime ")), None)
    return None if booted is None else booted + ticks / os.sysconf("SC_CLK_TCK")


def _about(snapshot: Snapshot) -> tuple[int | None, list[int]]:
    """The bucket that a rank is busy with, and the parameters whose gradients it lacks."""
    if snapshot.doing in ("tick", "finish", "gather"):
        return snapshot.bucket, []
    if snapshot.doing == "backward" and snapshot.state in ("armed", "reducing"):
        # All later buckets: while it is not known which parameters are used, all buckets start at the end.
        for bucket in range(snapshot.tick, len(snapshot.buckets)):
            if missing := snapshot.missing(bucket):
                return bucket, missing
    elif snapshot.state == "partial":
        return None, [i for i, came in enumerate(snapshot.came) if not came]
    return None, []


def look(pids: Collection[int] = ()) -> Node:
    """Read the pages of this user's processes, or of those in ``pids``."""
    ranks, unreadable = [], []
    for path in _pages.shared_pages():
        pid = pid_of(path)
        if pids and pid not in pids:
            continue
        try:
            ranks.append(live_rank(_pages.read_page(path), path))
        except (RuntimeError, UnicodeDecodeError) as error:
            says = isinstance(error, RuntimeError)
            problem = str(error).removeprefix("fastddp: ") if says else f"{path} cannot be read: its names are no text"
            unreadable.append(Unreadable(pid, _pages.life_of_owner(path), problem, path))
    # Leave out a page that vanished meanwhile: its owner has ended.
    unreadable = [of for of in unreadable if os.path.lexists(of.path)]
    return Node(tuple(rank for job in in_jobs(ranks) for rank in job), tuple(unreadable))


def in_jobs(ranks: Iterable[LiveRank]) -> list[list[LiveRank]]:
    """Those that train together, with all of their wrappers, as far as this node has them; the latest job last.

    A process with several wrappers is in one job with all who share one of them.
    """
    jobs: list[list[LiveRank]] = []
    for rank in ranks:
        together = [
            job
            for job in jobs
            if any((rank.job == of.job != 0) or (rank.pid, rank.started) == (of.pid, of.started) for of in job)
        ]
        jobs = [job for job in jobs if job not in together]
        jobs.append([*(other for job in together for other in job), rank])
    ordered = [sorted(job, key=lambda of: (of.rank, of.pid, of.wrapper)) for job in jobs]
    return sorted(ordered, key=lambda job: (min(of.started or 0 for of in job), job[0].pid))


def remove_gone(node: Node) -> list[str]:
    """Remove pages whose process is gone; return their paths.

    Pages are read again: a new process may have got the old one's number, and with it the name of its page.
    """
    pages: tuple[LiveRank | Unreadable, ...] = (*node.ranks, *node.unreadable)
    gone = [of.path for of in pages if of.process == "gone"]
    removed = [path for path in gone if _pages.life_of_owner(path) == "gone"]
    for path in removed:
        _pages.remove_page(path)
    return removed


def pid_of(path: str) -> int | None:
    """From the name, fastddp-<user>-<pid>-<number>."""
    parts = Path(path).name.split("-")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdecimal() else None
