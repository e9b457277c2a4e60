"""A window that ended without some gradients: who has which, and what to say about it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from fastddp.bucket_plan import Buckets
from fastddp.watch.numbering import number_of
from fastddp.window import long_waits
from fastddp.window.reports import Report, Reports, WindowLog
from fastddp.wrapper import Wrapper

if TYPE_CHECKING:
    from fastddp._C import Reducer, Waiting

_PATIENCE = 5.0  # seconds for other ranks to say what they have
_MOST_LISTED = 10


@dataclass(frozen=True)
class Window:
    """One window of one model, as ranks write about it to the store of their process group."""

    model: Wrapper
    number: int

    def log(self) -> WindowLog:
        """What ranks write to; it is deleted when the window is over."""
        group = self.model.process_group
        store = dist.distributed_c10d._get_process_group_store(group)
        key = f"fastddp/missing/{number_of(self.model).name}/{self.number}"
        log = WindowLog(store, key, group.rank(), group.size())
        _to_delete.setdefault(self.model, []).append((self.number, log))
        return log


_to_delete: weakref.WeakKeyDictionary[Wrapper, list[tuple[int, WindowLog]]] = weakref.WeakKeyDictionary()


def watch_for_waiting(model: Wrapper) -> None:
    """Let others know what this rank has whenever a backward of ``model`` waits for long: they may ask."""
    _to_delete.pop(model, None)  # written for another group
    long_waits.watch(model, model.reducer.progress, _report_waiting)


def _report_waiting(model: Wrapper, waiting: Waiting) -> None:
    plan = model._setting.plan
    lacking: set[int] = set()
    if waiting.complete < len(plan):
        lacking = set(range(len(model._setting.names))).difference(*plan[: waiting.complete])
    Window(model, waiting.window).log().write(Report(frozenset(lacking), waits=True))


def delete_reports(model: Wrapper) -> None:
    """Delete what this rank has written about windows of ``model`` that are over; after ``begin_forward``."""
    logs = _to_delete.get(model)
    if not logs:
        return
    windows = model.reducer.windows()
    _to_delete[model] = [(number, log) for number, log in logs if number >= windows]
    for number, log in logs:
        if number < windows:
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it what was written
                log.delete()


def check_not_failed(reducer: Reducer) -> None:
    """Raise RuntimeError if the last backward failed, on this rank or on another one."""
    if failure := reducer.failure():
        raise RuntimeError(
            f"{failure}\nAn optimizer was about to use them: call zero_grad(), and repeat forward and backward."
        )


def give_up(window: Window, reducer: Reducer, names: Sequence[str], plan: Buckets) -> str:
    """Give up the last window of ``reducer``, which is partial.

    Returns:
        What to raise: it names each missing parameter, its bucket, this rank, and which ranks have its gradient.
    """
    missing = reducer.missing()
    elsewhere: Reports = {}
    unknown = ""
    try:
        elsewhere = window.log().ask(Report(frozenset(missing), waits=False), _PATIENCE)
    except Exception as error:  # whatever is wrong with the store: it is not what the user has to know first
        unknown = _store_is_gone(error)
    group = window.model.process_group
    message = _message(missing, names, plan, group.rank(), group.size(), elsewhere, unknown)
    reducer.give_up()
    return message


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
        lines.append(f"No report within {_PATIENCE:g} s from rank {_listed(silent)}, which may have them or not.")
    # Torch's words, for which people and frameworks search logs.
    lines.append(
        "Expected to have finished reduction in the prior iteration before starting a new one. Parameter indices which "
        f"did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
    )
    return "\n".join([*lines, _CAUSES_AND_REMEDIES])


def _where(index: int, elsewhere: Reports, ranks: int) -> str:
    """Who has the gradient, as far as it is known."""
    having = [rank for rank, report in sorted(elsewhere.items()) if index not in report.lacking]
    to_come = [rank for rank, report in sorted(elsewhere.items()) if index in report.lacking and report.waits]
    lacking = [rank for rank, report in sorted(elsewhere.items()) if index in report.lacking and not report.waits]
    if having:
        return f"produced by rank {_listed(having)}"
    if len(lacking) == ranks - 1:
        return "produced by no rank"
    known = [f"not produced by rank {_listed(lacking)}"] if lacking else []
    known += [f"not yet by rank {_listed(to_come)}, which waits in backward"] if to_come else []
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


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f", … ({len(ranks)} in all)" if len(ranks) > 16 else "")
