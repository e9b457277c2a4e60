"""A window that ended without some gradients: the error, which says which ranks have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.ranks.listing import listed

if TYPE_CHECKING:
    from fastddp._C import Lack, Reducer, StallWatch

_PATIENCE = 5.0  # seconds for other ranks to say what they lack
_MOST_LISTED = 10


def give_up(now: InForce, watch: StallWatch | None) -> str:
    """Give up the last window, which is partial, and return what to raise.

    That names each missing parameter, its bucket, and which ranks have its gradient. ``watch`` asks them, as for any
    step that does not end; None: nobody asks.
    """
    missing = now.reducer.missing()
    elsewhere = None if watch is None else watch.ask_who_has(_PATIENCE)
    silence = _NOBODY_ASKS if watch is None else _STORE_IS_GONE if elsewhere is None else ""
    message = _message(now, missing, elsewhere or {}, silence)
    now.reducer.give_up()
    return message


def check_not_failed(reducer: Reducer) -> None:
    """Raise RuntimeError if the last backward failed, on this rank or on another one."""
    if failure := reducer.failure():
        raise RuntimeError(
            f"{failure}\nAn optimizer was about to use them: call zero_grad(), and repeat forward and backward."
            + see("FD010")
        )


def _changed(now: InForce, missing: Sequence[int]) -> dict[int, str]:
    there = {id(parameter): parameter.requires_grad for parameter in now.module.parameters()}
    found = {index: there.get(id(now.parameters.tensors[index])) for index in missing}
    return {
        index: _NOT_THERE if is_trained is None else _FROZEN for index, is_trained in found.items() if not is_trained
    }


def _message(now: InForce, missing: Sequence[int], elsewhere: Mapping[int, Lack], silence: str) -> str:
    names, rank, ranks = now.parameters.names, now.process_group.rank(), now.process_group.size()
    changed = _changed(now, missing)
    bucket_of = {index: number for number, bucket in enumerate(now.plan) for index in bucket}
    headline = (
        f"fastddp: backward ended on rank {rank} without a gradient for {len(missing)} of {len(names)} parameters, so "
        "gradients are only partly synchronised:"
    )
    lines = [headline]
    for index in missing[:_MOST_LISTED]:
        place = f"bucket {bucket_of[index]}" if index in bucket_of else "in no bucket"
        where = _where(index, elsewhere, ranks) + changed.get(index, "")
        lines.append(f"  parameter {names[index]} (number {index}, {place}): {where}")
    if len(missing) > _MOST_LISTED:
        lines.append(f"  and {len(missing) - _MOST_LISTED} more")
    silent = sorted(set(range(ranks)) - set(elsewhere) - {rank})
    if silence:
        lines.append(silence)
    elif silent:
        lines.append(f"No report within {_PATIENCE:g} s from rank {listed(silent)}, which may have them or not.")
    # Torch's words: people and frameworks search logs for them.
    lines.append(
        "Expected to have finished reduction in the prior iteration before starting a new one. Parameter indices which "
        f"did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
    )
    return "\n".join([*lines, _CAUSES_AND_REMEDIES])


def _where(index: int, elsewhere: Mapping[int, Lack], ranks: int) -> str:
    """Which ranks have the gradient, as far as known."""
    having = [rank for rank, lack in sorted(elsewhere.items()) if index not in lack.parameters]
    to_come = [rank for rank, lack in sorted(elsewhere.items()) if index in lack.parameters and lack.waits]
    lacking = [rank for rank, lack in sorted(elsewhere.items()) if index in lack.parameters and not lack.waits]
    if having:
        return f"produced by rank {listed(having)}"
    if len(lacking) == ranks - 1:
        return "produced by no rank"
    known = [f"not produced by rank {listed(lacking)}"] if lacking else []
    known += [f"not yet by rank {listed(to_come)}, which waits in backward"] if to_come else []
    return ", ".join(known) or "no other rank has said whether it has it"


_FROZEN = "; it was frozen after wrapping: wrap the module again"
_NOT_THERE = "; the module has another parameter in its place, tied after wrapping for example: wrap the module again"
_NOBODY_ASKS = "Other ranks were not asked what they have, because stalls are not watched: Watch(stall=None)."
_STORE_IS_GONE = (
    "Other ranks could not be asked what they have: the store of the process group does not answer. The process that "
    "serves it, rank 0 or torchrun on its node, has probably ended: look at its output first."
)
_CAUSES_AND_REMEDIES = (
    "Every parameter that requires a gradient has to take part in computing the loss, on every rank. Likely causes: a "
    "layer that this forward did not use, or an output that the loss does not depend on. Remedies: "
    "find_unused_parameters=True (also where a module is replicated in place, and a step trains one of its submodules "
    "alone or comes between two backwards), or static_graph=True if every step is alike; use all parameters in the "
    "loss; set requires_grad=False on those never used before wrapping, or exclude them with "
    "_set_params_and_buffers_to_ignore_for_model. This window's gradients are void: call zero_grad() before the next "
    "forward. print(model.bucket_plan()) shows which parameters a bucket holds." + see("FD005")
)
