"""A window that ended without some gradients: who has which, and what to say about it."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from fastddp.bucket_plan import Buckets

if TYPE_CHECKING:
    from fastddp._C import Reducer
    from fastddp.ddp import DistributedDataParallel

_TIME_LIMIT = 5.0  # seconds for other ranks to say what they have
_MOST_LISTED = 10


@dataclass(frozen=True)
class Window:
    """One window of one model, as ranks write about it to the store of their process group."""

    process_group: dist.ProcessGroup
    model: int  # the how manieth of the group's, the same on all ranks
    number: int

    @classmethod
    def of(cls, model: DistributedDataParallel, number: int) -> Window:
        """The window of that number."""
        return cls(model.process_group, _number_of[model], number)

    def publish(self, missing: Sequence[int]) -> None:
        """Tell other ranks for which parameters this one has no gradient."""
        self._store().set(self._key(self.process_group.rank()), json.dumps(list(missing)))

    def collect(self, time_limit: float) -> dict[int, set[int]]:
        """What is missing on other ranks, of those that said so within ``time_limit`` seconds."""
        others = [rank for rank in range(self.process_group.size()) if rank != self.process_group.rank()]
        found: dict[int, set[int]] = {}
        deadline = time.monotonic() + time_limit
        while len(found) < len(others):
            for rank in others:
                if rank not in found and self._store().check([self._key(rank)]):
                    found[rank] = set(json.loads(self._store().get(self._key(rank))))
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return found

    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_process_group_store(self.process_group)

    def _key(self, rank: int) -> str:
        return f"fastddp/missing/{self.model}/{self.number}/{rank}"


_models_of: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_number_of: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()


def watch_for_waiting(model: DistributedDataParallel) -> None:
    """Let others know that nothing is missing here whenever a backward of ``model`` waits for long: they may ask."""
    _number_of[model] = _models_of[model.process_group] = _models_of.get(model.process_group, 0) + 1
    this = weakref.ref(model)  # the callback must keep neither it nor its process group alive

    def publish(number: int) -> None:
        if (model := this()) is not None:
            Window.of(model, number).publish([])

    model.reducer.on_waiting(publish)


def check_not_failed(reducer: Reducer) -> None:
    """Raise RuntimeError if the last backward failed, on this rank or on another one."""
    if failure := reducer.failure():
        raise RuntimeError(
            f"{failure}\nAn optimizer was about to use them: call zero_grad(), and repeat forward and backward."
        )


def raise_missing(reducer: Reducer, names: Sequence[str], plan: Buckets, window: Window) -> NoReturn:
    """Give up the last window of ``reducer``, which is partial.

    Raises:
        RuntimeError: names each missing parameter, its bucket, this rank, and which ranks have its gradient.
    """
    missing = reducer.missing()
    window.publish(missing)
    elsewhere = window.collect(_TIME_LIMIT)
    reducer.give_up()
    raise RuntimeError(_message(missing, names, plan, window.process_group, elsewhere))


def _message(
    missing: Sequence[int],
    names: Sequence[str],
    plan: Buckets,
    process_group: dist.ProcessGroup,
    elsewhere: dict[int, set[int]],
) -> str:
    bucket_of = {index: number for number, bucket in enumerate(plan) for index in bucket}
    lines = []
    for index in missing[:_MOST_LISTED]:
        place = f"bucket {bucket_of[index]}" if index in bucket_of else "in no bucket"
        having = [rank for rank, lacks in sorted(elsewhere.items()) if index not in lacks]
        where = f"produced by rank {_listed(having)}" if having else "produced by no rank that reported"
        lines.append(f"  parameter {names[index]} (number {index}, {place}): {where}")
    if len(missing) > _MOST_LISTED:
        lines.append(f"  and {len(missing) - _MOST_LISTED} more")
    silent = sorted(set(range(process_group.size())) - set(elsewhere) - {process_group.rank()})
    if silent:
        lines.append(f"No report within {_TIME_LIMIT:g} s from rank {_listed(silent)}.")
    rank = process_group.rank()
    headline = (
        f"fastddp: backward ended on rank {rank} without a gradient for {len(missing)} of {len(names)} parameters, so "
        "gradients are only partly synchronised:"
    )
    return "\n".join([headline, *lines, _CAUSES_AND_REMEDIES])


_CAUSES_AND_REMEDIES = (
    "Every parameter that requires a gradient has to take part in computing the loss, on every rank. Likely causes: a "
    "layer that this forward did not use, or an output that the loss does not depend on. Remedies: "
    "find_unused_parameters=True, or static_graph=True if every step is alike; use all parameters in the loss; set "
    "requires_grad=False on those never used before wrapping, or exclude them with "
    "_set_params_and_buffers_to_ignore_for_model. This window's gradients are void: call zero_grad() before the next "
    "forward. print(model.bucket_plan()) shows which parameters a bucket holds."
)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f", … ({len(ranks)} in all)" if len(ranks) > 16 else "")
