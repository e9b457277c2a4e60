"""``fastddp.elastic.DistributedDataParallel``: averages over the replicas of torchft's quorum."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from fastddp import ddp
from fastddp.elastic.quorum import Lighthouse, Quorum, check_manager, forget, group_of_one, names
from fastddp.errors import see
from fastddp.module.replicas import RanksDiffer
from fastddp.watch.options import Watch

if TYPE_CHECKING:
    from torchft.manager import Manager

_LOOK = 0.1  # seconds


class DistributedDataParallel(ddp.DistributedDataParallel):
    """Takes the place of ``torchft.DistributedDataParallel``: the same arguments, and the same loop.

    A replica that joins gets parameters and the optimizer's state by the manager, and buckets and what compression has
    alike by :meth:`~fastddp.DistributedDataParallel.regroup`, before its first forward: it counts at once. A replica
    that is lost ends the step of the others without an error, and ``should_commit()`` refuses it.

    Args:
        manager: a ``torchft.Manager`` with ``use_async_quorum=False``.
        module: the module to train.
        heartbeat: for how many seconds the lighthouse may have heard nothing of a replica for which others wait.
        lighthouse: its address; None: ``TORCHFT_LIGHTHOUSE`` of the environment. Without an address a replica that
            hangs is waited for until the process group's time-out.
        **kwargs: of :class:`fastddp.DistributedDataParallel`, without ``process_group`` and ``device_mesh``.

    Raises:
        ValueError: the quorum is asynchronous or has spares, a process group or a mesh is given, or the lighthouse's
            address is none.
    """

    _loses_ranks = True

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        *,
        heartbeat: float = 5.0,
        lighthouse: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_manager(manager)
        for name in {"process_group", "device_mesh", "hierarchy"} & kwargs.keys():
            raise ValueError(f"{name}: the manager's quorum says which ranks there are. Leave it out." + see("FD054"))
        asked = Lighthouse(lighthouse)
        kwargs.setdefault("watch", Watch(stall=None))  # the lighthouse knows who is there
        device = next(module.parameters()).device
        super().__init__(module, process_group=group_of_one(device), **kwargs)
        self._quorum = Quorum(manager, device)
        self._followed = 0  # number of the quorum
        self._is_out = False  # this step has no other replicas
        of_manager: Any = weakref.ref(manager)  # which may hold the model
        self.on_lost(lambda lost: of_manager().report_error(dist.DistBackendError(lost.what)))
        _end_waits_for_the_silent(self, asked, heartbeat)

    def _begin(self, synchronises: bool, grad_enabled: bool) -> None:
        self._is_out = False
        with self._telling_of_others():
            if synchronises and grad_enabled:
                self._follow()
            super()._begin(synchronises, grad_enabled)

    @contextlib.contextmanager
    def _telling_of_others(self) -> Iterator[None]:
        """If other replicas are to blame, the loop goes on without them, and the manager refuses the step."""
        try:
            yield
        except (RanksDiffer, dist.DistError) as error:  # note [Whose error it is], csrc/waits/interruption.h
            if isinstance(error, RanksDiffer) and self._quorum.manager.participating_rank() in error.ranks:
                raise
            self._is_out = True
            self._quorum.manager.report_error(error)

    def _follow(self) -> None:
        """Go where the quorum is."""
        number = self._quorum.number
        if number == self._followed:
            return
        before, group = self.process_group, self._quorum.group()
        try:
            self.regroup(group)
        finally:
            if before is not self.process_group:
                forget(before)
            elif group is not before:
                forget(group)
        self._followed = number

    def _name_ranks(self) -> Any:
        return self._quorum.names()

    def _post_forward(self, output: Any) -> Any:
        if not self._is_out:
            with self._telling_of_others():
                return super()._post_forward(output)
        return output

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            forget(self.process_group)


def _end_waits_for_the_silent(model: DistributedDataParallel, lighthouse: Lighthouse, heartbeat: float) -> None:
    """In a thread, while the model lives: end its waits for replicas of which the lighthouse hears nothing.

    The thread never holds the model, which would then be freed there.
    """
    waits, is_gone = model._waits, threading.Event()
    weakref.finalize(model, is_gone.set)

    def run() -> None:
        while not is_gone.wait(_LOOK):
            seconds, end = waits.look()
            if seconds > _LOOK and (silent := lighthouse.silent(heartbeat)):
                end(f"fastddp: the lighthouse has not heard of {names(silent)} for {heartbeat:g} s." + see("FD015"))

    threading.Thread(target=run, name="fastddp elastic", daemon=True).start()
