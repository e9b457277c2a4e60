"""Which ranks have come to their first wrapper over a process group, and by which errors they have ended: in its store.

It speaks where no page does: of ranks that end while models are made, and of errors on other machines.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

import torch.distributed as dist

from fastddp.ranks.generations import OfGroups
from fastddp.ranks.listing import listed
from fastddp.ranks.together import explanations
from fastddp.watch.python_calls import state_of

is_launched = True  # whether a launcher has started this process, and so the others in the same way

_LOOKS = 20  # ten a second: a process that ends closes its connections before it is gone
_LOOK = "Look at what it printed last."
_LAUNCH = (
    "torchrun has not started this rank, and ranks that a script starts itself, as Lightning does, may be without "
    "fastddp. Start it with torchrun -m fastddp, or call fastddp.patch() in the script."
)
_FOLLOWS = "-"  # its collective has failed, so its own end is no cause
_entered: OfGroups[int] = OfGroups()  # by which process


def enter(group: dist.ProcessGroup) -> None:
    """Say that this rank is here, once."""
    if _entered.get(group, 0) != os.getpid():
        _entered[group] = os.getpid()
        _write(group, "")


def leave(error: str) -> None:
    """Say by which error this process ends."""
    for group in _entered.groups():
        if _entered.get(group, 0) == os.getpid():
            with contextlib.suppress(Exception):  # the store may have gone first
                _write(group, error)


def who_has_ended(group: dist.ProcessGroup) -> str:
    """Which ranks have ended or are stopped, or never came, in words; empty: none, as far as anyone knows.

    A collective in ``group`` has failed. Where no model is over it, ranks are those of the first model's group.
    """
    group = next(iter([group] if _entered.get(group, 0) else _entered.groups()), group)
    try:
        _write(group, _FOLLOWS)
        for _ in range(_LOOKS):
            ended, absent = _look(group)
            if ended:
                break
            time.sleep(0.1)
    except Exception:
        return "fastddp: the job's store does not answer. The process that serves it has ended: mostly rank 0."
    if absent and not ended:
        ended = [f"rank {listed(absent)} had not come to its first wrapper. {_LOOK if is_launched else _LAUNCH}"]
    return "\n  ".join(["fastddp: ranks wait for one that does not come:", *ended]) if ended else ""


explanations.append(who_has_ended)


def _look(group: dist.ProcessGroup) -> tuple[list[str], list[int]]:
    """What is said of ranks that have ended; and which have never been here."""
    store, ended, absent = dist.distributed_c10d._get_process_group_store(group), [], []
    for rank in {*range(group.size())} - {group.rank()}:
        if not store.check([_key(rank)]):
            absent.append(rank)
            continue
        host, pid, error = store.get(_key(rank)).decode().split(" ", 2)
        state = state_of(int(pid)) if host == socket.gethostname() else ""
        if error and error != _FOLLOWS:
            ended.append(f"rank {rank} has ended (process {pid} on {host}), by {error}.")
        elif not error and state in ("is gone", "is stopped"):
            ended.append(f"rank {rank} {state} (process {pid} on {host}). {_LOOK}")
    return ended, absent


def _key(rank: int) -> str:
    return f"fastddp/roll/{rank}"


def _write(group: dist.ProcessGroup, error: str) -> None:
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set(_key(group.rank()), f"{socket.gethostname()} {os.getpid()} {error}")
