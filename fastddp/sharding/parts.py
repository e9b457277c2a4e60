"""What a rank has of a sharded optimizer. The model's engine and the optimizer share it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastddp import _C
from fastddp.ddp import DistributedDataParallel
from fastddp.errors import see
from fastddp.exchange.in_force import InForce
from fastddp.sharding import checkpoint
from fastddp.sharding.mixed import Make, make_optimizer, members
from fastddp.sharding.shards import OneBucket, Shards, Span
from fastddp.sharding.state import gathered

_GRADIENT, _MAIN = "fastddp.gradient", checkpoint.MAIN  # beside the names of an optimizer's state
Group = dict[str, Any]


class Parts:
    """Flat parameters, this rank's part of them, and an optimizer for the part of each bucket.

    ``model`` has this object. ``own``: by number of the group, what makes its optimizer in place of ``make``. The
    others are those of :class:`fastddp.sharding.shards.Shards`.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        make: Make,
        own: dict[int, Make],
        *,
        whole: bool,
        wire: torch.dtype | None,
        waits_in_step: bool,
    ) -> None:
        self._of_model = weakref.ref(model)
        self.make, self._own, self.whole, self._wire, self.waits_in_step = make, own, whole, wire, waits_in_step
        self.parameters = model.engine.now.parameters  # the model's
        self.groups: list[Group] = []  # the optimizer's param_groups, with the model's parameters
        self._stepped: list[list[int]] = []  # identities of the parameters in each group, for which `inner` were made
        self.shown: Any = None  # the state as users have got it; None: nobody has
        self.optimizer: Callable[[], object] = lambda: None  # the sharded optimizer; None: it is gone
        self.inner: list[Optimizer] = []  # by bucket
        self.refuses = ""  # why it neither steps nor saves; empty: it does
        self._shards: Shards | None = None
        self._has_moved = False  # since parameters were laid out

    @property
    def model(self) -> DistributedDataParallel:
        """Whose parameters are trained; RuntimeError: it is gone."""
        model = self._of_model()
        if model is None:
            raise RuntimeError("The model of this ShardedOptimizer is gone. Keep the wrapper." + see("FD042"))
        return model

    @property
    def now(self) -> InForce:
        """What is in force in the model."""
        return self.model.engine.now

    @property
    def shards(self) -> Shards:
        """Where parameters and this rank's part are."""
        assert self._shards is not None
        return self._shards

    def add_group(self, own: Make | None) -> None:
        """Step the parameters of the last group too; ``own``: the class that it names."""
        if own is not None:
            self._own[len(self.groups) - 1] = own
        if self.inner:
            self._make_inner()

    def _make_inner(self) -> None:
        before, self.inner = self.inner, [self._inner_of(bucket) for bucket in self.shards.buckets]
        for old, new in zip(before, self.inner, strict=False):
            new.state.update(old.state)
        self._stepped = [[*map(id, group["params"])] for group in self.groups]

    # ------------------------------------------------------------------- what users write to the state and the groups

    def begin_step(self) -> None:
        """Before the optimizer steps, saves or moves: take what users have written. All ranks raise for the same."""
        self.take_groups()
        self._take_state()
        self.shards.begin_step()

    def take_groups(self) -> None:
        """Step the parameters that groups have now; ValueError: they cannot be stepped."""
        if self._stepped == [[*map(id, group["params"])] for group in self.groups]:
            return
        if self._own:
            raise ValueError(
                "Parameters have been moved between the groups of a ShardedOptimizer whose groups name their classes. "
                "Make another one with these groups." + see("FD042")
            )
        for group in self.groups:
            self.check_trained(group)
        self._make_inner()

    def show_state(self) -> Any:
        """The state in plain dictionaries, by parameter; those that were shown before follow it."""
        now = checkpoint.Held(self.shards, self.inner, self.parameters.tensors, self.groups, False).part(mains=False)
        shown = self.shown = defaultdict(dict) if self.shown is None else self.shown
        for parameter in shown.keys() - now.keys():
            del shown[parameter]
        for parameter, state in now.items():
            if type(held := shown.get(parameter)) is not type(state):
                shown[parameter] = state
                continue
            for key in held.keys() - state.keys():
                del held[key]
            held.update(state)
        return shown

    def follow_state(self) -> None:
        """What was shown is the state again, after a step or another change of it."""
        if self.shown is not None:
            self.show_state()

    def _take_state(self) -> None:
        if self.shown is None:
            return
        names = {id(parameter): (index, name) for index, (name, parameter) in enumerate(self.parameters)}
        spans = {span.parameter: span for span in self.shards.spans()}
        taken: dict[int, Group] = {}
        for parameter, state in self.shown.items():
            index, name = names.get(id(parameter), (-1, "what the model does not train"))
            if index < 0 or not isinstance(state, Mapping) or _MAIN in state:  # parameters are written themselves
                raise checkpoint.unfit(name)
            taken[index] = {
                key: checkpoint.written(value, name, parameter, spans.get(index), any_shape=self.whole)
                for key, value in state.items()
            }
        for index, span in spans.items():
            of_inner = self.inner[span.bucket].state
            of_inner.pop(span.holder, None)
            if taken.get(index):
                of_inner[span.holder] = taken[index]

    def check_trained(self, group: Group) -> None:
        """Raise ValueError if a parameter of ``group`` is not the model's, or has sparse gradients."""
        now = self.now
        names = {id(parameter): name for name, parameter in now.parameters}
        given = {id(parameter) for parameter in group["params"]}
        if not given <= names.keys():
            raise ValueError(
                "A parameter that was given to ShardedOptimizer is not trained by the model. Give it parameters of the "
                "wrapped module that require gradients." + see("FD042")
            )
        sparse = {id(now.parameters.tensors[index]) for index in now.parameters.sparse}
        if given & sparse:
            raise ValueError(
                f"The gradient of parameter {names[(given & sparse).pop()]} is sparse, and ShardedOptimizer steps with "
                "dense ones. Pass params= without it, and give it to an optimizer that is not sharded." + see("FD042")
            )

    def check_none_missing(self) -> None:
        """Raise ValueError if a parameter of the model is in no group."""
        parameters = self.parameters
        given = {id(parameter) for group in self.groups for parameter in group["params"]}
        given |= {id(parameters.tensors[index]) for index in parameters.sparse}
        if missing := [name for name, parameter in parameters if id(parameter) not in given]:
            raise ValueError(
                f"ShardedOptimizer leaves out {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}, and "
                "another optimizer would find no gradient there. Give it all parameters that the model trains, in "
                'params or by add_param_group; a group may name an "optimizer_class" of its own.' + see("FD042")
            )

    # ---------------------------------------------------------------------------------------------- for the engine

    @property
    def settings(self) -> list[str]:
        """What all ranks must have alike, in words."""
        shard = "parameters" if self.whole else "elements"
        gather = "step" if self.waits_in_step else "forward"
        return [f"ShardedOptimizer(shard={shard!r}, gather={gather!r}, parameter_wire={self._wire})"]

    @property
    def has_state(self) -> bool:
        """Whether this rank has state, or copies in fp32, that no parameter has."""
        return any(inner.state for inner in self.inner) or any(
            bucket.main is not None for bucket in self.shards.buckets
        )

    def leave(self) -> None:
        """The model leaves its ranks: nobody waits for parameters that have not come."""
        self.refuses = _HAS_LEFT
        self.shards.give_up()

    def move(self, *, without_state: bool) -> None:
        """The model has other ranks, and this one will have other parts; ``without_state``: there was state."""
        self.refuses = _LACKS_STATE if without_state else ""
        self._has_moved = True

    @contextmanager
    def laid_out(self, now: InForce) -> Iterator[list[_C.Shard]]:
        """Put parameters into flat memory for the buckets of ``now``, with what was there.

        Sets ``now.sharding``, and gives this rank's part of each bucket. If this context ends by an error, all is where
        it was.
        """
        before, inner_before, has_moved = self._shards, self.inner, self._has_moved
        tensors = self.parameters.tensors
        memory = [(parameter.data, parameter.grad) for parameter in tensors]
        try:
            if before is not None and not has_moved:
                self.begin_step()  # copies in fp32 follow what others have written
            self.inner = []
            self._shards = shards = Shards(now, whole=self.whole, wire=self._wire, waits_in_step=self.waits_in_step)
            self._make_inner()
            if before is not None and has_moved:
                shards.lack(before.incomplete)
            elif before is not None:
                self._take_over(before, inner_before)
            now.sharding = shards.sharding
            yield shards.of_gradients()
        except BaseException:
            self._shards, self.inner = before, inner_before
            for parameter, (data, gradient) in zip(tensors, memory, strict=True):
                parameter.data, parameter.grad = data, gradient
            raise
        self._has_moved = False
        if before is not None:
            shards.is_compiled = before.is_compiled
            before.release()
        self.follow_state()
        if not self.waits_in_step:
            shards.wait_where_read()  # nothing is on its way; but the first graph that is compiled is noticed

    @torch.no_grad()
    def _take_over(self, before: Shards, inner_before: list[Optimizer]) -> None:
        """Take the state of other buckets along, with copies in fp32 and gradients that nobody has stepped with."""
        now = self.now
        notices = {index for index, notice in before.notices.items() if now.parameters.tensors[index].grad is notice}

        def of_span(span: Span) -> dict[str, Any]:
            gradient = span.holder.grad if span.parameter in notices else None
            beside = {_GRADIENT: gradient, _MAIN: before.main_of(span)}
            state = inner_before[span.bucket].state.get(span.holder, {})
            return {**state, **{key: value for key, value in beside.items() if value is not None}}

        for inner in self.inner if inner_before else ():
            for old, new in zip(members(inner_before[0]), members(inner), strict=True):
                carry_over(old, new)
        own = {span.parameter: span for span in self.shards.spans()}
        for index, whole in gathered(before, inner_before, of_span):
            if index in own:
                self._take(own[index], whole.of_span(own[index]))
        for index in notices:
            now.parameters.tensors[index].grad = self.shards.notices[index]

    def _take(self, span: Span, state: dict[str, Any]) -> None:
        span.holder.grad = state.pop(_GRADIENT, None)
        if (main := state.pop(_MAIN, None)) is not None:
            span.holder.copy_(main)
        if state:
            self.inner[span.bucket].state[span.holder] = state

    def _inner_of(self, bucket: OneBucket) -> Optimizer:
        """The optimizer of this rank's part of a bucket, with an empty parameter in groups of which it has no part."""
        return make_optimizer(self.make, self._own, [self._group_in(bucket, group) for group in self.groups])

    def _group_in(self, bucket: OneBucket, group: Group) -> Group:
        parameters = self.parameters.tensors
        holders = {id(parameters[span.parameter]): span.holder for span in bucket.spans}
        found = [holders[id(parameter)] for parameter in group["params"] if id(parameter) in holders]
        empty = [empty_like(one, bucket.main) for one in group["params"][:1]]
        return {**settings_of(group), "params": found or empty}

    def holders_with_gradients(self) -> list[Tensor]:
        """What this rank steps, where a backward has averaged gradients that nobody has removed since."""
        parameters, notices = self.parameters.tensors, self.shards.notices
        own = [span for span in self.shards.spans() if span.holder.grad is not None]
        return [span.holder for span in own if parameters[span.parameter].grad is notices[span.parameter]]

    def gradients(self) -> list[Tensor]:
        """This rank's part of them."""
        return [holder.grad for holder in self.holders_with_gradients() if holder.grad is not None]

    def check_parameters(self) -> None:
        """Raise RuntimeError if the gather of parameters has failed, so that some of them are old."""
        self.shards.check()

    def parameters_ready(self) -> None:
        """Wait until all parameters are here. On a device only the current stream waits."""
        self.shards.wait()

    # ------------------------------------------------------------------------------------------------------- a step

    def step(self, number: int, method: str = "step") -> None:
        """Step this rank's part of bucket ``number``, or do something else with it."""
        inner = self.inner[number]
        for group, own in zip(self.groups, inner.param_groups, strict=True):
            for removed in own.keys() - group.keys() - {"params"}:
                del own[removed]
            own.update(settings_of(group))
        for one in [inner] if method == "step" else members(inner):
            getattr(one, method, lambda: None)()

    def take_settings(self, before: Sequence[Group]) -> None:
        """Those that optimizers have changed in their groups; ``before``: all of them, before that."""
        for inner in self.inner:
            for group, old, own in zip(self.groups, before, inner.param_groups, strict=True):
                group.update({name: value for name, value in settings_of(own).items() if value is not old.get(name)})

    @torch.no_grad()
    def make_state(self) -> None:
        """Step with zeros, and leave parameters as they are."""
        for number, bucket in enumerate(self.shards.buckets):
            before = [span.holder.clone() for span in bucket.spans]
            for span in bucket.spans:
                span.holder.grad = torch.zeros_like(span.holder)
            self.step(number)
            for span, values in zip(bucket.spans, before, strict=True):
                span.holder.copy_(values)
                span.holder.grad = None
        self.follow_state()

    def check_gradients(self) -> None:
        """Drop the gradients that ``zero_grad`` has removed, and raise for those that are not averages."""
        parameters, shards = self.parameters, self.shards
        kept = set()
        for index, notice in shards.notices.items():
            gradient = parameters.tensors[index].grad
            if gradient is notice:
                kept.add(index)
            elif gradient is not None:
                raise RuntimeError(
                    f"fastddp: the gradient of parameter {parameters.names[index]} is this rank's alone: its backward "
                    "ran under no_sync(), or the gradient was assigned. A ShardedOptimizer steps with gradients that a "
                    "backward has synchronised. Run the last backward of a step outside of no_sync()." + see("FD041")
                )
        for span in shards.spans():
            if span.parameter not in kept:
                span.holder.grad = None


_HAS_LEFT = (
    "the model of this ShardedOptimizer has left its ranks. Call model.regroup() with ranks that it can train with."
    + see("FD053")
)
_LACKS_STATE = (
    "the model of this ShardedOptimizer has other ranks than before. Each rank had a part of the state, and those of "
    "ranks that are gone are lost. Call load_state_dict() on all ranks, with a checkpoint that the model was loaded "
    "from too. Before a change that you plan, gather_state() gives all of it." + see("FD053")
)


class OfParts:
    """An optimizer of which each rank has a part."""

    param_groups: list[Group]
    parts: Parts


def carry_over(old: Optimizer, new: Optimizer) -> None:
    """What an optimizer has besides groups, and state of parameters: other state, and numbers of its own."""
    new.state.update({key: value for key, value in old.state.items() if not isinstance(key, Tensor)})
    vars(new).update({name: value for name, value in vars(old).items() if type(value) in (int, float, bool)})


def empty_like(parameter: Tensor, main: Tensor | None = None) -> nn.Parameter:
    """What optimizers that look at a group's first parameter find where this rank has no part of any."""
    dtype = parameter.dtype if main is None else main.dtype
    return nn.Parameter(torch.empty((0, *parameter.shape[1:]), dtype=dtype, device=parameter.device))


def settings_of(group: Mapping[str, Any]) -> Group:
    """All of a parameter group but its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
