"""Compares the ranks' PowerSGD states, so that ranks with different ones stop before they exchange gradients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from fastddp.errors import see
from fastddp.exchange.descriptions import AllReduce, Exchange
from fastddp.exchange.of_model import OfModel
from fastddp.ranks.agreement import difference, gather_numbers
from fastddp.ranks.listing import listed
from fastddp.ranks.together import telling_who_has_ended

if TYPE_CHECKING:
    from fastddp.compression.power_sgd import PowerSGD, PowerSGDState

_PATIENCE = 60.0  # seconds in which the other ranks must come with changed states, too
_COMPARED = (
    "iter",
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "warm_start",
    "random_seed",
)

# Note [When ranks compare PowerSGD's state]
# A state decides which collectives a window has. Ranks with different states hang, or add up gradients that do not
# belong together. They compare at the first forward that synchronises after the hook was registered, in one small
# all-gather that every rank makes, whatever its state is. So a checkpoint that only one rank has found is an error on
# all. Later steps compare nothing. If a state is changed later (load_state_dict, iter), it has to be changed on all
# ranks between the same two steps. But a rank that changed nothing cannot know that another rank did. So the ranks that
# changed it meet at the store of their process group before their next forward. If all come, they compare. If some are
# absent, the others raise and name them. The absent ranks wait in backward until that error, or a time-out, ends their
# collectives.


class PowerSGDSchedule:
    """As many ``plain`` windows as ``state`` says, and then ``power_sgd``."""

    def __init__(self, state: PowerSGDState, plain: AllReduce, power_sgd: PowerSGD, of_model: OfModel) -> None:
        self.state = state
        self._plain = plain
        self._power_sgd = power_sgd
        self._setting = of_model.setting
        self._name = of_model.name
        self._is_registered = False
        self._have_compared = False

    @property
    def may_use(self) -> Sequence[Exchange]:
        """The exchanges that a window may use."""
        return self._plain, self._power_sgd

    def __call__(self, window: int) -> Exchange:
        """The exchange of window number ``window``; RuntimeError: ranks' states differ, or were not loaded on all."""
        # The first call registers the hook, which is no collective.
        if self._is_registered and (self.state.was_changed or not self._have_compared):
            self._compare(window)
        self._is_registered = True
        # The model's first window has other buckets than the rest.
        if window > 0 and self.state.iter >= self.state.start_powerSGD_iter:
            return self._power_sgd
        return self._plain

    def _compare(self, window: int) -> None:
        group, device = self._group(), self._setting().parameters[0].device
        meeting = _Meeting(group, f"fastddp/power_sgd/{self._name}/{window}") if self._have_compared else None
        if meeting is not None:
            with telling_who_has_ended(group):
                meeting.wait(_PATIENCE)
        by_rank = gather_numbers([float(getattr(self.state, name)) for name in _COMPARED], group, device)
        if meeting is not None:
            meeting.end()
        found = difference(_COMPARED, by_rank)
        if found is not None:
            raise RuntimeError(
                f"PowerSGD's states differ between ranks: {found}. Ranks would exchange gradients in different ways. "
                "Give PowerSGDState the same arguments on all ranks, and load the same checkpoint on all of them, or "
                "on none: if only some ranks find the file, broadcast it first "
                "(torch.distributed.broadcast_object_list)." + see("FD004")
            )
        self._have_compared = True
        self.state.was_changed = False

    def _group(self) -> dist.ProcessGroup:
        return self.state.process_group or self._setting().process_group


class _Meeting:
    """A key in the store, at which all ranks of a group have to meet."""

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._arrived, self._count, self._complete = (f"{key}/{part}" for part in ("arrived", "count", "complete"))
        self._rank = group.rank()
        self._ranks = group.size()
        self._is_last = False

    def wait(self, patience: float) -> None:
        """Return when all ranks have come; raise RuntimeError if some do not within ``patience`` seconds."""
        self._store.append(self._arrived, f"{self._rank},")  # type: ignore[attr-defined]
        self._is_last = self._store.add(self._count, 1) == self._ranks
        if self._is_last:
            self._store.set(self._complete, "yes")
            return
        try:
            self._store.wait([self._complete], timedelta(seconds=patience))
        except RuntimeError:
            here = {int(rank) for rank in self._store.get(self._arrived).decode().split(",")[:-1]}
            absent = [rank for rank in range(self._ranks) if rank not in here]
            raise RuntimeError(
                f"PowerSGD's state was changed on rank {listed(sorted(here))} (by load_state_dict() or by setting "
                f"iter), and within {patience:g} s not on rank {listed(absent)}. Change it on all ranks, between the "
                "same two steps." + see("FD004")
            ) from None

    def end(self) -> None:
        """Delete the keys, after all ranks have come."""
        if self._is_last:
            for key in (self._arrived, self._count, self._complete):
                self._store.delete_key(key)
