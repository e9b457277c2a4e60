"""``bucket_cap_mb="auto"``: after a few windows, the best bucket plan by measurements of them."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fastddp import comm_hooks
from fastddp._C import Reducer
from fastddp.errors import see
from fastddp.exchange.descriptions import AllReduce, Setting
from fastddp.module.replicas import agree_on_plan
from fastddp.planning.bucket_plan import Buckets
from fastddp.planning.link import largest_bucket, measure_link
from fastddp.planning.model import Gradient, Link, best_plan, end_of
from fastddp.ranks.agreement import greatest
from fastddp.ranks.lanes import lanes_for, lanes_pay

WINDOWS = 3
"""Windows that are measured before each plan."""
PLANS = 2
"""The first plan is made from windows under the default buckets. But communication during backward slows backward down,
so gradients then get ready later than those windows say. The second plan is made from windows under the first."""


class Planner:
    """Plans the buckets of one model from measured windows, and again from windows under that plan.

    The very first window is not measured, because memory is allocated in it, and it may be unknown which gradients to
    wait for. The default buckets stay where nothing supports a plan: with one rank, from which nothing travels, or if
    measuring the process group gives no bandwidth.
    """

    def __init__(self) -> None:
        self._due: int | None = None
        self._left = PLANS
        self._links: dict[int, Link | str] = {}  # by number of lanes; words: what was measured tells no bandwidth

    @property
    def left(self) -> int:
        """How many plans are still to be made."""
        return self._left

    def go_on(self, left: int, reducer: Reducer) -> None:
        """Make so many plans, for other ranks than an earlier planner: measure anew."""
        self._left = left
        if reducer.windows() > 0:
            self.begin(reducer)

    def begin(self, reducer: Reducer) -> None:
        """Measure the coming windows, if there is still a plan to make."""
        if self._left:
            reducer.record_ready_times(True)
            self._due = reducer.windows() + WINDOWS

    def is_due(self, reducer: Reducer) -> bool:
        """Whether the measured windows have ended; the same on all ranks."""
        return self._due is not None and reducer.windows() >= self._due

    def find(
        self, reducer: Reducer, setting: Setting, exchange: AllReduce, device: torch.device
    ) -> tuple[Buckets, bool] | None:
        """The best plan for the parameters of ``setting.plan``, and whether it is for several lanes.

        A collective, between two windows. The first call takes about a second, in which the process group is measured;
        more where a collective of a few bytes takes a tenth of a second. None: buckets stay as they are, because no
        measured window went well on any rank, or nothing supports a plan.
        """
        self._due = None
        self._left -= 1
        windows = reducer.ready_times()
        reducer.record_ready_times(False)
        members = [index for bucket in setting.plan for index in bucket]
        ready = greatest([_median(windows, index) for index in members], setting.process_group, device)
        last = max(ready)
        if last < 0:
            return None
        gradients = [
            _gradient(setting, exchange, index, second if second >= 0 else last)
            for index, second in zip(members, ready, strict=True)
        ]
        group = exchange.process_group or setting.process_group
        found = self._fastest(gradients, group, device)
        if found is None:
            self._left = 0
            return None
        places, several_lanes = found
        plan = [[members[place] for place in bucket] for bucket in places]
        return agree_on_plan(plan, members, setting.process_group, device), several_lanes

    def _fastest(
        self, gradients: Sequence[Gradient], group: dist.ProcessGroup, device: torch.device
    ) -> tuple[Buckets, bool] | None:
        """The better of the best plan for one lane and, where there can be several, the best for several lanes.

        If nothing that was measured tells a bandwidth, rank 0 warns.
        """
        if group.size() == 1:
            return None
        total = sum(gradient.bytes for gradient in gradients)
        ways = [[group]]
        if lanes_pay([total]) and len(lanes := lanes_for(group, device, measured=True)) > 1:
            ways.append(lanes)
        choices: list[tuple[float, Buckets, bool]] = []
        for lanes in ways:
            if len(lanes) not in self._links:
                self._links[len(lanes)] = measure_link(lanes, device, total)
            link = self._links[len(lanes)]
            if isinstance(link, Link):
                plan = best_plan(gradients, link, largest_bucket(link, device))
                choices.append((end_of(plan, gradients, link), plan, len(lanes) > 1))
        if choices:
            return min(choices, key=lambda choice: choice[0])[1:]
        if group.rank() == 0:
            warnings.warn(
                'bucket_cap_mb="auto" keeps the default buckets: over '
                f"{dist.get_backend(group)}, {self._links[1]}, which does not tell how much longer a larger one "
                "takes. Measure on machines that do nothing else, or give a number of MiB.",
                stacklevel=2,
            )
        return None


def check_planned_hook(hook: object) -> None:
    """Raise ValueError if buckets cannot be planned for ``hook``."""
    if not comm_hooks.is_all_reduce(hook):
        raise ValueError(
            'bucket_cap_mb="auto" plans for gradients that are averaged by one allreduce a bucket, as they are or in '
            "16 bits (allreduce_hook, fp16_compress_hook, bf16_compress_hook). What another hook sends, and when, it "
            "does not know: give a number of MiB, or pin a plan with bucket_plan." + see("FD023")
        )


def _median(windows: Sequence[Sequence[float]], index: int) -> float:
    """The median time of the gradient, over the windows in which it came; -1 if there are none."""
    return statistics.median([w[index] for w in windows if not math.isnan(w[index])] or [-1.0])


def _gradient(setting: Setting, exchange: AllReduce, index: int, ready: float) -> Gradient:
    parameter = setting.parameters[index]
    travels = parameter.numel() * (exchange.wire or parameter.dtype).itemsize
    return Gradient(ready, travels, (parameter.dtype, parameter.device))
