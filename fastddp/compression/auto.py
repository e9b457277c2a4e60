"""``comm_hooks.auto_hook``: measures windows, tries exchanges, and gives each bucket the cheapest that is of use.

Note [Windows of auto_hook]
Counted from the hook's first window: in two windows buckets are rebuilt and memory is taken. Six windows are measured,
for when gradients are ready and how long a step is. Before the ninth window exchanges are tried, and the plan is made.
If the plan compresses, one window sets up its exchanges, and six more are measured. Before the next window ranks
compare: if steps are slower than the plain ones were, by more than noise, all buckets are plain again, for good. Every
decision depends only on numbers of windows and on numbers that ranks have agreed on, so all ranks decide alike.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from fastddp import _C
from fastddp.bucket_plan import Buckets
from fastddp.compression.choice import PLAIN, Choice, Cost, Load, allowed, behind_backward, choose, is_slower, median
from fastddp.compression.costs import (
    Agree,
    compressed_elements,
    greatest_over,
    largest_trial,
    measure_costs,
    trials_of,
)
from fastddp.compression.plan import CompressionPlan, kept_plain, plan_of
from fastddp.compression.state import AutoState, exchange_of, exchange_to_try
from fastddp.errors import see
from fastddp.exchange.agreement import difference, gather_numbers
from fastddp.exchange.descriptions import AllReduce, Exchange, Setting
from fastddp.exchange.per_bucket import PerBucket
from fastddp.exchange.power_sgd import PowerSGD
from fastddp.together import telling_who_has_ended, together

logger = logging.getLogger("fastddp")

SETTLED = 2
"""Windows before the first measured one. They are not typical."""
MEASURED = 6
"""Windows that are measured before the plan is made, and again under the plan."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class AutoSchedule:
    """Plain windows, and then the exchanges that were found to be best.

    Args:
        state: of the hook.
        setting: returns the model's setting at the time of the call.
        reducer: returns the model's reducer.
    """

    def __init__(self, state: AutoState, setting: Callable[[], Setting], reducer: Callable[[], _C.Reducer]) -> None:
        self.plan: CompressionPlan | None = None
        self._state = state
        self._setting = setting
        self._reducer = reducer
        self._plain = AllReduce(state.process_group)
        self._exchange: Exchange = self._plain
        self._calls = 0
        self._begin = reducer().windows() + SETTLED  # number of the first measured window
        self._measured_plan: Buckets | None = None  # the buckets in that window
        self._is_done = False

    @property
    def may_use(self) -> Sequence[Exchange]:
        """The exchanges that a bucket may get."""
        return [exchange_of(self._state, name) for name in allowed(self._state.candidates, self._state.error_budget)]

    def __call__(self, window: int) -> Exchange:
        """Return the exchange of window number ``window``.

        Raises:
            RuntimeError: ranks have different settings or states.
        """
        # The first call registers the hook, which is no collective.
        self._calls += 1
        if self._calls == 2:
            self._compare_states()
        if self._calls == 1 or self._is_done:
            return self._exchange
        reducer, setting = self._reducer(), self._setting()
        if self._measured_plan is None:
            if window >= self._begin:
                self._begin = window
                self._measured_plan = setting.plan
                reducer.record_ready_times(True)
        elif window >= self._begin + MEASURED:
            self._go_on(window, setting, reducer)
        return self._exchange

    def _go_on(self, window: int, setting: Setting, reducer: _C.Reducer) -> None:
        """Decide or verify, after the measured windows."""
        if self.plan is not None:
            self._verify(setting, reducer)
        elif self._measured_plan != setting.plan:
            self._measured_plan = None  # buckets were rebuilt meanwhile: measure again
        else:
            self.plan = self._decide(setting, reducer)
            self._begin = window + 1  # the first window of a new exchange sets it up
            self._measured_plan = None
            self._is_done = not self.plan.compresses
            self._log(self._plain.group(setting))

    # ------------------------------------------------------------------------------------------------------- the plan

    def _decide(self, setting: Setting, reducer: _C.Reducer) -> CompressionPlan:
        group = self._plain.group(setting)
        agree = greatest_over(group, setting.device)
        windows, lengths = reducer.ready_times(), window_times(reducer)
        reducer.record_ready_times(False)
        members = [index for bucket in setting.plan for index in bucket]
        ready = agree([median([seconds[index] for seconds in windows] or [-1.0]) for index in members])
        (before,) = agree([median(lengths)])
        sizes = [sum(setting.parameters[index].nbytes for index in bucket) for bucket in setting.plan]
        budget = self._state.error_budget
        dtype = _main_dtype(setting)
        exchanges = self._candidates(setting, dtype)
        problem = self._problem(group, ready, exchanges, dtype)
        if problem is not None:
            return kept_plain(sizes, f"Plain: {problem}.", error_budget=budget, measured_plain_seconds=before)
        last = max(ready)
        moments = {index: at if at >= 0 else last for index, at in zip(members, ready, strict=True)}
        costs = self._measure(exchanges, setting, dtype, agree)
        loads = [_load(bucket, moments, exchanges, costs, setting, dtype) for bucket in setting.plan]
        if setting.device.type == "cpu":
            loads = behind_backward(loads)  # even a hidden exchange takes processors from backward
        choice = _rank_0s(choose(loads), loads, group, setting.device)
        if choice.compresses:
            self._exchange = self._exchange_of(choice, setting)
        return plan_of(loads, sizes, choice, error_budget=budget, measured_plain_seconds=before)

    def _candidates(self, setting: Setting, dtype: torch.dtype) -> dict[str, Exchange]:
        """Plain, and the exchanges that the error budget allows and that compress gradients of this dtype."""
        names = allowed(self._state.candidates, self._state.error_budget)
        exchanges = {name: exchange_of(self._state, name) for name in names}
        return {
            name: exchange
            for name, exchange in exchanges.items()
            if name == PLAIN or (dtype in _DTYPES and not _is_idle(name, exchange, setting, dtype))
        }

    def _problem(
        self, group: dist.ProcessGroup, ready: Sequence[float], exchanges: Collection[str], dtype: torch.dtype
    ) -> str | None:
        """Why there is nothing to choose; None: there is a choice."""
        if group.size() == 1:
            return "a single rank has nothing to exchange"
        if not ready or max(ready) < 0:
            return "no window that was measured went well on any rank"
        if [*exchanges] == [PLAIN]:
            gradients = str(dtype).removeprefix("torch.")
            return f"an error budget of {self._state.error_budget:g} allows nothing that compresses {gradients}"
        return None

    def _measure(
        self, exchanges: Collection[str], setting: Setting, dtype: torch.dtype, agree: Agree
    ) -> dict[str, Cost]:
        elements = [sum(setting.parameters[index].numel() for index in bucket) for bucket in setting.plan]
        to_try = {name: functools.partial(exchange_to_try, self._state, name) for name in exchanges}
        trials = {name: trials_of(make, setting, dtype) for name, make in to_try.items()}
        with telling_who_has_ended(setting.process_group):
            return measure_costs(trials, agree, largest_trial(max(elements), setting.device))

    def _exchange_of(self, choice: Choice, setting: Setting) -> PerBucket:
        used = list(dict.fromkeys(choice.of_buckets))
        exchanges = tuple(exchange_of(self._state, name) for name in used)
        per_bucket = PerBucket(exchanges, tuple(used.index(name) for name in choice.of_buckets))
        by_parameter = {
            setting.names[index]: name
            for bucket, name in zip(setting.plan, choice.of_buckets, strict=True)
            for index in bucket
        }
        self._state.follow(by_parameter, per_bucket, self._setting)
        return per_bucket

    # ----------------------------------------------------------------------------------------------- was it of use?

    def _verify(self, setting: Setting, reducer: _C.Reducer) -> None:
        assert self.plan is not None
        group = self._plain.group(setting)
        (after,) = greatest_over(group, setting.device)([median(window_times(reducer))])
        reducer.record_ready_times(False)
        self._is_done = True
        before = self.plan.measured_plain_seconds
        if after < 0 or before < 0 or not is_slower(after, before):
            self.plan = dataclasses.replace(self.plan, measured_seconds=after if after >= 0 else None)
            return
        reason = (
            f"Plain: with compression steps took {1e3 * after:.3g} ms, and {1e3 * before:.3g} ms without, although "
            f"{1e3 * self.plan.predicted_seconds:.3g} ms were predicted."
        )
        buckets = [
            dataclasses.replace(
                bucket, choice=PLAIN, seconds=bucket.plain_seconds, reason="steps were slower with compression"
            )
            for bucket in self.plan.buckets
        ]
        self.plan = dataclasses.replace(self.plan, buckets=tuple(buckets), measured_seconds=after, reason=reason)
        self._exchange = self._plain
        self._state.forget()
        self._log(group)

    def _log(self, group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            logger.info("auto_hook: how gradients travel\n%s", self.plan)

    def _compare_states(self) -> None:
        told = self._state.numbers()
        setting = self._setting()
        by_rank = gather_numbers([*told.values()], self._plain.group(setting), setting.device)
        found = difference([*told], by_rank)
        if found is not None:
            raise RuntimeError(
                f"Ranks give auto_hook different settings or states: {found}. Give AutoState the same arguments on all "
                "ranks, and load a checkpoint on all of them or on none." + see("FD004")
            )


def window_times(reducer: _C.Reducer) -> list[float]:
    """For each measured window: seconds from the beginning of its forward until gradients are averaged."""
    return reducer.window_times()


def _main_dtype(setting: Setting) -> torch.dtype:
    """The dtype with the most bytes of gradients. Only gradients of this dtype are tried, and may be compressed."""
    total: dict[torch.dtype, int] = {}
    for index in (index for bucket in setting.plan for index in bucket):
        parameter = setting.parameters[index]
        total[parameter.dtype] = total.get(parameter.dtype, 0) + parameter.nbytes
    return max(sorted(total, key=str), key=lambda dtype: total[dtype], default=torch.float32)


def _is_idle(name: str, exchange: Exchange, setting: Setting, dtype: torch.dtype) -> bool:
    """Whether the exchange would compress none of the model's gradients."""
    if isinstance(exchange, PowerSGD):
        return all(compressed_elements(exchange, setting, bucket) == 0 for bucket in setting.plan)
    return name == "bf16" and (dtype.itemsize <= 2 or dtype.is_complex)


def _load(
    bucket: Sequence[int],
    ready: Mapping[int, float],
    exchanges: Mapping[str, Exchange],
    costs: Mapping[str, Cost],
    setting: Setting,
    dtype: torch.dtype,
) -> Load:
    """A bucket as the choice sees it. One of another dtype than was tried is plain, and costs as much as its bytes."""
    elements = sum(setting.parameters[index].numel() for index in bucket)
    own = setting.parameters[bucket[0]].dtype
    seconds = {PLAIN: costs[PLAIN].seconds(elements * own.itemsize // dtype.itemsize)}
    for name, exchange in exchanges.items():
        if name == PLAIN or own != dtype:
            continue
        if isinstance(exchange, PowerSGD):
            compressed = compressed_elements(exchange, setting, bucket)
            seconds[name] = costs[name].seconds(compressed) + (elements - compressed) * costs[PLAIN].per_element
        else:
            seconds[name] = costs[name].seconds(elements)
    return Load(max(ready[index] for index in bucket), seconds)


def _rank_0s(choice: Choice, loads: Sequence[Load], group: dist.ProcessGroup, device: torch.device) -> Choice:
    """Rank 0's choice, on all ranks. They have the same numbers, but arithmetic may differ between machines."""
    names = sorted({name for load in loads for name in load.seconds})
    wire = torch.tensor([names.index(name) for name in choice.of_buckets], dtype=torch.int64, device=device)
    together(dist.broadcast, wire, group=group, group_src=0)
    return dataclasses.replace(choice, of_buckets=tuple(names[place] for place in wire.tolist()))
