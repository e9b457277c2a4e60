"""``fastddp.ShardedOptimizer``: each rank steps with its part of the gradients, and parameters are gathered."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from fastddp.ddp import DistributedDataParallel
from fastddp.errors import see
from fastddp.in_place.replicated import wrapper_of
from fastddp.sharding import checkpoint
from fastddp.sharding.mixed import make_optimizer, members, names_of, without_classes
from fastddp.sharding.notice import ShardedGradient
from fastddp.sharding.parts import Parts, settings_of
from fastddp.sharding.probe import Way, find_way
from fastddp.sharding.scaler import let_scalers_unscale_parts
from fastddp.sharding.uneven import StepsToTheEnd
from fastddp.torch_compat.surface import check_not_shared


class ShardedOptimizer(Optimizer, StepsToTheEnd):
    """An optimizer of which each rank has a part: its state takes 1/ranks of the memory.

    Gradients of ``model`` are added up where their part of the optimizer is, bucket by bucket during backward.
    :meth:`step` runs ``optimizer_class`` on this rank's part, and gathers parameters. In all, as many bytes travel as
    for one allreduce. The idea is ZeRO's (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).

    Args:
        model: whose parameters to train. From now on they are views of one flat tensor a bucket, and ``parameter.grad``
            is a :class:`fastddp.sharding.notice.ShardedGradient` once backward has averaged it.
        optimizer_class: a class of ``torch.optim``, or one like it.
        params: parameters or parameter groups; None: all that the model synchronises. What it ignores stays as it is,
            and a warning says so. Those that are left out have to come by :meth:`add_param_group` before the first
            :meth:`step`. A group may name a class of its own, as
            ``{"params": biases, "optimizer_class": torch.optim.AdamW, "lr": 3e-4}``. Its settings are in the group; all
            others have that class' defaults.
        shard: "elements": every rank has the same number of elements of each bucket, for optimizers that treat each
            element by itself (SGD, Adam, AdamW, Adagrad, RMSprop, ...). "parameters": whole parameters, for others
            (Muon, Adafactor, ...). None: "elements" where that is right. Of torch's own classes this is known; any
            other one, with these settings, first takes a few steps on small parameters in fp64.
        gather: "step": when :meth:`step` returns, the current stream sees the new parameters. "forward": it returns at
            once. Who reads a parameter through its module waits for its bucket, so the next forward hides the gather.
            Before parameters are read in another way, call ``model.parameters_ready()``.
        parameter_wire: fp32 parameters travel in this dtype, fp16 or bf16. Ranks then compute with rounded parameters;
            the optimizer keeps fp32 copies of its part. None: as they are.
        **settings: of ``optimizer_class``, as ``lr``.

    Raises:
        RuntimeError: the optimizer is made while gradients are being synchronised.
        TypeError: ``model`` is not a wrapper of fastddp's, nor replicated in place.
        ValueError: a parameter is not the model's; a class needs whole parameters, or all of them at once (LBFGS);
            gradients travel in a way that cannot be sharded; ``parameter_wire`` is another dtype; or another wrapper
            or sharded optimizer has the model's parameters.
    """

    def __init__(
        self,
        model: DistributedDataParallel | nn.Module,
        optimizer_class: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        *,
        shard: Literal["elements", "parameters"] | None = None,
        gather: Literal["step", "forward"] = "step",
        parameter_wire: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        wrapper: DistributedDataParallel = wrapper_of(model)
        _check(wrapper, shard, gather)
        if parameter_wire not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"parameter_wire must be torch.float16 or torch.bfloat16, got {parameter_wire}." + see("FD024")
            )
        trained = wrapper.engine.now.parameters
        ignored = {name for name, one in wrapper.module.named_parameters() if one.requires_grad} - {*trained.names}
        if params is None and ignored:
            text = f"ShardedOptimizer does not step {', '.join(sorted(ignored))}, which the model ignores. Give it to "
            warnings.warn(f"{text}an optimizer that is not sharded." + see("FD042"), stacklevel=2)
        given, own = without_classes(list(trained.tensors if params is None else params))
        make = functools.partial(optimizer_class, **settings)
        if given and isinstance(given[0], Tensor):
            given = [parameter for parameter in given if parameter.requires_grad]
        template = make_optimizer(make, own, given)  # checks the settings, and completes the groups
        whole = _shards_whole(shard, find_way(make, own, template.param_groups))
        in_step = gather == "step"
        self.parts = Parts(wrapper, make, own, whole=whole, wire=parameter_wire, waits_in_step=in_step)
        self._has_stepped, self._shard = False, shard
        self._kinds = {type(one) for one in members(template)}
        Optimizer.__init__(self, template.param_groups, template.defaults)
        Joinable.__init__(self)
        self.parts.shown, self.parts.optimizer = None, weakref.ref(self)
        wrapper.engine.shard(self.parts)
        let_scalers_unscale_parts()

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError(
            "A ShardedOptimizer cannot be pickled or copied, since it steps parameters of its model. Copy the model, "
            "and make another optimizer for it." + see("FD042")
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model, with settings of their own.

        All parameters have to be there before the first :meth:`step`.

        Args:
            param_group: as in ``params``.

        Raises:
            ValueError: a parameter is not the model's, has sparse gradients or is in another group; or the class that
                the group names needs whole parameters, or all of them at once.
        """
        own = None
        if self.parts.inner:  # else the constructor has completed it
            [param_group], classes = without_classes([param_group])
            make = (own := classes.get(0)) or self.parts.make
            [param_group] = make([param_group]).param_groups
            _shards_whole(self._shard, find_way(make, {}, [param_group]), is_late=not self.parts.whole)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.parts.check_trained(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self.parts.add_group(own)

    # ------------------------------------------------------------------------------------------------------- a step

    @staticmethod
    def profile_hook_step(func: Any) -> Any:
        """As torch's around :meth:`step`, which dynamo leaves alone: it cannot trace what has no memory."""
        return torch._disable_dynamo(Optimizer.profile_hook_step(func))

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
        self._check_joined()
        if not self._has_stepped:
            self.parts.check_none_missing()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._only_makes_state():
            self._check_newest()
            self.parts.begin_step()
            self.parts.make_state()
            self._has_stepped = True
            return loss
        self._begin()
        self.parts.check_gradients()
        self._has_stepped = True
        self._do("step")
        return loss

    def _begin(self) -> None:
        self._check_newest()
        if self.parts.refuses:
            raise RuntimeError(f"fastddp: {self.parts.refuses}")
        self.parts.begin_step()

    def _check_newest(self) -> None:
        if self.parts.model.engine.sharded is not self.parts:
            raise RuntimeError(
                "Another ShardedOptimizer has been made for this one's model. Step the newest one." + see("FD042")
            )

    @torch.no_grad()
    def _do(self, method: str) -> None:
        """Call a method for this rank's part of each bucket, and gather parameters."""
        parts, shards = self.parts, self.parts.shards
        before = list(map(settings_of, self.param_groups))
        try:
            for number in reversed(range(len(shards.buckets))):  # in forward's order
                parts.step(number, method)
                shards.start_gather(number)
            parts.take_settings(before)
        except BaseException:
            with suppress(RuntimeError):
                shards.wait()  # or others would read what has not come
            raise
        finally:
            parts.follow_state()
        if parts.waits_in_step:
            shards.wait()
        else:
            shards.wait_where_read()

    def __getattr__(self, name: str) -> Any:
        """``train`` and ``eval`` of schedule-free optimizers, which all ranks call."""
        if name.startswith("_") or not any(hasattr(kind, name) for kind in self.__dict__.get("_kinds", ())):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name not in ("train", "eval"):
            raise AttributeError(
                f"ShardedOptimizer does not pass on {name} of {' and '.join(kind.__name__ for kind in self._kinds)}, "
                "since each rank has a part of the optimizer. It has step, zero_grad, train and eval." + see("FD047")
            )
        return functools.partial(self._switch, name)

    def _switch(self, mode: str) -> None:
        self._begin()
        self._do(mode)

    def parameters_ready(self) -> None:
        """Wait until all parameters of the last :meth:`step` are here. On a device only the current stream waits."""
        self.parts.parameters_ready()

    def _only_makes_state(self) -> bool:
        """Whether torch.distributed.checkpoint steps with assigned zeros, so that there is state to load into."""
        trained = (parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad)
        gradients = [parameter.grad for parameter in trained]
        if any(gradient is None or isinstance(gradient, ShardedGradient) for gradient in gradients):
            return False
        return not (self._held().part(mains=False) or any(bool(gradient.any()) for gradient in gradients))

    # -------------------------------------------------------------------------------------------------- checkpoints

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """This rank's part of the state, by parameter. It is empty before the first step.

        What has a number for each element is a :class:`fastddp.sharding.sharded_state.ShardedState`. {}: other ranks
        have all of it. What all ranks write here, as of whole parameters, counts from the next step or checkpoint on;
        each takes its part.
        """
        return self.parts.show_state() if self.parts.shown is None else self.parts.shown

    @state.setter
    def state(self, state: Any) -> None:
        self.parts.shown = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """What is changed here counts from the next step on."""
        return self.parts.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.parts.groups = groups

    def _has_state(self) -> bool:
        return bool(self._held().part())

    def _held(self) -> checkpoint.Held:
        parts = self.parts
        parameters = parts.parameters.tensors
        return checkpoint.Held(parts.shards, parts.inner, parameters, self.param_groups, self._has_stepped)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the state, in torch's form. Each rank loads what it has saved, under as many ranks.

        ``torch.distributed.checkpoint`` with its ``get_state_dict`` and ``set_state_dict`` gives the parts of any
        number of ranks. ``torch.load`` takes a part with ``weights_only=True``, once fastddp is imported. Copies in
        fp32 of parameters of 16 bits are "fastddp.main". As in torch, tensors are the optimizer's own.
        """
        if checkpoint.wants_whole():
            return self.full_state_dict()
        self._check_saves()
        self.parts.begin_step()
        shown, shards = self.parts.shown, self.parts.shards
        found = {**super().state_dict(), checkpoint.BUCKETS: (shards.group.size(), shards.plan)}
        number_of = {id(one): at for at, one in enumerate(chain(*(group["params"] for group in self.param_groups)))}
        found["state"] = {number_of[id(one)]: dict(state) for one, state in self._held().part().items()}
        self.parts.shown = shown
        return found

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state, as ``optimizer_class`` has it over a whole model: copies on the CPU. A collective.

        ``optimizer_class(model.parameters(), ...)`` can load it, and so can a ShardedOptimizer on any number of ranks.

        Args:
            rank0_only: the other ranks get {}.
        """
        return self.gather_state(destination=0 if rank0_only else None)

    def gather_state(self, *, destination: int | None = None) -> dict[str, Any]:
        """The whole state for whoever saves it, before a planned change of ranks. A collective.

        Parameters of the last step are here when it returns. Then :meth:`.regroup`, and :meth:`load_state_dict` of this
        on all ranks, go on with any number of ranks.

        Args:
            destination: the rank of the model's group that gets it; the others get {}. None: all ranks.

        Returns:
            As :meth:`full_state_dict`.

        Raises:
            ValueError: there is no such rank.
        """
        ranks = self.parts.now.process_group.size()
        if destination is not None and not 0 <= destination < ranks:
            raise ValueError(f"destination={destination}: the model has ranks 0 to {ranks - 1}." + see("FD024"))
        return self._full_state_dict(keep=destination in (None, self.parts.now.process_group.rank()))

    def _check_saves(self) -> None:
        """DCP makes state to load into, and then asks for it."""
        if self.parts.refuses and not self._has_state():
            raise RuntimeError(f"fastddp: {self.parts.refuses}")

    def _full_state_dict(self, *, keep: bool) -> dict[str, Any]:
        self._check_saves()
        self.parts.begin_step()
        state = self._held().whole(keep=keep)
        return {"state": state, "param_groups": super().state_dict()["param_groups"]} if keep else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load what :meth:`state_dict` or :meth:`full_state_dict` has given, or an optimizer that is not sharded.

        All ranks call it. The dictionaries in ``param_groups`` stay the same ones. The next step takes parameters for
        those copies in fp32 that are not in the state, or do not round to the parameters.

        Args:
            state_dict: the state.

        Raises:
            ValueError: it is the state of another model, or another rank's; or a parameter of the model is in no
                group. Nothing has been loaded.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        parts, engine = self.parts, self.parts.model.engine
        parts.check_none_missing()
        parts.take_groups()
        saved = checkpoint.Saved(state_dict, self.param_groups, parts.parameters, any_shape=parts.whole)
        parts.parameters_ready()
        if (plan := saved.other_plan(parts.shards.plan, parts.shards.group.size())) is not None:
            engine.use_plan(plan, lanes_were_measured=False)
        saved.check_has(parts.shards)
        saved.install(self._held())
        for group, of_saved in zip(self.param_groups, saved.groups, strict=True):
            group.update(copy.deepcopy(settings_of(of_saved)))
        self._has_stepped = bool(saved.of_parameter)
        parts.follow_state()
        parts.refuses = ""
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check_model(model: DistributedDataParallel) -> None:
    config = model.engine.recipe.config
    refused = {
        'main_grads="main_grad"': (config.main_grads == "main_grad", 'use main_grads="grad"'),
        'wire_memory="symmetric"': (config.wire_memory == "symmetric", 'use wire_memory="registered" or None'),
        "fastddp.elastic": (model._loses_ranks, "a lost replica takes its part along; use the optimizer itself"),
    }
    for option, (is_given, remedy) in refused.items():
        if is_given:
            raise ValueError(f"ShardedOptimizer does not go with {option}: {remedy}." + see("FD042"))


def _check(model: object, shard: str | None, gather: str) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ShardedOptimizer takes a fastddp.DistributedDataParallel, got {type(model).__name__}. Wrap the module "
            "first." + see("FD024")
        )
    _check_model(model)
    check_not_shared(model.engine, if_sharded=False)
    before = model.engine.sharded
    if before is not None and before.optimizer() is not None:
        gc.collect()  # schedulers may hold it in a cycle
        other: Any = before.optimizer()
        if other is not None:
            raise ValueError(
                f"A {type(other).__name__} of {names_of(other.parts.inner)} trains the model already. Delete it, and "
                'what holds it, before you make another one; or make one whose groups name an "optimizer_class".'
                + see("FD047")
            )
    if shard not in (None, "elements", "parameters"):
        raise ValueError(f'shard must be "elements", "parameters" or None, got {shard!r}.' + see("FD024"))
    if gather not in ("step", "forward"):
        raise ValueError(f'gather must be "step" or "forward", got {gather!r}.' + see("FD024"))


def _shards_whole(shard: str | None, way: Way, *, is_late: bool = False) -> bool:
    """Whether ranks have whole parameters, by the argument and what is known; ``is_late``: they have parts already."""
    must_be = way.shard == "parameters" or (way.shard == "unknown" and shard is None)
    if must_be and (is_late or shard == "elements"):
        raise ValueError(
            f'{way.seen}, and shard="elements" cuts parameters. Leave shard out, or use shard="parameters".'
            + see("FD046")
        )
    if shard is None and way.shard == "unknown":
        warnings.warn(f"{way.seen}. So each rank of this ShardedOptimizer has whole parameters.", stacklevel=3)
    return must_be if shard is None else shard == "parameters"
