"""Steps with gradients of this rank alone: replicas drift apart, and the loss looks fine."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.optim import Optimizer

from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.watch.options import OnLocalSteps


class LocalSteps:
    """Tells of a model's first step with gradients that stayed on this rank, though the loop did not ask for it."""

    def __init__(self, now: InForce, on: OnLocalSteps) -> None:
        self._now = now
        self._on = on if now.process_group.size() > 1 else None
        self._contexts = 0  # of no_sync(), which are open
        self._kept: tuple[int, str] | None = None  # the window of the last forward that kept gradients, and why it did
        # Note [Averaged by hand]: what there had been at that forward, and at each optimizer's last step.
        self._then = self._moment()
        self._last_steps: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()

    @contextmanager
    def are_wanted(self) -> Iterator[None]:
        """Steps in this context are local on purpose."""
        self._contexts += 1
        try:
            yield
        finally:
            self._contexts -= 1

    def note_forward_without_sync(self) -> None:
        """A forward lets its backward keep gradients on this rank."""
        self._kept = (self._now.reducer.windows(), _NO_SYNC if self._contexts else _FLAG)
        self._then = self._moment()

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer of the model has stepped."""
        self._last_steps[optimizer] = self._moment()

    # Note [Averaged by hand]
    # A loop may average gradients itself. Their tensors do not tell: a collective, or a write through `.data`, leaves
    # the version as it is, and clipping changes it. But no gradient is averaged without a collective. So nothing is
    # said if one has begun, in any group, since the gradients may have come, and we have begun none: in no window.

    def _moment(self) -> tuple[int, int]:
        """How many windows, and how many collectives of this process, there have been."""
        collectives = 0
        for group in tuple(dist.distributed_c10d._world.pg_map) if self._on is not None else ():
            with suppress(RuntimeError):  # a backend that does not count
                collectives += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return self._now.reducer.windows(), collectives

    def check(self, optimizer: Optimizer, others: Iterable[InForce]) -> None:
        """Warn, or raise RuntimeError, if ``optimizer`` is about to step gradients that were never averaged.

        The models of ``others`` may have averaged parameters of this one.
        """
        if self._on is None or self._contexts:
            return
        own = self._now.parameters
        local = {id(own.tensors[index]): own.names[index] for index in self._now.reducer.never_averaged()}
        if not local:
            return
        for other in others:
            for index in other.reducer.averaged():
                local.pop(id(other.parameters.tensors[index]), None)
        stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        names = [local[parameter] for parameter in stepped if parameter in local]
        now, then = self._moment(), max(self._then, self._last_steps.get(optimizer, self._then))
        if not names or (now[0] == then[0] and now[1] > then[1]):
            return
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        message = (
            f"fastddp: {type(optimizer).__name__} is about to step with a gradient that is rank "
            f"{self._now.process_group.rank()}'s alone, of parameter {names[0]}{more}: no backward has averaged it, so "
            f"replicas drift apart. {self._why()} "
            "If that is on purpose, as in local SGD, put no_sync() around the step, too, or pass "
            "Watch(local_steps=None)." + see("FD048")
        )
        self._tell(message)

    def _tell(self, message: str) -> None:
        if self._on == "raise":
            raise RuntimeError(message)
        self._on = None  # it is said once
        warnings.warn(message, stacklevel=3)

    def _why(self) -> str:
        reducer = self._now.reducer
        if reducer.state == "armed":
            return _OPEN
        return self._kept[1] if self._kept is not None and self._kept[0] == reducer.windows() else _OUTSIDE


_NO_SYNC = (
    "Its forward ran under no_sync(), and no backward that synchronises came before the step. Run the forward and the "
    "backward of the last microbatch outside of no_sync()."
)
_FLAG = (
    "require_backward_grad_sync was False during its forward, where it is read. Set it before the forward of the last "
    "microbatch."
)
_OPEN = (
    "A forward outside of no_sync() was to synchronise it, but no backward through that forward's outputs came before "
    "the step. Call backward on its loss, or skip the step, too."
)
_OUTSIDE = (
    "Its backward belongs to no forward of the wrapper: the loss went through model.module, one of its methods or its "
    "parameters, or a backward came after the one that synchronised. Call the wrapper, and call backward once on the "
    "sum of the losses."
)
