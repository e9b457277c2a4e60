"""A bucket plan that was given, not computed, and whether it fits the module."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from fastddp.errors import see
from fastddp.planning.bucket_plan import BucketPlan, Buckets


@dataclass(frozen=True)
class PinnedPlan:
    """The constructor's ``buckets``, as one rank read them.

    Reading or fitting a plan can fail on one rank alone, while the others wait for that rank in a collective. So an
    error is kept until ranks have compared their ``rows``.
    """

    buckets: Buckets | None = None  # None: no plan was given, or there is a ``problem``
    caps: tuple[int, ...] = ()  # caps that would give about these buckets, for attributes that show caps
    rows: Sequence[str] = ()  # texts that must be equal on all ranks: where each parameter is, or what is wrong
    problem: Exception | None = None  # to be raised behind the comparison

    @staticmethod
    def of(
        plan: BucketPlan | str | os.PathLike[str] | None,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        without: Collection[int] = (),
    ) -> PinnedPlan:
        """The plan, or the plan in that file, for these parameters, except for the numbers that are ``without``."""
        if plan is None:
            return PinnedPlan()
        try:
            if not isinstance(plan, (BucketPlan, str, os.PathLike)):
                raise TypeError(
                    f"buckets is what bucket_plan() returned, or the path of its file, not {plan!r}." + see("FD024")
                )
            if not isinstance(plan, BucketPlan):
                plan = BucketPlan.load(plan)
            return PinnedPlan(fit(plan, names, parameters, without), _caps(plan), _rows(plan))
        except Exception as problem:  # of any kind: raised here, it would leave the other ranks waiting
            return PinnedPlan(rows=[f"a plan that cannot be used: {problem}"[:_MOST_WORDS]], problem=problem)


def fit(plan: BucketPlan, names: Sequence[str], parameters: Sequence[Tensor], without: Collection[int] = ()) -> Buckets:
    """The plan's buckets as indices into ``parameters``, found by name. Raises ValueError if it does not fit."""
    index_of = {name: index for index, name in enumerate(names) if index not in without}
    buckets: Buckets = []
    for bucket in plan.buckets:
        buckets.append([])
        for planned in bucket.parameters:
            where = f"parameter '{planned.name}' of bucket {bucket.number}"
            index = index_of.pop(planned.name, None)
            if index is None:
                raise _misfit(f"{where} is none of the module's parameters that require a gradient and are not ignored")
            parameter = parameters[index]
            if (tuple(parameter.shape), parameter.dtype) != (planned.shape, planned.dtype):
                raise _misfit(
                    f"{where} has shape {planned.shape} and {planned.dtype} in the plan, and {tuple(parameter.shape)} "
                    f"and {parameter.dtype} in the module"
                )
            buckets[-1].append(index)
            first = parameters[buckets[-1][0]]
            if parameter.device != first.device:
                raise _misfit(f"{where} is on {parameter.device}, and the bucket's first one on {first.device}")
    if index_of:
        raise _misfit(f"the module's parameter '{next(iter(index_of))}' is in no bucket of the plan")
    return buckets


def _misfit(what: str) -> ValueError:
    return ValueError(
        f"The bucket plan does not fit the module: {what}. Leave buckets out, train a step, and save "
        "model.bucket_plan() anew." + see("FD025")
    )


_MOST_WORDS = 1000  # characters, of an error that goes to all ranks


def _caps(plan: BucketPlan) -> tuple[int, int]:
    """Caps of the first bucket and of the others. The last bucket may be smaller, and the first cap is not larger."""
    first, *others = [bucket.bytes for bucket in plan.buckets]
    cap = min(others[:-1], default=max(first, *others, 0))
    return min(first, cap), cap


def _rows(plan: BucketPlan) -> list[str]:
    return [
        f"'{parameter.name}' of shape {parameter.shape}, {parameter.dtype}, in bucket {bucket.number}"
        for bucket in plan.buckets
        for parameter in bucket.parameters
    ]
