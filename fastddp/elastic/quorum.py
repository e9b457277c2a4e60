"""What fastddp has to know of torchft's manager, and torch of its process groups."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from html.parser import HTMLParser
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from fastddp.errors import see
from fastddp.ranks.together import unexplained

if TYPE_CHECKING:
    from torchft.manager import Manager

_log = logging.getLogger("fastddp")
_numbers = itertools.count(1)
_TIMEOUT = timedelta(seconds=60)
_MANY = 50  # answers that do not come or cannot be read, of ten a second at most


def check_manager(manager: Manager) -> None:
    """Raise unless every replica of a quorum takes part in its step, from the first one on.

    Raises:
        ValueError: the quorum is asynchronous, or has spares.
    """
    if manager._use_async_quorum:
        raise ValueError(
            "fastddp.elastic takes a torchft.Manager(use_async_quorum=False). With an asynchronous quorum a replica "
            "that joins computes its first gradients before it has the others' parameters." + see("FD054")
        )
    mode = manager._replica_world_size_mode
    if mode.name != "DYNAMIC":
        raise ValueError(
            f"fastddp.elastic takes WorldSizeMode.DYNAMIC, not {mode.name}: a spare would take part in each average."
            + see("FD054")
        )


class Quorum:
    """The process group of a manager's present quorum.

    It follows the manager's ``reconfigure``: :attr:`number` grows with each, also where the object stays the same.
    """

    def __init__(self, manager: Manager, device: torch.device) -> None:
        self.manager = manager
        self.number = int(getattr(manager, "_quorum_id", -1) >= 0)  # it may have a group already
        self._device = device
        self._handles: list[str] = []
        reconfigure = manager._reconfigure_pg
        this = weakref.ref(self)

        def note(communicator_id: int, handles: list[str]) -> None:
            if (quorum := this()) is not None:
                quorum.number += 1
                quorum._handles = [*handles]
            reconfigure(communicator_id, handles)

        manager._reconfigure_pg = note

    def group(self) -> dist.ProcessGroup:
        """The group, known to torch with its present ranks.

        Raises:
            DistBackendError: there is none, since the manager could not make it.
        """
        group: Any = self.manager._pg
        while type(group) is not dist.ProcessGroup and hasattr(group, "_pg"):
            group = group._pg  # torchft's are Python around a group of torch's
        if group is None:
            raise dist.DistBackendError("fastddp: the manager has no process group now.")
        forget(group)
        if group not in dist.distributed_c10d._world.pg_map:  # else torch has made it
            make_known(group, group.get_group_store(), self._device)
        return group

    def names(self) -> Callable[[list[int]], str]:
        """What replicas are called, by their ranks: by the numbers at the end of their identifiers, if all have one."""
        try:
            numbers = [json.loads(handle)["global_rank"] for handle in self._handles]
        except (ValueError, KeyError, TypeError):  # of a native group
            numbers = []
        return lambda ranks: names([str(numbers[rank] if rank < len(numbers) else rank) for rank in ranks])


def make_known(group: dist.ProcessGroup, store: dist.Store, device: torch.device) -> None:
    """Let torch's functions take a group that it has not made, until :func:`forget`."""
    world = dist.distributed_c10d._world
    name: Any = f"fastddp.elastic {next(_numbers)}"
    backend = group._get_backend(device).name()
    world.pg_map[group] = backend, store
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    world.pg_backend_config[group] = f"{device.type}:{backend}"
    unexplained.add(group)


def forget(group: dist.ProcessGroup) -> None:
    """Undo :func:`make_known`."""
    world = dist.distributed_c10d._world
    if str(world.pg_names.get(group, "")).startswith("fastddp.elastic"):
        for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            known.pop(group, None)


def group_of_one(device: torch.device) -> dist.ProcessGroup:
    """This process alone, before the first quorum."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, _TIMEOUT)
    backend._set_sequence_number_for_group()
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, backend)
    make_known(group, store, device)
    return group


class Lighthouse:
    """The page on which torchft's lighthouse says when it has last heard of each replica.

    ``address``: None: what torchft takes from the environment (``TORCHFT_LIGHTHOUSE``); unknown, nobody is silent.
    ValueError: it is no address, and torchft would not take it either.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address or os.environ.get("TORCHFT_LIGHTHOUSE")
        self._failures = 0  # in a row
        parts = urlsplit(self._address or "http://nobody")
        self._place = parts.netloc
        if not parts.scheme or not parts.netloc:
            raise ValueError(f"lighthouse: torchft's are http://host:port, not {self._address!r}." + see("FD054"))

    def silent(self, seconds: float) -> list[str]:
        """Replicas of the last quorum of which it has not heard for so long; none if there is no answer."""
        if self._address is None:
            return []
        page = _Status()
        try:
            with contextlib.closing(HTTPConnection(self._place, timeout=1)) as connection:
                connection.request("GET", "/status")
                page.feed(connection.getresponse().read().decode())
            if not page.seen:
                raise ValueError("a page without heartbeats")
        except Exception as error:  # whoever it is that answers
            self._failures += 1
            if self._failures == _MANY:
                _log.warning(
                    "torchft's lighthouse does not answer at %s (%r). Until it does, replicas that hang are waited for "
                    "until the process group's time-out.",
                    self._address,
                    error,
                )
            return []
        self._failures = 0
        return [replica for replica, ago in page.seen.items() if replica in page.members and ago > seconds]


class _Status(HTMLParser):
    """The members of the last quorum, and how many seconds ago replicas were seen. ``feed`` may raise ValueError."""

    def __init__(self) -> None:
        super().__init__()
        self.members: set[str] = set()
        self.seen: dict[str, float] = {}

    def handle_data(self, data: str) -> None:
        """Called by the class, for each text between tags."""
        replica, is_heartbeat, ago = data.strip().removesuffix("s ago").rpartition(": seen ")
        if is_heartbeat:
            self.seen[replica] = float(ago)
        elif self.lasttag == "b":
            self.members.add(data)


def names(replicas: Sequence[str]) -> str:
    """Replicas in the words of messages, without torchft's identifiers.

    >>> names(["1:6b2a"])
    'replica 1'
    """
    short: list[Any] = [replica.split(":")[0] for replica in replicas]
    return f"replica{'s' if len(short) > 1 else ''} {', '.join(short)}"
