"""``fastddp.ShardedOptimizer``: each rank steps with its part of the gradients, and parameters are gathered."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from fastddp import _C
from fastddp.ddp import DistributedDataParallel
from fastddp.errors import see
from fastddp.in_force import InForce
from fastddp.sharding import checkpoint
from fastddp.sharding.notice import ShardedGradient
from fastddp.sharding.scaler import let_scalers_unscale_parts
from fastddp.sharding.shards import OneBucket, Shards, Span
from fastddp.sharding.state import gathered
from fastddp.sharding.uneven import StepsToTheEnd

_GRADIENT, _MAIN = "fastddp.gradient", checkpoint.MAIN  # beside the names of an optimizer's state
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class ShardedOptimizer(Optimizer, StepsToTheEnd):
    """An optimizer of which each rank has a part: its state takes 1/ranks of the memory.

    Gradients of ``model`` are added up where their part of the optimizer is, bucket by bucket during backward.
    :meth:`step` runs ``optimizer_class`` on this rank's part, and gathers parameters. In all, as many bytes travel as
    for one allreduce. The idea is ZeRO's (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).

    Args:
        model: whose parameters to train. From now on they are views of one flat tensor a bucket, and ``parameter.grad``
            is a :class:`fastddp.sharding.notice.ShardedGradient` once backward has averaged it.
        optimizer_class: a class of ``torch.optim``, or one like it.
        params: parameters or parameter groups; None: all of the model's. Those that are left out have to come by
            :meth:`add_param_group` before the first :meth:`step`.
        shard: "elements": every rank has the same number of elements of each bucket, for optimizers that treat each
            element by itself (SGD, Adam, AdamW, Adagrad, RMSprop, ...). "parameters": whole parameters, for all others
            (Muon, Adafactor, ...).
        gather: "step": when :meth:`step` returns, the current stream sees the new parameters. "forward": it returns at
            once. Who reads a parameter through its module waits for its bucket, so the next forward hides the gather.
            Before parameters are read in another way, call ``model.parameters_ready()``.
        parameter_wire: fp32 parameters travel in this dtype, fp16 or bf16. Ranks then compute with rounded parameters;
            the optimizer keeps fp32 copies of its part. None: as they are.
        **settings: of ``optimizer_class``, as ``lr``.

    Raises:
        RuntimeError: the optimizer is made while gradients are being synchronised.
        TypeError: ``model`` is not a wrapper of fastddp's.
        ValueError: a parameter is not the model's; ``optimizer_class`` needs whole parameters; gradients travel in a
            way that cannot be sharded; or ``parameter_wire`` is another dtype.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer_class: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        *,
        shard: Literal["elements", "parameters"] = "elements",
        gather: Literal["step", "forward"] = "step",
        parameter_wire: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        _check(model, optimizer_class, shard, gather)
        if parameter_wire not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"parameter_wire must be torch.float16 or torch.bfloat16, got {parameter_wire}." + see("FD024")
            )
        self._of_model = weakref.ref(model)  # which has this optimizer, and goes at once when nobody else has it
        self._class, self._settings = optimizer_class, settings
        self._whole = shard == "parameters"
        self._wire = parameter_wire
        self._waits_in_step = gather == "step"
        given = list(model.parameters() if params is None else params)
        if given and isinstance(given[0], Tensor):
            given = [parameter for parameter in given if parameter.requires_grad]
        self._shards: Shards | None = None
        self._inner: list[Optimizer] = []
        self._has_stepped = False
        template = optimizer_class(given, **settings)  # checks the settings, and completes the groups
        Optimizer.__init__(self, template.param_groups, template.defaults)
        Joinable.__init__(self)
        model.engine.shard(self)
        let_scalers_unscale_parts()

    @property
    def _model(self) -> DistributedDataParallel:
        model = self._of_model()
        if model is None:
            raise RuntimeError("The model of this ShardedOptimizer is gone. Keep the wrapper." + see("FD042"))
        return model

    def __getstate__(self) -> dict[str, Any]:
        """Raise RuntimeError: a copy would have no model."""
        raise RuntimeError(
            "A ShardedOptimizer cannot be pickled or copied, since it steps parameters of its model. Copy the model, "
            "and make another optimizer for it." + see("FD042")
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model, with settings of their own.

        All parameters have to be there before the first :meth:`step`.

        Args:
            param_group: as in torch.

        Raises:
            ValueError: a parameter is not the model's, has sparse gradients or is in another group.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_trained(group)
        except ValueError:
            self.param_groups.pop()
            raise
        for number, inner in enumerate(self._inner):
            inner.add_param_group(self._group_in(self.shards.buckets[number], group))

    def _check_trained(self, group: dict[str, Any]) -> None:
        now = self._model.engine.now
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

    def _check_none_missing(self) -> None:
        parameters = self._model.engine.now.parameters
        given = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        given |= {id(parameters.tensors[index]) for index in parameters.sparse}
        if missing := [name for name, parameter in parameters if id(parameter) not in given]:
            raise ValueError(
                f"ShardedOptimizer leaves out {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}, and "
                "another optimizer would find no gradient there. Give it all parameters that the model trains, in "
                "params or by add_param_group." + see("FD042")
            )

    # ------------------------------------------------------------------------------------------------- where it is

    def lay_out(self) -> _C.Sharding:
        """Put parameters into flat memory for the buckets in force; called by the model's engine."""
        before, inner_before = self._shards, self._inner
        if before is not None:
            before.begin_step()  # copies in fp32 follow what others have written
        self._shards = shards = Shards(self._model.engine.now, whole=self._whole, wire=self._wire)
        self._inner = [self._inner_of(bucket) for bucket in shards.buckets]
        if before is not None:
            before.release()
            self._take_over(before, inner_before)
        shards.install()
        return shards.sharding

    @torch.no_grad()
    def _take_over(self, before: Shards, inner_before: list[Optimizer]) -> None:
        """Take the state of other buckets along, with copies in fp32 and gradients that nobody has stepped with."""
        now = self._model.engine.now
        notices = {index for index, notice in before.notices.items() if now.parameters.tensors[index].grad is notice}

        def of_span(span: Span) -> dict[str, Any]:
            gradient = span.holder.grad if span.parameter in notices else None
            beside = {_GRADIENT: gradient, _MAIN: before.main_of(span)}
            state = inner_before[span.bucket].state.get(span.holder, {})
            return {**state, **{key: value for key, value in beside.items() if value is not None}}

        own = {span.parameter: span for span in self.shards.spans()}
        for index, whole in gathered(before, of_span):
            if index in own:
                self._take(own[index], whole.of_span(own[index]))
        for index in notices:
            now.parameters.tensors[index].grad = self.shards.notices[index]

    def _take(self, span: Span, state: dict[str, Any]) -> None:
        span.holder.grad = state.pop(_GRADIENT, None)
        if (main := state.pop(_MAIN, None)) is not None:
            span.holder.copy_(main)
        if state:
            self._inner[span.bucket].state[span.holder] = state

    def _inner_of(self, bucket: OneBucket) -> Optimizer:
        """The optimizer of this rank's part of a bucket."""
        return self._class([self._group_in(bucket, group) for group in self.param_groups], **self._settings)

    def _group_in(self, bucket: OneBucket, group: dict[str, Any]) -> dict[str, Any]:
        parameters = self._model.engine.now.parameters.tensors
        holders = {id(parameters[span.parameter]): span.holder for span in bucket.spans}
        found = [holders[id(parameter)] for parameter in group["params"] if id(parameter) in holders]
        return {**_settings_of(group), "params": found}

    @property
    def shards(self) -> Shards:
        """Where parameters and this rank's part are."""
        assert self._shards is not None
        return self._shards

    def in_force(self) -> InForce:
        """Of the model."""
        return self._model.engine.now

    def holders_with_gradients(self) -> list[Tensor]:
        """What this rank steps, where a backward has averaged gradients that nobody has removed since."""
        parameters, notices = self._model.engine.now.parameters.tensors, self.shards.notices
        own = [span for span in self.shards.spans() if span.holder.grad is not None]
        return [span.holder for span in own if parameters[span.parameter].grad is notices[span.parameter]]

    def gradients(self) -> list[Tensor]:
        """This rank's part of them."""
        return [holder.grad for holder in self.holders_with_gradients() if holder.grad is not None]

    # ------------------------------------------------------------------------------------------------------- a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step with this rank's part of the gradients, and give all ranks the new parameters.

        Args:
            closure: computes the loss again, and returns it.

        Raises:
            RuntimeError: the last backward failed or left gradients out; a gradient was not synchronised; parameters
                did not come from other ranks, now or after the last step; or inputs are uneven, and the optimizer is
                not joined beside the model.
            ValueError: a parameter of the model is in no group.
        """
        self.check_joined()
        if not self._has_stepped:
            self._check_none_missing()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shards = self.shards
        if self._model.engine.sharded is not self:
            raise RuntimeError(
                "Another ShardedOptimizer has been made for this one's model, or the model's ranks have changed. Step "
                "the newest one." + see("FD042")
            )
        with torch.no_grad():
            shards.begin_step()
            if self._only_makes_state():
                self._make_state(shards)
                return loss
            self._check_gradients(shards)
            self._has_stepped = True
            for number in reversed(range(len(shards.buckets))):  # in forward's order
                self._step_bucket(shards, number)
                shards.start_gather(number)
        if self._waits_in_step:
            shards.wait()
        else:
            shards.wait_where_read(self._model.module)
        return loss

    def check_parameters(self) -> None:
        """Raise RuntimeError if the gather of parameters has failed, so that some of them are old."""
        self.shards.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove gradients, or set them to zero.

        Args:
            set_to_none: remove them.
        """
        super().zero_grad(set_to_none)
        self.in_force().reducer.forget_gradients()

    def parameters_ready(self) -> None:
        """Wait until all parameters of the last :meth:`step` are here. On a device only the current stream waits."""
        self.shards.wait()

    def _step_bucket(self, shards: Shards, number: int) -> None:
        inner = self._inner[number]
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update(_settings_of(group))
        inner.step()

    def _only_makes_state(self) -> bool:
        """Whether torch.distributed.checkpoint steps with assigned zeros, so that there is state to load into."""
        trained = (parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad)
        gradients = [parameter.grad for parameter in trained]
        if any(gradient is None or isinstance(gradient, ShardedGradient) for gradient in gradients) or self.state:
            return False
        return not any(bool(gradient.any()) for gradient in gradients)

    def _make_state(self, shards: Shards) -> None:
        """Step with zeros, and leave parameters as they are."""
        for number, bucket in enumerate(shards.buckets):
            before = [span.holder.clone() for span in bucket.spans]
            for span in bucket.spans:
                span.holder.grad = torch.zeros_like(span.holder)
            self._step_bucket(shards, number)
            for span, values in zip(bucket.spans, before, strict=True):
                span.holder.copy_(values)
                span.holder.grad = None
        self._has_stepped = True

    def _check_gradients(self, shards: Shards) -> None:
        """Drop the gradients that ``zero_grad`` has removed, and raise for those that are not averages."""
        parameters = self._model.engine.now.parameters
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

    # -------------------------------------------------------------------------------------------------- checkpoints

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """This rank's part of the state, by parameter: a copy of the dictionaries. It is empty before the first step.

        What has a number for each element is a :class:`fastddp.sharding.sharded_state.ShardedState`. {}: other ranks
        have all of it.
        """
        return defaultdict(dict, {} if self._shards is None else self._held().part())

    @state.setter
    def state(self, state: object) -> None:
        """:class:`torch.optim.Optimizer` begins with an empty one."""

    def _held(self) -> checkpoint.Held:
        parameters = self._model.engine.now.parameters.tensors
        return checkpoint.Held(self.shards, self._inner, parameters, self.param_groups, self._has_stepped)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the state, in torch's form. Each rank loads what it has saved, under as many ranks.

        ``torch.distributed.checkpoint`` with its ``get_state_dict`` and ``set_state_dict`` gives the parts of any
        number of ranks. ``torch.load`` takes a part with ``weights_only=True``, once fastddp is imported. Copies in
        fp32 of parameters of 16 bits are "fastddp.main". As in torch, tensors are the optimizer's own.
        """
        if checkpoint.wants_whole():
            return self.full_state_dict()
        self.shards.begin_step()
        return {**super().state_dict(), checkpoint.BUCKETS: (self.shards.group.size(), self.shards.plan)}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state, as ``optimizer_class`` has it over a whole model: copies on the CPU. A collective.

        ``optimizer_class(model.parameters(), ...)`` can load it, and so can a ShardedOptimizer on any number of ranks.

        Args:
            rank0_only: the other ranks get {}.
        """
        return self._full_state_dict(keep=not rank0_only or self._model.engine.now.process_group.rank() == 0)

    def _full_state_dict(self, *, keep: bool) -> dict[str, Any]:
        self.shards.begin_step()
        state = self._held().whole(keep=keep)
        return {"state": state, "param_groups": super().state_dict()["param_groups"]} if keep else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load what :meth:`state_dict` or :meth:`full_state_dict` has given, or an optimizer that is not sharded.

        All ranks call it. The dictionaries in ``param_groups`` stay the same ones. The next step takes parameters for
        those copies in fp32 that are not in the state, or do not round to the parameters.

        Raises:
            ValueError: it is the state of another model, or another rank's. Nothing has been loaded.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        engine = self._model.engine
        saved = checkpoint.Saved(state_dict, self.param_groups, engine.now.parameters, any_shape=self._whole)
        self.shards.wait()
        if (plan := saved.other_plan(self.shards.plan, self.shards.group.size())) is not None:
            engine.use_plan(plan, engine.now.setting.several_lanes)
        saved.check_has(self.shards)
        saved.install(self._held())
        for group, of_saved in zip(self.param_groups, saved.groups, strict=True):
            group.update(copy.deepcopy(_settings_of(of_saved)))
        self._has_stepped = bool(saved.of_parameter)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _check_model(model: DistributedDataParallel) -> None:
    config = model.engine.recipe.config
    refused = {
        'main_grads="main_grad"': (config.main_grads == "main_grad", 'use main_grads="grad"'),
        'wire_memory="symmetric"': (config.wire_memory == "symmetric", 'use wire_memory="registered" or None'),
    }
    for option, (is_given, remedy) in refused.items():
        if is_given:
            raise ValueError(f"ShardedOptimizer does not go with {option}: {remedy}." + see("FD042"))


def _check(model: object, optimizer_class: Any, shard: str, gather: str) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ShardedOptimizer takes a fastddp.DistributedDataParallel, got {type(model).__name__}. Wrap the module "
            "first." + see("FD024")
        )
    _check_model(model)
    if shard not in ("elements", "parameters"):
        raise ValueError(f'shard must be "elements" or "parameters", got {shard!r}.' + see("FD024"))
    if gather not in ("step", "forward"):
        raise ValueError(f'gather must be "step" or "forward", got {gather!r}.' + see("FD024"))
    name = getattr(optimizer_class, "__name__", "")
    is_of_torch = getattr(optimizer_class, "__module__", "").startswith("torch.optim")
    if is_of_torch and shard == "elements" and name in _NOT_ELEMENTWISE:
        raise ValueError(
            f'torch.optim.{name} needs whole parameters, and shard="elements" cuts them. Use shard="parameters".'
            + see("FD042")
        )
