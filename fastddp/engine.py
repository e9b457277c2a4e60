"""What synchronises one model. The wrapper drops it when it is pickled or its ranks change, and makes another."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fastddp import _C, comm_hooks
from fastddp.config import Config
from fastddp.errors import see
from fastddp.exchange.descriptions import AllReduce, Exchange, Schedule, check_wire
from fastddp.exchange.in_force import InForce
from fastddp.exchange.of_model import OfModel, all_or_nothing
from fastddp.exchange.ways import check_shardable, way_of
from fastddp.module.main_gradients import MainGradients, without_memory
from fastddp.module.nested import tensors_in
from fastddp.module.numbering import ModelNumber
from fastddp.module.parameter_watch import ParameterWatch
from fastddp.module.parameters import NamedParameters, replicated_tensors
from fastddp.module.replicas import agree_on, agree_on_order, check_same_model
from fastddp.planning.bucket_plan import Buckets, become_complete_in_order, plan_buckets, with_one_dtype
from fastddp.planning.delayed import Delayed
from fastddp.planning.pinned_plan import PinnedPlan
from fastddp.planning.planner import Planner
from fastddp.ranks.agreement import divides_first
from fastddp.ranks.hierarchy import HierarchyArgument, find_hierarchy
from fastddp.ranks.lanes import lanes_pay
from fastddp.ranks.placement import reads_pay
from fastddp.ranks.together import models
from fastddp.ranks.wire_memory import wire_memory_of
from fastddp.watch.audit import Audit
from fastddp.watch.audited_tensors import AuditedTensors
from fastddp.watch.non_finite import NonFiniteWatch
from fastddp.watch.options import Watch
from fastddp.watch.slow_ranks import SlowRanks
from fastddp.watch.stalls import watch_for_stalls
from fastddp.window.gradient_average import GradientAverage, Weight, check_exchange
from fastddp.window.local_steps import LocalSteps
from fastddp.window.step_check import check_before_each_step
from fastddp.window.unfinished import check_not_failed, give_up


@dataclass(frozen=True)
class Recipe:
    """The arguments of an engine. They outlive it, so that another engine can be made."""

    module: nn.Module
    ignored: set[str]  # names of parameters and buffers that are left alone
    parameters: NamedParameters
    config: Config
    watch: Watch
    gradient_average: GradientAverage
    hierarchy: HierarchyArgument
    pinned_plan: PinnedPlan
    delayed: Delayed | None
    wire: torch.dtype | None = None  # the dtype of wires where no hook is registered; None: the gradients'

    def plan(self, like: Sequence[torch.Tensor], order: Sequence[int] | None = None) -> Buckets:
        """The buckets of gradients ``like`` these, which come in ``order``; None: the reverse of registration."""
        if self.pinned_plan.buckets is not None:
            return self.pinned_plan.buckets
        if order is None:
            order = [index for index in reversed(range(len(like))) if index not in self.parameters.sparse]
        plan = plan_buckets if self.delayed is None else self.delayed.plan
        return plan(like, self.config.bucket_caps, order)


@dataclass(frozen=True)
class Carried:
    """What an engine leaves to the next, in another group of ranks. All get the newest rank's, but for ``own``."""

    learned: list[int]  # of what is known of windows (_C.Reducer.learned()) what all ranks have alike
    own: list[int]  # the rest: how often parameters get gradients here, if that may change; the order of arrival
    plan: Buckets
    has_rebuilt_buckets: bool
    places: list[bool]  # of buckets: the attributes of InForce that are PLACES
    plans_left: int  # with bucket_cap_mb="auto"
    sampling: Sequence[Any]  # the arguments of sample_steps()

    PLACES: ClassVar[tuple[str, ...]] = ("several_lanes", "reads_pay", "lanes_were_measured", "divide_in_collective")


class _Sharded(Protocol):
    """A sharded optimizer: :class:`fastddp.sharding.parts.Parts`, which explains these."""

    optimizer: Callable[[], object]

    @property
    def settings(self) -> list[str]: ...

    @property
    def has_state(self) -> bool: ...

    def leave(self) -> None: ...

    def move(self, *, without_state: bool) -> None: ...

    def check_parameters(self) -> None: ...

    def parameters_ready(self) -> None: ...

    def laid_out(self, now: InForce) -> AbstractContextManager[list[_C.Shard]]: ...

    def gradients(self) -> Sequence[torch.Tensor]: ...


class Engine:
    """Reducer, setting, schedule, exchange and watchers of one model.

    ``make_reducer`` is the class of its reducer, and ``note_error`` is told of missing gradients. A ``hook`` that is
    registered comes with its state. ``audited`` is what ``audit_every`` compares; None: the parameters. ``carried`` is
    of the engine before.
    """

    def __init__(
        self,
        recipe: Recipe,
        process_group: dist.ProcessGroup,
        number: ModelNumber,
        make_reducer: Callable[..., _C.Reducer],
        note_error: Callable[[str], None],
        hook: tuple[object, Callable[..., Any]] | None = None,
        audited: AuditedTensors | None = None,
        carried: Carried | None = None,
    ) -> None:
        self.recipe = recipe
        self.has_rebuilt_buckets = carried is not None and carried.has_rebuilt_buckets
        self.sampling: Sequence[Any] = (0, False) if carried is None else carried.sampling
        self.slow_ranks: SlowRanks | None = None
        self._left: tuple[Carried, _C.Lost | None] | None = None
        self.sharded: _Sharded | None = None
        self._agreed: dict[str, Any] | None = None  # what ranks have agreed on, which this one has not taken yet
        self._note_error = note_error
        self._of_model: OfModel | None = None
        config, watch = recipe.config, recipe.watch
        parameters = recipe.parameters.tensors
        device = parameters[0].device
        main_gradients = MainGradients.of_config(config)
        main_gradients.let_grad_differ(parameters)
        like = main_gradients.like(parameters)
        plan = recipe.plan(like) if carried is None else carried.plan
        learned = () if carried is None else [*carried.learned, *carried.own]
        self.reducer = self._make_reducer(make_reducer, plan, main_gradients, process_group, learned)
        self.parameter_watch = ParameterWatch(recipe.module, recipe.ignored, recipe.parameters, self.reducer)
        average = recipe.gradient_average
        self._weight = Weight(1.0 if isinstance(average, str) else average, device)
        self.reducer.set_model_number(number.agreed)
        self.planner = Planner() if config.plans_buckets else None
        if self.planner is not None and carried is not None:
            self.planner.go_on(carried.plans_left, self.reducer)
        self.now = InForce(
            recipe.module,
            recipe.parameters,
            main_gradients,
            number,
            process_group,
            device,
            self.reducer,
            like,
            plan,
            find_hierarchy(recipe.hierarchy, process_group, device),
            corruption=watch.corruption is not None,
            symmetric=config.wire_memory == "symmetric",
        )
        for name, place in zip(Carried.PLACES, () if carried is None else carried.places, strict=False):
            setattr(self.now, name, place)
        self._stall_watch = watch_for_stalls(self.now, watch)
        self._non_finite = None if watch.corruption is None else NonFiniteWatch(self.now, watch.corruption)
        self.audit = self._make_audit(audited)
        all_reduce = AllReduce(wire=recipe.wire)
        self._use(*((lambda window: all_reduce, None) if hook is None else self._schedule_of(*hook)))
        self.local_steps = LocalSteps(self.now, watch.local_steps)
        self.steps = check_before_each_step(self.now, self.local_steps, self.check_before_step)
        self.sample_steps(*self.sampling)

    def _make_reducer(
        self,
        make: Callable[..., _C.Reducer],
        plan: Buckets,
        main_gradients: MainGradients,
        process_group: dist.ProcessGroup,
        learned: Sequence[int],
    ) -> _C.Reducer:
        recipe, config = self.recipe, self.recipe.config
        parameters = recipe.parameters.tensors
        reducer = make(
            parameters,
            recipe.parameters.names,
            plan,
            process_group,
            config.gradient_as_bucket_view,
            config.expect,
            recipe.parameters.sparse,
            main_gradients.dtype,
            main_gradients.are_apart,
            lazy_bucket_allocation=config.lazy_bucket_allocation,
            learned=learned,
        )
        memory = wire_memory_of(config.wire_memory)
        if memory is not None:
            reducer.use_memory(memory)
        if main_gradients.are_apart:
            for parameter, gradient in zip(parameters, reducer.main_gradients(), strict=True):
                parameter.main_grad = gradient  # type: ignore[attr-defined]  # Megatron's names
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        reducer.ask_layers(main_gradients.hear_layers(recipe.parameters))
        reducer.watch_local_gradients(recipe.watch.corruption is not None)
        if any(isinstance(module, nn.SyncBatchNorm) for module in recipe.module.modules()):
            reducer.share_order()
        return reducer

    def _make_audit(self, tensors: AuditedTensors | None) -> Audit | None:
        every, tell = self.recipe.watch.audit_every, self.recipe.watch.corruption
        if every is None:
            return None
        if tensors is None:
            tensors = AuditedTensors(replicated_tensors(self.recipe.module, self.recipe.ignored, with_buffers=False))
        return Audit(every, tell, tensors, self.now.process_group, self.now.device)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._end_of_model()

    def _end_of_model(self) -> None:
        """Tell a hook's state how many windows there were, because the state may outlive the model."""
        if self._of_model is not None:
            self.now.like = [without_memory(gradient, gradient.dtype) for gradient in self.now.like]
            self._of_model.end(self.reducer.windows(), self.now.setting)
            self._of_model = None

    # --------------------------------------------------------------------------------------------- in another group

    @property
    def remembers(self) -> Any:
        """The state of the registered hook, if it outlives a group of ranks: of 8 bits, of PowerSGD."""
        return getattr(self.schedule, "state", None)

    def leave(self, group_stays: bool) -> tuple[Carried, _C.Lost | None]:
        """End, without a wait for other ranks. What is left to the next engine; and the connection that was lost.

        The gradients of an open or void window are removed. ``group_stays``: the group goes on with other ranks.
        """
        if self._left is not None:
            return self._left
        now = self.now
        if self.sharded is not None:
            self.sharded.leave()
        is_open = self.reducer.state not in ("idle", "finished")
        if self.reducer.leave(group_stays) or is_open:
            for parameter in now.parameters.tensors:
                parameter.grad = None
        learned = self.reducer.learned()
        alike = 3 + 4 * len(now.like) if self.recipe.config.expect == _C.Expect.as_first else 1
        carried = Carried(
            learned[:alike],
            learned[alike:],
            now.plan,
            self.has_rebuilt_buckets,
            [getattr(now, place) for place in Carried.PLACES],
            0 if self.planner is None else self.planner.left,
            self.sampling,
        )
        models.pop(now, None)
        self._end_of_model()
        self._left = carried, self.reducer.lost
        return self._left

    @property
    def here(self) -> Engine:
        """The engine itself. DistBackendError: it has left, and no other took its place."""
        if self._left is not None:
            raise dist.DistBackendError(
                "fastddp: this model has left its ranks, and regroup() has not given it others: it runs in another "
                "thread, or did not end well. Then call it again, with ranks that have the same model and options."
                + see("FD052")
            )
        return self

    def sample_steps(self, every: int, compare_ranks: bool) -> None:
        """As :meth:`fastddp.DistributedDataParallel.sample_steps`."""
        now = self.now
        self.sampling = (every, compare_ranks)
        next_window = self.reducer.windows() + (self.reducer.state not in ("idle", "finished"))
        self.reducer.sample_every(every, next_window)
        self.slow_ranks = None
        if compare_ranks and every > 0 and now.process_group.size() > 1:
            self.slow_ranks = SlowRanks(every, next_window, now.process_group, now.device)

    # ---------------------------------------------------------------------------------------- how gradients travel

    def register_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Use this hook from now on; see :meth:`fastddp.DistributedDataParallel.register_comm_hook`."""
        self.reducer.repair_if_failed()  # other ranks may wait for that, and for nothing else
        with all_or_nothing(state):
            self._use(*self._schedule_of(state, hook))
        if self.reducer.state == "armed" and self._adds_up_weights():  # the forward has, of the ranks of before
            self._weight.send(self.now.exchange.group(self.now.setting), counts=True)
            self._set_weighting()

    def _schedule_of(self, state: object, hook: Callable[..., Any]) -> tuple[Schedule, OfModel]:
        this = weakref.ref(self)  # a state may outlive the model
        of_model = OfModel(
            lambda: this().reducer,  # type: ignore[union-attr]
            lambda: this().now.setting,  # type: ignore[union-attr]
            self.now.number.name,
        )
        return comm_hooks.schedule(state, hook, of_model), of_model

    def _use(self, schedule: Schedule, of_model: OfModel | None) -> None:
        for exchange in getattr(schedule, "may_use", ()):  # in this window or a later one
            check_exchange(self.recipe.gradient_average, exchange)
            if self.sharded is not None:
                check_shardable(exchange, self.now.setting)
        self._install(schedule(self.reducer.windows()))
        self.schedule, self._of_model = schedule, of_model

    def _install(self, exchange: Exchange, **changes: Any) -> None:
        """Let gradients travel like this from the next window on; ``changes``: attributes of what is in force.

        Where it raises, nothing has changed: note [All or nothing], ``csrc/bucket/bucket.h``.
        """
        setting = dataclasses.replace(self.now, **changes).setting
        check_exchange(self.recipe.gradient_average, exchange)
        check_wire(exchange, setting)
        with all_or_nothing(getattr(exchange, "state", None)):
            self.reducer.set_way(way_of(exchange, setting), setting.plan)
        vars(self.now).update(changes, exchange=exchange)

    # -------------------------------------------------------------------------------------------------- its buckets

    def first_plan(self) -> Buckets:
        """The buckets of the first window."""
        return self.recipe.plan(self.now.like)

    def rebuild_buckets(self) -> None:
        """After the first window: plan buckets again, in the order in which gradients came on rank 0."""
        is_static = self.recipe.config.expect == _C.Expect.as_first
        if self.reducer.windows() == 0 or (is_static and not self.reducer.knows_usage()):
            return
        # If this raises on one rank, its next forward goes on here, and the others do not compare anything again.
        self._agreed = self._agreed or self._agree_on_buckets(is_static)
        self.use_plan(**self._agreed)
        self._agreed = None
        if is_static:
            self.reducer.fix_usage()
        self.has_rebuilt_buckets = True
        if self.planner is not None:
            self.planner.begin(self.reducer)

    def _agree_on_buckets(self, is_static: bool) -> dict[str, Any]:
        """The arguments of :meth:`use_plan`."""
        now = self.now
        planned = dict.fromkeys(index for bucket in self.first_plan() for index in bucket)
        arrived = dict.fromkeys(index for index in self.reducer.arrival_order() if index in planned)
        check_same_model(now.number.agreed, now.process_group, now.device)
        order = agree_on_order([*(arrived | planned)], [*planned], now.process_group, now.device)
        if is_static:
            used = set(self.reducer.used_parameters())
            order = [index for index in order if index in used] or order
        plan = self.recipe.plan(now.like, order)
        if self.sharded is not None and become_complete_in_order(now.plan, order):
            plan = now.plan  # others are little better, and parameters and state would move
        bucket_bytes = [sum(now.like[index].nbytes for index in bucket) for bucket in plan]
        return {
            "plan": plan,
            "several_lanes": lanes_pay(bucket_bytes),
            "reads_pay": self.planner is None and reads_pay(bucket_bytes),  # a planner measures allreduces
            "lanes_were_measured": False,
            "divide_in_collective": self._divides_in_collective(order),
        }

    def _divides_in_collective(self, order: Sequence[int]) -> bool:
        """Yes if gradients stay in their buckets, zeroed in place: then only the division would take a kernel."""
        now = self.now
        if now.device.type == "cpu":
            return False
        parameters = now.parameters.tensors
        keeps_gradients = all(now.main_gradients.gradient_of(parameters[index]) is not None for index in order)
        keep_everywhere = agree_on(keeps_gradients, now.process_group, now.device)
        return keep_everywhere and divides_first(now.process_group, now.device)

    def plan_buckets(self) -> None:
        """If enough windows have been measured, use the best buckets by those measurements."""
        now = self.now
        if self.planner is None or not self.planner.is_due(self.reducer):
            return
        assert isinstance(now.exchange, AllReduce)  # register_comm_hook refuses others
        found = self.planner.find(self.reducer, now.setting, now.exchange, now.device)
        if found is not None:
            plan, several_lanes = found
            self.use_plan(plan, several_lanes=several_lanes, lanes_were_measured=True)
        self.planner.begin(self.reducer)

    def use_plan(self, plan: Buckets, **changes: Any) -> None:
        """Use these buckets from the next window on, with ``changes`` as of :meth:`_install`."""
        now = self.now
        self.reducer.repair_if_failed()
        if self.sharded is not None and with_one_dtype(plan, now.parameters.tensors) != now.plan:
            self.shard(self.sharded, plan=plan, **changes)
        else:
            self._install(now.exchange, plan=now.plan if self.sharded else plan, **changes)

    def shard(self, sharded: _Sharded, **changes: Any) -> None:
        """From the next window on, each rank gets the averages of its own part of every bucket, as ``sharded`` decides.

        ``changes``: as of :meth:`_install`. Raises ValueError if gradients travel in a way that cannot be sharded.
        """
        now = self.now
        self.reducer.repair_if_failed()
        for exchange in (now.exchange, *getattr(self.schedule, "may_use", ())):
            check_shardable(exchange, now.setting)
        changes["plan"] = with_one_dtype(changes.get("plan", now.plan), now.parameters.tensors)
        with sharded.laid_out(coming := dataclasses.replace(now, **changes)) as shards:
            self._install(now.exchange, **changes, sharding=coming.sharding, shards=shards)
        self.sharded = sharded

    def expect(self, recipe: Recipe) -> None:
        """Take over ``recipe``, in which only ``config.expect`` may be new. Call this before the first window."""
        self.recipe = recipe
        self.reducer.set_expect(recipe.config.expect)
        self.has_rebuilt_buckets = False

    # ---------------------------------------------------------------------------------------------------- a window

    def check_none_missing(self) -> None:
        """If the last window lacks gradients, give it up and raise RuntimeError."""
        if self.reducer.state == "partial":
            message = give_up(self.now, self._stall_watch)
            self._note_error(message)
            raise RuntimeError(message)

    def check_complete(self) -> None:
        """Raise RuntimeError if the last backward failed, or left gradients incomplete."""
        check_not_failed(self.reducer)
        self.check_none_missing()

    def check_before_step(self) -> None:
        """Raise if the present gradients are incomplete or wrong."""
        if self.reducer.state in ("partial", "failed"):
            self.check_complete()
        else:
            self.look_for_corruption()

    def look_for_corruption(self) -> None:
        """Report wrong numbers of the last window, if ``Watch.corruption`` asks for that."""
        if self._non_finite is not None:
            self._non_finite.look()

    def begin_window(self, counts: bool = True) -> None:
        """Agree with other ranks how the window's gradients travel, and on weights; ``counts``: this one has inputs."""
        now = self.now
        exchange = self.schedule(self.reducer.windows())
        if exchange != now.exchange:
            self._install(exchange)
        if self.audit is not None:
            if self.sharded is not None:
                self.sharded.parameters_ready()
            self.audit.begin_window(self.reducer, now.exchange, now.setting, counts)
        if self.slow_ranks is not None:
            self.slow_ranks.begin_window(self.reducer)
        if self._adds_up_weights():
            self._weight.send(now.exchange.group(now.setting), counts)

    def _adds_up_weights(self) -> bool:
        average = self.recipe.gradient_average
        return not isinstance(average, str) or (average == "mean" and self.now.counts_ranks_with_inputs)

    def arm(self, output: Any) -> None:
        """Let the backward from ``output`` synchronise gradients."""
        self._set_weighting()
        self.reducer.arm(tensors_in(output))

    def _set_weighting(self) -> None:
        if self._adds_up_weights():
            self.reducer.set_weighting(_C.Weighting.share, self._weight.share())
        else:
            is_sum = self.recipe.gradient_average == "sum"
            self.reducer.set_weighting(_C.Weighting.sum if is_sum else _C.Weighting.mean)

    def zero_gradients(self) -> None:
        """``zero_grad`` has removed what is in ``.grad``: remove gradients that are elsewhere."""
        self.now.main_gradients.set_zero(self.now.parameters.tensors)
        self.reducer.forget_sums()

    def shadow_window(self) -> None:
        """Take part in a window of the other ranks, without gradients."""
        if self._adds_up_weights():
            self.reducer.set_weighting(_C.Weighting.share, 0.0)  # because the other ranks use shares
        self.reducer.shadow_window()
