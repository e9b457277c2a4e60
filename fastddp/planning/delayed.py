"""``delay_all_reduce_named_params``: gradients that wait for another parameter's gradient, and travel together.

Torch's DDP takes these parameters away from its reducer, lets autograd add up their gradients in one buffer, and sends
the buffer from a hook on the other parameter. It does so under ``no_sync`` and communication hooks too, and never
waits. Here only the bucket plan changes: the parameters share a bucket with the one that they wait for. Otherwise they
are treated as any parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fastddp.errors import see
from fastddp.module.parameters import NamedParameters
from fastddp.planning.bucket_plan import Buckets, plan_buckets

_NO_CAP = 2**62  # bytes


@dataclass(frozen=True)
class Delayed:
    """Parameters by their place in the model's list: ``members`` wait for ``awaited``."""

    awaited: int
    members: frozenset[int]

    @classmethod
    def from_arguments(
        cls,
        delayed: Iterable[tuple[str, nn.Parameter]] | None,
        awaited: nn.Parameter | None,
        parameters: NamedParameters,
    ) -> Delayed | None:
        """Resolve ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``; None if neither is given.

        Frozen parameters among ``delayed`` have no gradient and are left out. Raises ValueError if only one of the two
        is given, or one names a parameter whose gradients are not synchronised.
        """
        if (delayed is None) != (awaited is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need each other: the first says whose "
                "gradients wait, the second what for." + see("FD023")
            )
        if delayed is None or awaited is None:
            return None
        indices = {parameter: index for index, parameter in enumerate(parameters.tensors)}

        def index_of(parameter: nn.Parameter, called: str) -> int:
            if parameter not in indices:
                raise ValueError(
                    f"{called} is not among the parameters whose gradients are synchronised: it belongs to another "
                    "module, is ignored, or is frozen." + see("FD024")
                )
            return indices[parameter]

        members = {index_of(p, f"{name} in delay_all_reduce_named_params") for name, p in delayed if p.requires_grad}
        return cls(index_of(awaited, "param_to_hook_all_reduce"), frozenset(members))

    def plan(self, parameters: Sequence[Tensor], caps: Sequence[int], order: Sequence[int]) -> Buckets:
        """As :func:`plan_buckets`, but the awaited parameter's bucket, at its place in ``order``, has all members.

        Members of another dtype or device have a bucket of their own directly after it. If the awaited parameter is in
        no bucket (its gradients are sparse, or no rank uses it), nothing waits.
        """
        if self.awaited not in order:
            return plan_buckets(parameters, caps, order)
        together = [self.awaited, *(index for index in order if index in self.members - {self.awaited})]
        place = order.index(self.awaited)
        before, after = (
            [index for index in part if index not in self.members] for part in (order[:place], order[place + 1 :])
        )
        return [
            *plan_buckets(parameters, caps, before),
            *plan_buckets(parameters, [_NO_CAP], together),
            *plan_buckets(parameters, caps, after),
        ]
