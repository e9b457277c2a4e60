"""``bucket_cap_mb="auto"``: after a few windows, the best bucket plan by measurements of them."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastddp import comm_hooks
from fastddp._C import Reducer
from fastddp.bucket_plan import Buckets
from fastddp.errors import see
from fastddp.exchange.agreement import greatest
from fastddp.exchange.descriptions import AllReduce, Setting
from fastddp.exchange.lanes import lanes_for, lanes_pay
from fastddp.module.replicas import agree_on_plan
from fastddp.planning.link import NoBandwidth, largest_bucket, measure_link
from fastddp.planning.model import Gradient, Link, best_plan, end_of

WINDOWS = 3
"""Windows that are measured before each plan."""
PLANS = 2
"""The first plan is made from windows under the default buckets. But communication during backward slows backward down,
so gradients then get ready later than those windows say. The second plan is made from windows under the first."""


@dataclass(frozen=True)
class Found:
    """A decision, the same on all ranks."""

    plan: Buckets
    several_lanes: bool


class Planner:
    """Plans the buckets of one model from measured windows, and again from windows under that plan.

    The very first window is not measured, because memory is allocated in it, and it may be unknown which gradients to
    wait for. The default buckets stay where nothing supports a plan: with one rank, from which nothing travels, or if
    measuring the process group gives no bandwidth.
    """

    def __init__(self) -> None:
        self._due: int | None = None
        self._left = PLANS
        self._links: dict[int, Link | None] = {}  # by number of lanes; None: no bandwidth could be measured
        self._unsupported: dict[int, str] = {}  # what was measured in that case

    def begin(self, reducer: Reducer) -> None:
        """Measure the coming windows, if there is still a plan to make."""
        if self._left:
            reducer.record_ready_times(True)
            self._due = reducer.windows() + WINDOWS

    def is_due(self, reducer: Reducer) -> bool:
        """Whether the measured windows have ended; the same on all ranks."""
        return self._due is not None and reducer.windows() >= self._due

    def find(self, reducer: Reducer, setting: Setting, exchange: AllReduce, device: torch.device) -> Found | None:
        """The best plan for the parameters of ``setting.plan``.

        A collective, between two windows. The first call takes about a second, in which the process group is measured.
        It takes longer where a collective of a few bytes takes a tenth of a second or more.

        Returns:
            None if buckets stay as they are: no measured window went well on any rank, or nothing supports a plan.
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
        found = self._fastest(members, gradients, group, device)
        if found is None:
            self._left = 0
            return None
        plan = agree_on_plan(found.plan, members, setting.process_group, device)
        return Found(plan, found.several_lanes)

    def _fastest(
        self,
        members: Sequence[int],
        gradients: Sequence[Gradient],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> Found | None:
        """The better of the best plan for one lane and, where there can be several, the best for several lanes."""
        if group.size() == 1:
            return None
        total = sum(gradient.bytes for gradient in gradients)
        ways = [[group]]
        if lanes_pay([total]) and len(lanes := lanes_for(group, device, measured=True)) > 1:
            ways.append(lanes)
        choices: list[tuple[float, Found]] = []
        for lanes in ways:
            link = self._link(lanes, device, total)
            if link is None:
                continue
            plan = best_plan(gradients, link, largest_bucket(link, device))
            end = end_of(plan, gradients, link)
            in_parameters = [[members[place] for place in bucket] for bucket in plan]
            choices.append((end, Found(in_parameters, len(lanes) > 1)))
        if not choices:
            self._warn(group)
            return None
        return min(choices, key=lambda choice: choice[0])[1]

    def _link(self, lanes: Sequence[dist.ProcessGroup], device: torch.device, total: int) -> Link | None:
        """The link over these lanes, measured once for each number of lanes; None if it supports no bandwidth."""
        count = len(lanes)
        if count not in self._links:
            try:
                self._links[count] = measure_link(lanes, device, total)
            except NoBandwidth as error:
                self._links[count] = None
                self._unsupported[count] = str(error)
        return self._links[count]

    def _warn(self, group: dist.ProcessGroup) -> None:
        """Say on rank 0 why there is no plan."""
        if group.rank() == 0:
            warnings.warn(
                'bucket_cap_mb="auto" keeps the default buckets: over '
                f"{dist.get_backend(group)}, {self._unsupported[1]}, which does not tell how much longer a larger one "
                "takes. Measure on machines that do nothing else, or give a number of MiB.",
                stacklevel=2,
            )


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
