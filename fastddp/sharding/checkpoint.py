"""Saving and loading the state of a sharded optimizer, in torch's form: whole, or each rank's part."""

from __future__ import annotations

import copy
import functools
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fastddp.errors import see
from fastddp.module.parameters import NamedParameters
from fastddp.planning.bucket_plan import Buckets
from fastddp.sharding.sharded_state import ShardedState
from fastddp.sharding.shards import Shards, Span
from fastddp.sharding.state import State, gathered, is_of_elements

MAIN = "fastddp.main"  # beside the names of an optimizer's state: the copy of the parameter in fp32
BUCKETS = "fastddp.buckets"  # beside "state" and "param_groups": who has what, with the number of ranks

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Held:
    """An optimizer's state, of which this rank has a part."""

    shards: Shards
    inner: Sequence[Optimizer]  # this rank's optimizers, by bucket
    parameters: Sequence[Tensor]  # the model's
    groups: Groups  # with parameters to train
    has_stepped: bool

    def of_span(self, span: Span) -> dict[str, Any]:
        """What this rank has for a span. Copies in fp32 go with other state, or with steps that leave none."""
        state = self.inner[span.bucket].state.get(span.holder, {})
        main = self.shards.main_of(span)
        takes_main = bool(state) or (self.has_stepped and id(span.holder) in self._without_state)
        return {**state, MAIN: main} if takes_main and main is not None else state

    @functools.cached_property
    def _without_state(self) -> set[int]:
        """Identities of the holders in groups of which this rank has no state."""
        found: set[int] = set()
        stepped = {id(holder) for inner in self.inner for holder in inner.state}
        for parts in zip(*(inner.param_groups for inner in self.inner), strict=True):
            holders = {id(holder) for group in parts for holder in group["params"]}
            found |= holders if holders.isdisjoint(stepped) else set()
        return found

    def part(self, *, mains: bool = True) -> dict[Tensor, dict[str, Any]]:
        """This rank's, by parameter: {} where other ranks have all of it. It is empty before the first step.

        ``mains``: with copies in fp32.
        """
        own = {}
        for span in self.shards.spans():
            place = self.parameters[span.parameter], span.begin, span.end
            own[place[0]] = {
                key: ShardedState.of(value, *place) if is_of_elements(value, span.like) else value
                for key, value in self.of_span(span).items()
                if mains or key != MAIN
            }
        if own and not any(own.values()):
            return {}
        trained = (parameter for group in self.groups for parameter in group["params"])
        return {
            parameter: own[parameter] if parameter in own else _elsewhere(parameter)
            for parameter in trained
            if own.get(parameter) != {}
        }

    def whole(self, *, keep: bool) -> dict[int, dict[str, Any]]:
        """That of all ranks by number in ``groups``, on the CPU; not ``keep``: nothing of it. A collective."""
        trained = chain.from_iterable(one["params"] for one in self.groups)
        number_of = {id(parameter): number for number, parameter in enumerate(trained)}
        found = {}
        for index, state in gathered(self.shards, self.inner, self.of_span):
            parameter = self.parameters[index]
            if keep:
                found[number_of[id(parameter)]] = {
                    key: tree_map_only(Tensor, lambda one: one.to("cpu", copy=True), value)
                    for key, value in state.of_parameter(parameter).items()
                }
        return dict(sorted(found.items()))


def wants_whole() -> bool:
    """Whether ``state_dict()`` is called for torch's ``StateDictOptions(full_state_dict=True)``, to be saved or loaded.

    torch says so to DTensors alone. It would save one rank's part as if it were all.
    """
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        return False
    callers = [frame.f_code.co_name for frame, _ in islice(traceback.walk_stack(caller), 4)]
    is_saved_whole = getattr(caller.f_locals.get("info"), "full_state_dict", False)
    return is_saved_whole or "_load_optim_state_dict" in callers  # which asks only to load a whole state


class Saved:
    """A state that is to be loaded, a whole one or one rank's part; ValueError: it is another model's.

    ``any_shape``: state need not be a number for each element.
    """

    def __init__(
        self, state_dict: Mapping[str, Any], groups: Groups, parameters: NamedParameters, *, any_shape: bool
    ) -> None:
        self.groups: Groups = state_dict["param_groups"]
        self._parameters = parameters
        theirs, ours = ([len(group["params"]) for group in some] for some in (self.groups, groups))
        if theirs != ours:
            raise ValueError(
                f"The saved state has parameter groups of {theirs} parameters, and the optimizer has {ours}. Nothing "
                "has been loaded. Load the state of an optimizer with the same groups." + see("FD043")
            )
        keys, trained = (chain.from_iterable(group["params"] for group in some) for some in (self.groups, groups))
        number_of = {id(parameter): number for number, parameter in enumerate(parameters.tensors)}
        self.of_parameter: dict[int, State] = {
            number_of[id(parameter)]: state_dict["state"][key]
            for key, parameter in zip(keys, trained, strict=True)
            if key in state_dict["state"]
        }
        self._ranks, self._plan = state_dict.get(BUCKETS, (0, []))
        for index, state in self.of_parameter.items():
            for key, value in state.items():
                self._check_shape(index, key, value, any_shape=any_shape)
        if not any_shape:
            for group in groups:
                self._check_keys([number_of[id(parameter)] for parameter in group["params"]])

    def _check_keys(self, group: Sequence[int]) -> None:
        states = {index: self.of_parameter[index].keys() - {MAIN} for index in group if self.of_parameter.get(index)}
        keys = set().union(*states.values())
        for index, has in states.items():
            if has != keys:
                raise ValueError(
                    f"The saved state of parameter {self._parameters.names[index]} has no {', '.join(keys - has)}, "
                    "which other parameters of its group have. Nothing has been loaded. Load a complete state."
                    + see("FD043")
                )

    def _check_shape(self, index: int, key: str, value: object, *, any_shape: bool) -> None:
        shape = self._parameters.tensors[index].shape
        if not isinstance(value, Tensor) or value.shape == shape:
            return
        of_elements = isinstance(value, ShardedState) or key == MAIN or not any_shape
        if of_elements and value.dim() > 0:
            raise ValueError(
                f"The saved {key} of parameter {self._parameters.names[index]} has shape {tuple(value.shape)}, and the "
                f"parameter {tuple(shape)}. Nothing has been loaded. Load the state of the same model." + see("FD043")
            )

    def other_plan(self, now: Buckets, ranks: int) -> Buckets | None:
        """The buckets in which it was saved, if other ones are in force and these can be."""
        is_possible = self._ranks == ranks and sorted(chain(*self._plan)) == sorted(chain(*now))
        return self._plan if is_possible and self._plan != now else None

    def check_has(self, shards: Shards) -> None:
        """Raise ValueError if a part that this rank needs is with another one."""
        for span in shards.spans():
            state = self.of_parameter.get(span.parameter)
            if state is None:
                continue
            parameter = self._parameters.tensors[span.parameter]
            parts = [value for value in state.values() if isinstance(value, ShardedState)]
            if not state or not all(part.has(parameter, span.begin, span.end) for part in parts):
                raise ValueError(
                    f"The saved state lacks elements {span.begin} to {span.end} of parameter "
                    f"{self._parameters.names[span.parameter]}, which this rank trains. It is the part of another "
                    "rank, or of another number of ranks. Nothing has been loaded. Load full_state_dict(), or save and "
                    "load by torch.distributed.checkpoint, which gives each rank its part." + see("FD043")
                )

    @torch.no_grad()
    def install(self, held: Held) -> None:
        """Copy what this rank needs, bucket by bucket."""
        shards = held.shards
        for bucket, inner in zip(shards.buckets, held.inner, strict=True):
            holders = (holder for group in inner.param_groups for holder in group["params"])
            number_of = {id(holder): number for number, holder in enumerate(holders)}
            spans = [span for span in bucket.spans if id(span.holder) in number_of]
            states = {number_of[id(span.holder)]: self._of_span(span) for span in spans}
            mains = [state.pop(MAIN, None) for state in states.values()]
            states = {number: state for number, state in states.items() if state}
            inner.load_state_dict({"state": states, "param_groups": inner.state_dict()["param_groups"]})
            for span in spans:  # torch casts to the parameter's dtype, numbers of 8 bits too
                loaded, saved = inner.state.get(span.holder, {}), states.get(number_of[id(span.holder)], {})
                codes = {
                    key for key, value in saved.items() if getattr(value, "dtype", None) in (torch.uint8, torch.int8)
                }
                loaded.update({key: loaded[key].to(saved[key].dtype) for key in codes & loaded.keys()})
            for span, main in zip(spans, mains, strict=True):
                if shards.main_of(span) is not None:
                    span.holder.copy_(torch.full_like(span.holder, torch.nan) if main is None else main)
        shards.compare_mains()

    def _of_span(self, span: Span) -> dict[str, Any]:
        parameter = self._parameters.tensors[span.parameter]
        state = self.of_parameter.get(span.parameter, {})
        return {key: _part(value, parameter, span) for key, value in state.items()}


class Elsewhere(dict[str, Any]):
    """The state of ``parameter``, which other ranks have: {}, and no element of whatever is read by name."""

    parameter: Tensor

    def __missing__(self, key: str) -> ShardedState:
        return ShardedState.of(self.parameter.detach().new_empty(0), self.parameter, 0, 0)


def _elsewhere(parameter: Tensor) -> Elsewhere:
    state = Elsewhere()
    state.parameter = parameter
    return state


def unfit(where: str) -> ValueError:
    """The error for what cannot be written to the state."""
    return ValueError(
        f"State that cannot be sharded was written to a ShardedOptimizer, for {where}. Write, on all ranks alike, by "
        "parameter of the model, numbers or tensors of its shape." + see("FD043")
    )


def written(value: Any, name: str, parameter: Tensor, span: Span | None, *, any_shape: bool) -> Any:
    """This rank's part of what a user has written for all of ``parameter``; ValueError: it is none of that."""
    if isinstance(value, ShardedState):
        if (value.shape, value.begin, value.end) != (parameter.shape, *((0, 0) if span is None else span[1:3])):
            raise unfit(f"{name}: a part of another parameter")
        return value.part
    if not isinstance(value, Tensor) or value.dim() == 0 or (any_shape and value.shape != parameter.shape):
        return value
    if value.shape != parameter.shape:
        raise unfit(f"{name} of shape {tuple(parameter.shape)}: {tuple(value.shape)}")
    if span is None:
        return value
    value = value.to(span.holder.dtype) if value.dtype == parameter.dtype else value
    return value if span.holder.shape == parameter.shape else _part(value, parameter, span)


def _part(value: Any, parameter: Tensor, span: Span) -> Any:
    """The span's part of a saved value, in memory of its own."""
    if isinstance(value, ShardedState):
        if value.part.shape != parameter.shape:
            return value.part[span.begin - value.begin : span.end - value.begin].clone()
        value = value.part
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != parameter.shape or span.holder.shape == parameter.shape:
        return value.clone()
    part = torch.empty(span.end - span.begin, dtype=value.dtype, device=value.device)
    for box in ShardedState.of(part, parameter, span.begin, span.end).boxes():
        box.values.copy_(box.within(value))
    return part
