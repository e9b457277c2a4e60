"""A window that ended without some gradients: which ranks have them, and the error."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from fastddp.bucket_plan import Buckets
from fastddp.in_force import InForce
from fastddp.listing import listed
from fastddp.watch.lookout import look_now_and_then
from fastddp.window.reports import Report, Reports, WindowLog

if TYPE_CHECKING:
    from fastddp._C import Reducer

_PATIENCE = 5.0  # seconds for other ranks to say what they have
_LONG = 2.0  # seconds of waiting in backward until a rank reports unasked
_MOST_LISTED = 10


class Unfinished:
    """Reports about windows with missing gradients, in the store of the model's process group.

    A rank that has waited in backward for long reports what it has, in case others ask.

    Args:
        now: what is in force.
    """

    def __init__(self, now: InForce) -> None:
        self._now = now
        self._to_delete: list[tuple[int, WindowLog]] = []
        look_now_and_then(self, _LongWaits(self, now).look)

    def _log(self, window: int) -> WindowLog:
        """The log of that window; it is deleted when the window is over."""
        group = self._now.process_group
        store = dist.distributed_c10d._get_process_group_store(group)
        key = f"fastddp/missing/{self._now.number.name}/{window}"
        log = WindowLog(store, key, group.rank(), group.size())
        self._to_delete.append((window, log))
        return log

    def report_waiting(self, window: int, complete: int) -> None:
        """Say what this rank lacks while it waits for others; its first ``complete`` buckets are complete."""
        plan = self._now.setting.plan
        lacking: set[int] = set()
        if complete < len(plan):
            lacking = set(range(len(self._now.setting.names))).difference(*plan[:complete])
        self._log(window).write(Report(frozenset(lacking), waits=True))

    def delete_reports(self) -> None:
        """Delete what this rank has written about windows that are over; after ``begin_forward``."""
        if not self._to_delete:
            return
        windows = self._now.reducer.windows()
        logs, self._to_delete = self._to_delete, [one for one in self._to_delete if one[0] >= windows]
        for number, log in logs:
            if number < windows:
                with contextlib.suppress(RuntimeError):  # the store is gone, and the log with it
                    log.delete()

    def give_up(self) -> str:
        """Give up the last window, which is partial.

        Returns:
            What to raise: it names each missing parameter, its bucket, this rank, and which ranks have its gradient.
        """
        reducer, setting, group = self._now.reducer, self._now.setting, self._now.process_group
        missing = reducer.missing()
        elsewhere: Reports = {}
        unknown = ""
        try:
            log = self._log(reducer.windows())
            elsewhere = log.ask(Report(frozenset(missing), waits=False), _PATIENCE)
        except Exception as error:  # of the store; the user has to know first what is missing
            unknown = _store_is_gone(error)
        message = _message(missing, setting.names, setting.plan, group.rank(), group.size(), elsewhere, unknown)
        reducer.give_up()
        return message


class _LongWaits:
    """Notices in another thread that backward has waited for long, once a window."""

    def __init__(self, unfinished: Unfinished, now: InForce) -> None:
        self._unfinished = weakref.ref(unfinished)
        self._progress = now.reducer.progress  # the thread must not be the last to hold the reducer
        self._reported = -1  # the window

    def look(self) -> None:
        waiting = self._progress.waiting()
        if waiting is None or waiting.seconds < _LONG or waiting.window == self._reported:
            return
        self._reported = waiting.window
        if (unfinished := self._unfinished()) is not None:
            unfinished.report_waiting(waiting.window, waiting.complete)  # errors are lost; askers see them


def check_not_failed(reducer: Reducer) -> None:
    """Raise RuntimeError if the last backward failed, on this rank or on another one."""
    if failure := reducer.failure():
        raise RuntimeError(
            f"{failure}\nAn optimizer was about to use them: call zero_grad(), and repeat forward and backward."
        )


def _message(
    missing: Sequence[int],
    names: Sequence[str],
    plan: Buckets,
    rank: int,
    ranks: int,
    elsewhere: Reports,
    unknown: str,
) -> str:
    bucket_of = {index: number for number, bucket in enumerate(plan) for index in bucket}
    headline = (
        f"fastddp: backward ended on rank {rank} without a gradient for {len(missing)} of {len(names)} parameters, so "
        "gradients are only partly synchronised:"
    )
    lines = [headline]
    for index in missing[:_MOST_LISTED]:
        place = f"bucket {bucket_of[index]}" if index in bucket_of else "in no bucket"
        lines.append(f"  parameter {names[index]} (number {index}, {place}): {_where(index, elsewhere, ranks)}")
    if len(missing) > _MOST_LISTED:
        lines.append(f"  and {len(missing) - _MOST_LISTED} more")
    silent = sorted(set(range(ranks)) - set(elsewhere) - {rank})
    if unknown:
        lines.append(unknown)
    elif silent:
        lines.append(f"No report within {_PATIENCE:g} s from rank {listed(silent)}, which may have them or not.")
    # Torch's words: people and frameworks search logs for them.
    lines.append(
        "Expected to have finished reduction in the prior iteration before starting a new one. Parameter indices which "
        f"did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
    )
    return "\n".join([*lines, _CAUSES_AND_REMEDIES])


def _where(index: int, elsewhere: Reports, ranks: int) -> str:
    """Which ranks have the gradient, as far as known."""
    having = [rank for rank, report in sorted(elsewhere.items()) if index not in report.lacking]
    to_come = [rank for rank, report in sorted(elsewhere.items()) if index in report.lacking and report.waits]
    lacking = [rank for rank, report in sorted(elsewhere.items()) if index in report.lacking and not report.waits]
    if having:
        return f"produced by rank {listed(having)}"
    if len(lacking) == ranks - 1:
        return "produced by no rank"
    known = [f"not produced by rank {listed(lacking)}"] if lacking else []
    known += [f"not yet by rank {listed(to_come)}, which waits in backward"] if to_come else []
    return ", ".join(known) or "no other rank has said whether it has it"


def _store_is_gone(error: Exception) -> str:
    return (
        "Other ranks could not be asked what they have: the store of the process group does not answer "
        f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}). The process that serves "
        "it, rank 0 or torchrun on its node, has probably ended: look at its output first."
    )


_CAUSES_AND_REMEDIES = (
    "Every parameter that requires a gradient has to take part in computing the loss, on every rank. Likely causes: a "
    "layer that this forward did not use, or an output that the loss does not depend on. Remedies: "
    "find_unused_parameters=True, or static_graph=True if every step is alike; use all parameters in the loss; set "
    "requires_grad=False on those never used before wrapping, or exclude them with "
    "_set_params_and_buffers_to_ignore_for_model. This window's gradients are void: call zero_grad() before the next "
    "forward. print(model.bucket_plan()) shows which parameters a bucket holds."
)
