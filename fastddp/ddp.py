"""``fastddp.DistributedDataParallel``: torch's class, with another engine."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import Optimizer

from fastddp import comm_hooks
from fastddp._C import Average, Expect, Range, SumAudit
from fastddp.bucket_plan import BucketPlan, Buckets, plan_buckets
from fastddp.compression.auto import AutoSchedule
from fastddp.compression.plan import CompressionPlan
from fastddp.config import Config, check_types
from fastddp.exchange.averages import divides_first
from fastddp.exchange.backends import check_numbers
from fastddp.exchange.descriptions import AllReduce, Exchange, Schedule, Setting, check_wire
from fastddp.exchange.gradient_average import GradientAverage, Weight, check_exchange, check_gradient_average
from fastddp.exchange.hierarchy import HierarchyArgument, check_hierarchy, describe_hierarchy, find_hierarchy
from fastddp.exchange.lanes import lanes_pay
from fastddp.exchange.of_model import OfModel
from fastddp.exchange.two_level import in_levels
from fastddp.exchange.wire_memory import WireMemory, wire_memory_of
from fastddp.module.buffers import BufferSync
from fastddp.module.main_gradients import MainGradients
from fastddp.module.meshes import LocalParts, group_of_mesh, keeps_refused_module
from fastddp.module.mixed_precision import LowPrecision
from fastddp.module.nested import tensors_in
from fastddp.module.parameter_watch import ParameterWatch
from fastddp.module.parameters import (
    collect_parameters,
    named_buffers,
    replicated_tensors,
)
from fastddp.module.replicas import (
    PIECE_BYTES,
    agree_on,
    agree_on_order,
    broadcast_replicas,
    check_dense,
    check_same_model,
    verify_replicas,
)
from fastddp.module.stand_ins import StandIns
from fastddp.planning.delayed import Delayed
from fastddp.planning.pinned_plan import PinnedPlan
from fastddp.planning.planner import Planner, check_planned_hook
from fastddp.step_report import StepReport
from fastddp.torch_compat.compiling import ActiveModel
from fastddp.torch_compat.distributed_autograd import refuse_distributed_autograd
from fastddp.torch_compat.logging_data import Logger
from fastddp.torch_compat.optimizer_in_backward import take_over_optimizers
from fastddp.torch_compat.reducer import Reducer
from fastddp.torch_compat.surface import TorchSurface
from fastddp.watch.audit import Audit
from fastddp.watch.audited_tensors import AuditedTensors
from fastddp.watch.non_finite import NonFinite, blame, look
from fastddp.watch.non_finite_module import find_in_next_forward
from fastddp.watch.numbering import give_number, give_number_of_a_copy, next_number, number_of
from fastddp.watch.options import Watch, check_watch
from fastddp.watch.slow_ranks import SlowRanks
from fastddp.watch.stalls import telling_who_has_ended, watch_for_stalls
from fastddp.window import joining
from fastddp.window.grad_norm import measured
from fastddp.window.step_check import check_before_each_step
from fastddp.window.unfinished import Window, delete_reports, give_up, watch_for_waiting


class DistributedDataParallel(TorchSurface):
    """Data parallelism over the ranks of a process group, with the interface of torch's DDP.

    A subclass of :class:`torch.nn.parallel.DistributedDataParallel`, so that ``isinstance`` holds wherever it is asked.
    It calls neither torch's constructor nor torch's reducer. Constructor arguments have torch's names, defaults and
    meanings.

    Args:
        module: the module to train; the same on every rank.
        device_ids: None, or the one accelerator device that ``module`` and its inputs live on.
        output_device: None, or a device; accepted with ``device_ids`` as torch does.
        dim: the batch dimension, for the inherited ``scatter`` and ``gather``.
        broadcast_buffers: older form of ``forward_sync_buffers``; False also leaves buffers out of ``init_sync``.
        init_sync: verify the parameters across ranks and broadcast rank 0's parameters and buffers at construction.
        process_group: the ranks to average over. Default: the default group.
        bucket_cap_mb: MiB of gradients in a bucket. Default: 25; on accelerators 1 for the first bucket. ``"auto"``:
            the default for four steps; then the buckets that by what was measured in them leave the least communication
            behind backward, and from the eighth step on those that do so by what was measured under them
            (:mod:`fastddp.planning`); the default, with a warning, where that tells no bandwidth. Not in torch:
            ``"auto"``.
        gradient_as_bucket_view: make ``parameter.grad`` a view of its bucket, which saves the memory of the gradients
            and the unpack kernel.
        find_unused_parameters: parameters may get no gradient in a step, on some ranks or on all. Gradients of those
            that no rank used are not touched. The autograd graph is not searched: buckets wait for what the last step
            used, and what differs from it is made good when backward ends.
        check_reduction: deprecated in torch; ignored.
        delay_all_reduce_named_params: (name, parameter) pairs of ``module`` whose gradients travel together, not before
            that of ``param_to_hook_all_reduce`` has come (:mod:`fastddp.planning.delayed`).
        param_to_hook_all_reduce: a parameter of ``module``.
        device_mesh: a mesh of one dimension, in place of ``process_group``. It may be a slice of a larger one, over
            another slice of which ``torch.distributed.tensor.parallel.parallelize_module`` has spread ``module``: its
            parameters are then each rank's parts (:class:`fastddp.module.meshes.LocalParts`).
        mixed_precision: a ``torch.nn.parallel.distributed._MixedPrecision``: ``module`` runs with parameters and inputs
            of ``param_dtype`` and gradients travel in ``reduce_dtype``; parameters, their gradients and the optimizer
            keep the dtypes they have (:class:`fastddp.module.mixed_precision.LowPrecision`). A communication hook gets
            gradients in the parameters' dtype and decides what travels.
        static_graph: every step is like the first: it uses the same parameters, each as often. Allows what counts hooks
            (a parameter inside several reentrant checkpoints) and unused parameters.
        skip_all_reduce_unused_params: with ``find_unused_parameters``: what no rank used in the first step will never
            be used, and does not travel.
        bucket_cap_mb_list: MiB of the first, second, ... bucket; the last one holds for all further ones.
        batched_grad_copy: accepted and ignored: fastddp always packs a bucket with one kernel.
        forward_sync_buffers: begin each forward with rank 0's buffers. Default: True.
        lazy_bucket_allocation: give the memory of what travels back to the allocator when a backward has ended, and
            take it again in the next one, where a communication hook of fastddp's sends 16 bits, 8 bits or PowerSGD's
            factors. Otherwise gradients live in what travels, which stays. A model of which a step is captured as a
            graph keeps the memory from then on.
        buckets: what another model's :meth:`bucket_plan` returned, or the file that it was saved to. Buckets are then
            those of this plan, and are not rebuilt after the first step. Not in torch.
        gradient_average: "mean" over ranks, or "sum"; or this rank's weight w, and gradients become sum(w g) / sum(w)
            over ranks (g that of a mean over w tokens, say). A weight is a tensor of one element or a callable that
            returns a number; it is read when a forward begins that asks for synchronisation, and counts for all that
            the window adds up. The ranks are those that the communication hook averages over. Not in torch.
        watch: which mishaps of training to look for, and whom to tell. Not in torch.
        main_grads: gradients of fp16 and bf16 parameters are fp32: microbatches and ranks add up in fp32, in the memory
            of the buckets. What travels is the communication hook's choice: fp32 without one. "grad": they are in
            ``parameter.grad``, which takes a torch that has ``Tensor.grad_dtype``. "main_grad": they are in
            ``parameter.main_grad``, of all parameters, which Megatron's and Apex' optimizers read. Then a backward
            leaves ``parameter.grad`` None and adds to ``parameter.main_grad``, which is there from construction on, at
            first zero, and which :meth:`zero_grad` sets to zero again. None: gradients have their parameter's dtype.
            Not in torch.
        hierarchy: exchange gradients in two levels: add them up among the ranks of a node in full precision, let ranks
            in the same place of their nodes exchange these sums as the communication hook says, and give the result to
            the ranks of the node (:mod:`fastddp.exchange.two_level`). "node": which ranks share a node is asked of
            torchrun, or found by the machines' names. A mesh of two dimensions, the nodes and the ranks of a node: of
            the ranks to average over. With one node, or one rank on each, there is one level. Not in torch.
        wire_memory: memory for what travels over NCCL. "registered": that which NCCL has registered with the network,
            and a warning where it has none. "symmetric": windows that all GPUs of an NVLink domain see, over a
            communicator of the model's own with NCCL's zero-CTA policy, so that copy engines do what they can in place
            of multiprocessors; an error where torch, NCCL or the GPUs cannot. None: ordinary memory, unless torch's
            ``DDP_DISABLE_COMM_MEM`` is 0, which means "registered" where there is some. Not in torch.

    Raises:
        RuntimeError: no parameter requires a gradient; a parameter is uninitialised or on the meta device;
            ``device_mesh`` has several dimensions or comes with ``process_group``; a buffer that is to be broadcast is
            sparse; or, on every rank, the ranks hold different models or were given different plans.
        TypeError: ``module``, ``process_group``, ``gradient_average``, ``buckets`` or ``watch`` is of another type.
        ValueError: parameters on several types of device; arguments that contradict each other; a ``SyncBatchNorm`` on
            the CPU; a plan that does not fit the module, or a file that holds none.
    """

    _audit: Audit | None = None
    _slow_ranks: SlowRanks | None = None
    _hierarchy: HierarchyArgument = None

    @keeps_refused_module
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        buckets: BucketPlan | str | os.PathLike[str] | None = None,
        gradient_average: GradientAverage = "mean",
        watch: Watch = Watch(),  # noqa: B008  # frozen
        main_grads: Literal["grad", "main_grad"] | None = None,
        hierarchy: HierarchyArgument = None,
        wire_memory: WireMemory = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        check_types(module, process_group)
        check_watch(watch)
        check_gradient_average(gradient_average)
        check_hierarchy(hierarchy)
        if check_reduction:
            warnings.warn("check_reduction is deprecated and has no effect.", FutureWarning, stacklevel=3)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            process_group = group_of_mesh(device_mesh, process_group)
        self.process_group = process_group if process_group is not None else _default_group()
        check_numbers(self.process_group)
        local_parts = LocalParts(module, self.process_group)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._parameters_to_reduce = collect_parameters(module, self.parameters_to_ignore)
        self._delayed = Delayed.from_arguments(
            delay_all_reduce_named_params, param_to_hook_all_reduce, self._parameters_to_reduce
        )
        self._config = Config.from_arguments(
            self._parameters_to_reduce.tensors[0].device.type,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            init_sync=init_sync,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            plan_given=buckets is not None,
            some_delayed=self._delayed is not None,
            main_grads=main_grads,
            is_mixed_precision=mixed_precision is not None,
            has_hierarchy=hierarchy is not None,
            wire_memory=wire_memory,
            lends_wires=lazy_bucket_allocation,
        )
        main_gradients = MainGradients.of_config(self._config)
        main_gradients.check(self._parameters_to_reduce)
        self._pinned_plan = PinnedPlan.of(
            buckets,
            self._parameters_to_reduce.names,
            main_gradients.like(self._parameters_to_reduce.tensors),
            self._parameters_to_reduce.sparse,
        )
        if self._pinned_plan.caps:
            self._config = dataclasses.replace(self._config, bucket_caps=self._pinned_plan.caps)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self._set_torch_attributes(module, dim, batched_grad_copy, lazy_bucket_allocation)
        self.bucket_bytes_cap_list = list(self._config.bucket_caps) if bucket_cap_mb_list is not None else []
        self.bucket_bytes_cap_default = bucket_cap_mb is None and bucket_cap_mb_list is None and buckets is None
        self._set_devices(device_ids, output_device)
        self._hierarchy = hierarchy
        self._synchronise_replicas()
        self.mixed_precision = mixed_precision
        self._low_precision = (
            None if mixed_precision is None else LowPrecision(mixed_precision, module, self.parameters_to_ignore)
        )
        steps = [self._low_precision.copy_of] if self._low_precision else []
        steps += [local_parts.as_dtensor] if local_parts else []
        self._stand_ins = StandIns(steps) if steps else None
        self._buffer_sync = BufferSync()
        self._gradient_average = gradient_average
        self._watch = watch
        self._comm_hook: tuple[object, Callable[..., Any]] | None = None
        self._build_reducer()
        check_before_each_step(self)
        if self._low_precision is not None:
            self._low_precision.cast_buffers(self.modules_buffers)  # nothing can be refused any more

    # ------------------------------------------------------------------------------------------------- construction

    def _set_torch_attributes(
        self, module: nn.Module, dim: int, batched_grad_copy: bool, lazy_bucket_allocation: bool
    ) -> None:
        """Set the attributes that frameworks, and torch's inherited methods, read."""
        self.module = module
        self.dim = dim
        self.forward_sync_buffers = self._config.forward_sync_buffers
        self.gradient_as_bucket_view = self._config.gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.broadcast_bucket_size = PIECE_BYTES
        self.bucket_bytes_cap = max(self._config.bucket_caps)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self.use_side_stream_for_tensor_copies = True
        self._use_python_reducer = False

    def _set_devices(
        self, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
    ) -> None:
        """Set ``device``, ``device_ids`` and what follows from them; raise for combinations that make no sense."""
        parameters = self._parameters_to_reduce.tensors
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in parameters}) > 1
        self.device_ids = self.output_device = None
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids can be None or hold one device, got {device_ids}.")
        if not device_ids and not output_device:  # 0 counts as None, as for torch's DDP
            return
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            raise ValueError(
                "device_ids and output_device are for modules on one accelerator device, but got "
                f"device_ids={device_ids}, output_device={output_device} and parameters on "
                f"{sorted({str(parameter.device) for parameter in parameters})}. Leave both None."
            )
        self.device_ids = [_get_device_index(device_ids[0], True)]
        self.output_device = _get_device_index(device_ids[0] if output_device is None else output_device, True)

    def _synchronise_replicas(self) -> None:
        tensors: list[tuple[str, Tensor]] = []
        number, is_agreed = next_number(self.process_group), False
        if self._config.init_sync:
            tensors = replicated_tensors(self.module, self.parameters_to_ignore, self._config.init_sync_buffers)
        if tensors or self._pinned_plan.rows or self._hierarchy is not None:
            hierarchy = describe_hierarchy(self._hierarchy)
            number = verify_replicas(
                tensors, self.process_group, self.device, self._pinned_plan.rows, hierarchy, number=number
            )
            is_agreed = True
        give_number(self, number, is_agreed)
        self._pinned_plan.check()
        check_dense(tensors)
        broadcast_replicas([tensor.detach() for _, tensor in tensors], self.process_group)

    def _build_reducer(self) -> None:
        parameters = self._parameters_to_reduce.tensors
        names = self._parameters_to_reduce.names
        self._main_gradients = MainGradients.of_config(self._config)
        self._main_gradients.let_grad_differ(parameters)
        self._gradients_like = self._main_gradients.like(parameters)
        plan = self._plan()
        self.reducer = Reducer(
            parameters,
            names,
            plan,
            self.process_group,
            self._config.gradient_as_bucket_view,
            self._config.expect,
            self._parameters_to_reduce.sparse,
            self._main_gradients.dtype,
            self._main_gradients.are_apart,
            lends_wires=self.lazy_bucket_allocation,
        )
        memory = wire_memory_of(self._config.wire_memory)
        if memory is not None:
            self.reducer.use_memory(memory)
        if self._main_gradients.are_apart:
            for parameter, gradient in zip(parameters, self.reducer.main_gradients(), strict=True):
                parameter.main_grad = gradient  # type: ignore[attr-defined]  # Megatron's name
        self.reducer.belongs_to(self)
        watches = self._watch.corruption is not None
        self.reducer.watch_local_gradients(watches)
        self._parameter_watch = ParameterWatch(self.module, self.parameters_to_ignore, names, parameters, self.reducer)
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules()):
            self.reducer.share_order()
        self.logger = Logger(self)
        average = self._gradient_average
        self._weight = Weight(1.0 if isinstance(average, str) else average, self.device)
        self._set_average()
        self.reducer.is_model(number_of(self).agreed)
        watch_for_waiting(self)
        self._stall_watch = watch_for_stalls(self, self._watch)
        self._has_rebuilt_buckets = False
        self._planner = Planner() if self._config.plans_buckets else None
        hierarchy = find_hierarchy(self._hierarchy, self.process_group, self.device)
        sum_audit = self._begin_audit()
        self._setting = Setting(
            self.process_group,
            names,
            self._gradients_like,
            plan,
            sum_audit=sum_audit if hierarchy is None else None,  # it knows of one sum a bucket
            measures_gradients=watches,
            hierarchy=hierarchy,
            zero_cta=self._config.wire_memory == "symmetric",
        )
        all_reduce = AllReduce(wire=self._low_precision.wire if self._low_precision else None)
        self._use((lambda window: all_reduce) if self._comm_hook is None else self._schedule_of(*self._comm_hook))
        self._assign_modules_buffers()

    def _begin_audit(self) -> SumAudit | None:
        """Look on from the first window on, if that is wanted; what there was to look at before stays."""
        if self._watch.audit_every is None:
            return None
        if self._audit is not None:
            tensors = self._audit.tensors
        else:
            tensors = AuditedTensors(replicated_tensors(self.module, self.parameters_to_ignore, with_buffers=False))
        self._audit = Audit(self._watch.audit_every, self._watch.corruption, tensors, self.process_group, self.device)
        return SumAudit()

    def _set_average(self) -> None:
        """Say what gradients count as long as no weights have been added up."""
        is_sum = isinstance(self._gradient_average, str) and self._gradient_average == "sum"
        self.reducer.set_average(Average.sum if is_sum else Average.mean)

    def _adds_up_weights(self) -> bool:
        """Whether ranks agree in each window on what their gradients count."""
        return not isinstance(self._gradient_average, str) or self._divides_by_ranks_with_inputs()

    def _check_none_missing(self) -> None:
        if self.reducer.state == "partial":
            window = Window(self, self.reducer.windows())
            message = give_up(window, self.reducer, self._setting.names, self._setting.plan)
            self.logger.set_error_and_log(message)
            raise RuntimeError(message)

    def _look_for_corruption(self) -> None:
        if self._watch.corruption is not None:
            look(self)

    def _schedule_of(self, state: object, hook: Callable[..., Any]) -> Schedule:
        this = weakref.ref(self)  # a state may outlive the model
        self._of_model = OfModel(lambda: this().reducer, lambda: this()._setting)  # type: ignore[union-attr]
        return comm_hooks.schedule(state, hook, self._of_model)

    def __del__(self) -> None:
        """Let a hook's state know the last of the model."""
        of_model = self.__dict__.get("_of_model")
        if of_model is not None and not sys.is_finalizing():
            of_model.end(self.reducer.windows(), self._setting)

    def _use(self, schedule: Schedule) -> None:
        for exchange in getattr(schedule, "may_use", ()):  # later, too
            check_exchange(self._gradient_average, exchange)
        self._install(schedule(self.reducer.windows()))
        self._schedule = schedule

    def _choose_exchange(self) -> None:
        """Make the exchange the one that the schedule has for the next window."""
        exchange = self._schedule(self.reducer.windows())
        if exchange != self._exchange:
            self._install(exchange)

    def _install(self, exchange: Exchange) -> None:
        check_exchange(self._gradient_average, exchange)
        check_wire(exchange, self._setting)
        self.reducer.set_exchange(in_levels(exchange, self._setting).make(self._setting))
        self._exchange = exchange

    def _plan(self, order: Sequence[int] | None = None) -> Buckets:
        if self._pinned_plan.buckets is not None:
            return self._pinned_plan.buckets
        plan = plan_buckets if self._delayed is None else self._delayed.plan
        if order is None:
            sparse = self._parameters_to_reduce.sparse
            order = [i for i in reversed(range(len(self._parameters_to_reduce.tensors))) if i not in sparse]
        return plan(self._gradients_like, self._config.bucket_caps, order)

    def _assign_modules_buffers(self) -> None:
        # Anew before each use: user code may replace buffers.
        self.named_module_buffers = named_buffers(self.module, self.parameters_to_ignore)
        self.modules_buffers = list(self.named_module_buffers.values())

    # -------------------------------------------------------------------------------------------------------- a step

    # torch.compile steps over these methods, and compiles the module.

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; outside ``no_sync``, its next backward synchronises gradients."""
        with Range("DistributedDataParallel.forward"):  # torch's name for it
            try:
                inputs, kwargs = self._pre_forward(*inputs, **kwargs)
                return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
            except Exception as error:
                self.logger.forward_raised(error)
                raise

    @torch._disable_dynamo(recursive=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            if self._stand_ins is None:
                return self.module(*inputs, **kwargs)
            return self._stand_ins.run(self.module, inputs, kwargs)

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        grad_enabled = torch.is_grad_enabled()
        synchronises = grad_enabled and self.require_backward_grad_sync
        if synchronises:
            _check_group(self.process_group)
            refuse_distributed_autograd()
            self._check_parameters()
        if grad_enabled:
            self._check_none_missing()
            self._look_for_corruption()
            self.logger.forward_begins(self.reducer)
        self.reducer.begin_forward(grad_enabled)
        delete_reports(self)
        joining.begin_forward(self, synchronises)
        self._begin_step(synchronises, grad_enabled)
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        return (inputs, kwargs) if self._low_precision is None else self._low_precision.cast((inputs, kwargs))

    def _check_parameters(self) -> None:
        if self._stand_ins is not None:
            self._stand_ins.put_parameters_back()
        if torch._C._current_graph_task_id() == -1:  # in a backward, stand-ins may be in their places
            self._parameter_watch.check()

    def _begin_step(self, synchronises: bool, grad_enabled: bool, is_shadow: bool = False) -> None:
        """All that ranks do together before a forward; ``is_shadow``: this rank has no inputs (torch's Join)."""
        if grad_enabled and not self._has_rebuilt_buckets:
            take_over_optimizers(self.reducer, self._parameters_to_reduce.tensors, self._main_gradients.are_apart)
            self._rebuild_buckets()
        if grad_enabled and self._planner is not None and self._planner.is_due(self.reducer):
            self._plan_buckets(self._planner)
        if synchronises:
            self._agree_on_window(is_shadow)
        self._buffer_sync.wait()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers(is_shadow)
        if grad_enabled and self._slow_ranks is not None:
            self.reducer.begin_module()

    def _agree_on_window(self, is_shadow: bool = False) -> None:
        """How its gradients travel, and, while forward runs, what they count."""
        self._choose_exchange()
        if self._audit is not None:
            self._audit.begin_window(self.reducer, self._exchange, self._setting, counts=not is_shadow)
        if self._slow_ranks is not None:
            self._slow_ranks.begin_window(self.reducer)
        if self._adds_up_weights():
            self._weight.send(self._exchange.group(self._setting), counts=not is_shadow)

    def _arm(self, output: Any) -> None:
        """Let the backward that comes from ``output`` synchronise gradients."""
        if self._adds_up_weights():
            self.reducer.set_average(Average.share, self._weight.share())
        self.reducer.arm(tensors_in(output))

    @torch._disable_dynamo
    def _inside_ddp_forward(self) -> ActiveModel:  # type: ignore[override]
        return ActiveModel(self, self._config.bucket_caps[0])

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self._buffer_sync.follow(output)
        self.reducer.end_forward()
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronises:
            self.logger.forward_ends(self.reducer)
            self._arm(output)
        # After a forward that began no synchronisation, the next one finds buffers as it left them.
        self.require_forward_param_sync = synchronises
        return output

    def _rebuild_buckets(self) -> None:
        """After the first window: replan in the order in which gradients came, rank 0's order for all."""
        is_static = self._config.expect == Expect.as_first
        if self.reducer.windows() == 0 or (is_static and not self.reducer.knows_usage()):
            return
        planned = dict.fromkeys(index for bucket in self._plan() for index in bucket)
        arrived = dict.fromkeys(index for index in self.reducer.arrival_order() if index in planned)
        check_same_model(number_of(self).agreed, self.process_group, self.device)
        order = agree_on_order([*(arrived | planned)], [*planned], self.process_group, self.device)
        if is_static:
            used = set(self.reducer.used_parameters())
            order = [index for index in order if index in used] or order
            self.reducer.fix_usage()
        plan = self._plan(order)
        parameters = self._parameters_to_reduce.tensors
        bucket_bytes = [sum(self._gradients_like[index].nbytes for index in bucket) for bucket in plan]
        # Training that zeroes gradients in place leaves them in their buckets: then nothing but the division would
        # need a kernel.
        keeps_gradients = all(self._main_gradients.gradient_of(parameters[index]) is not None for index in order)
        on_device = self.device_type != "cpu"
        keep_everywhere = on_device and agree_on(keeps_gradients, self.process_group, self.device)
        divide = keep_everywhere and divides_first(self.process_group, self.device)
        self._setting = dataclasses.replace(self._setting, divide_in_collective=divide)
        self._use_plan(plan, lanes_pay(bucket_bytes))
        self._has_rebuilt_buckets = True
        if self._planner is not None:
            self._planner.begin(self.reducer)

    def _plan_buckets(self, planner: Planner) -> None:
        """After the windows that were measured: the buckets that are best by what they show."""
        assert isinstance(self._exchange, AllReduce)  # or register_comm_hook had refused
        found = planner.find(self.reducer, self._setting, self._exchange, self.device)
        if found is not None:
            self._use_plan(found.plan, found.several_lanes, lanes_were_measured=True)
        planner.begin(self.reducer)

    def _use_plan(self, plan: Buckets, several_lanes: bool, lanes_were_measured: bool = False) -> None:
        if plan != self._setting.plan:
            self.reducer.set_plan(plan)
        self._setting = dataclasses.replace(
            self._setting, plan=plan, several_lanes=several_lanes, lanes_were_measured=lanes_were_measured
        )
        self._install(self._exchange)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self.modules_buffers) > 0

    def _sync_buffers(self, is_shadow: bool = False) -> None:
        self._assign_modules_buffers()
        self._sync_module_buffers(joining.source_of_buffers(self, is_shadow))

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if hasattr(self, "buffer_hook"):  # as torch's checks ask
            self._buffer_sync.call(self.buffer_hook, self.named_module_buffers)
        else:
            check_dense(self.named_module_buffers.items())
            with telling_who_has_ended(self):
                self._buffer_sync.broadcast(self.modules_buffers, self.process_group, authoritative_rank)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, forward and backward add up gradients on each rank.

        The next backward whose forward ran outside the context synchronises the sum.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`torch.nn.Module.zero_grad`; gradients in ``main_grad`` are set to zero, in place, in any case."""
        super().zero_grad(set_to_none)
        self._main_gradients.set_zero(self._parameters_to_reduce.tensors)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` exchange the gradients of each bucket, in place of the averaging allreduce.

        Args:
            state: handed to each call of the hook.
            hook: ``hook(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]``. The
                bucket's buffer holds gradients that are not divided by the number of ranks; the future's tensor,
                laid out like the buffer, becomes the gradients. Hooks written for torch's DDP run unchanged. On the CPU
                the hook of a bucket is called when that of the bucket before has done its work. Hooks of
                :mod:`fastddp.comm_hooks`, and torch's own stateless ones, are not called but run natively.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: its annotations name other types; or buckets are planned (``bucket_cap_mb="auto"``) and it is
                not the mean by one allreduce a bucket; or there is a ``hierarchy`` and it is written in Python, names
                another process group or is ``post_localSGD_hook``.
            RuntimeError: there is a hook already, or gradients are being synchronised.
        """
        comm_hooks.check_hook(hook)
        if self._planner is not None:
            check_planned_hook(hook)
        if self._hierarchy is not None:
            comm_hooks.check_hook_between_nodes(hook)
        if self._comm_hook is not None:
            raise RuntimeError(
                "A communication hook is already registered; build a new DistributedDataParallel to use another one."
            )
        self._use(self._schedule_of(state, hook))
        self._comm_hook = (state, hook)

    def bucket_plan(self) -> BucketPlan:
        """Which parameters share a bucket, now: errors that speak of "bucket 3" mean number 3 of this plan.

        The plan changes once, when buckets are rebuilt at the second step's forward, unless one was given; with
        ``bucket_cap_mb="auto"`` twice more, at the fifth's and the eighth's.
        """
        return BucketPlan.of(self._setting.plan, self._setting.names, self._setting.parameters)

    def compression_plan(self) -> CompressionPlan | None:
        """What ``comm_hooks.auto_hook`` has decided about each bucket, and why. Not in torch.

        It decides once, at the ninth step's forward behind the hook's registration, and looks once whether that was
        right, seven steps later.

        Returns:
            None without that hook, or as long as it measures.
        """
        return self._schedule.plan if isinstance(self._schedule, AutoSchedule) else None

    def sample_steps(self, every: int, *, compare_ranks: bool = False) -> None:
        """Take the times of each ``every``-th step, for :meth:`step_report`; 0, as at first: of none. Not in torch.

        The next step is the first one.

        Args:
            every: how many steps there are from one sample to the next.
            compare_ranks: gather what each rank took without its waits, in an all-gather of 72 bytes a rank in each
                ``every``-th step, and let rank 0 write to the logger "fastddp" who is slow
                (:mod:`fastddp.rank_times`). Then this is to be called with the same on every rank, between the same
                two steps. One rank has nothing to compare.

        Raises:
            ValueError: ``every`` is no integer >= 0.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"sample_steps(every={every!r}): every is a number of steps, or 0 for none.")
        next_window = self.reducer.windows() + (self.reducer.state not in ("idle", "finished"))
        self.logger.others_sample = True
        self.reducer.sample_every(every, next_window)
        self._slow_ranks = None
        if compare_ranks and every > 0 and self.process_group.size() > 1:
            self._slow_ranks = SlowRanks(every, next_window, self.process_group, self.device)

    def step_report(self) -> StepReport | None:
        """Where the time of the last sampled step went. On a device with streams the host waits for that step's end.

        A step begins with the first forward that may be followed by a backward: one whose backward never comes counts
        into the step after it. Of several backwards over one forward it has the first.

        Returns:
            None as long as there is none: :meth:`sample_steps` asks for them, a step is complete when the next one
            begins, and one that began before buckets were rebuilt does not count.
        """
        sampled = self.reducer.sampled() if self.logger.others_sample else None
        if sampled is None:
            return None
        history = None if self._slow_ranks is None else self._slow_ranks.history
        return StepReport.of(sampled.times(), self._setting.bucket_ends, history, self.process_group.rank())

    def audit(self, optimizer: Optimizer | None = None, *, buffers: Iterable[str] = ()) -> None:
        """Let the audit (``Watch(audit_every=...)``) compare more than parameters, from the next step on. Not in torch.

        To be called with the same on every rank, in the same step. What is not a plain tensor with strides (numbers,
        sparse tensors, tensor subclasses) is not compared.

        Args:
            optimizer: its state of this model's parameters, where all ranks have the same.
            buffers: names of buffers that are the same on every rank when a forward begins. Those of a BatchNorm are
                not, unless rank 0's were broadcast after the last one.

        Raises:
            RuntimeError: the model was made without an audit.
            TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
            ValueError: it is a ``ZeroRedundancyOptimizer``, which has a part of the state on each rank, or has none of
                the model's parameters; or there is no buffer of that name.
        """
        if self._audit is None:
            raise RuntimeError(
                "audit() adds to what an audit compares: wrap the module with watch=fastddp.Watch(audit_every=N)."
            )
        if optimizer is not None:
            self._audit.tensors.add_optimizer(optimizer)
        self._audit.tensors.add_buffers(self.module, buffers)
        self._audit.plan_again()

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Write what ``bucket_cap_mb="auto"`` has measured to a file, for ``fastddp plan``; the same on all ranks.

        Raises:
            RuntimeError: nothing has been measured, or not yet.
        """
        if self._planner is None or self._planner.profile is None:
            raise RuntimeError(
                'There is no profile. One is made with bucket_cap_mb="auto", at the fifth step\'s forward.'
            )
        self._planner.profile.save(path)

    def last_grad_norm(self) -> Tensor:
        """The 2-norm of all synchronised gradients, as the last backward left them, without a wait for the device.

        Where unpack has written the gradients it was computed on the way; else one pass over the buckets computes it
        now, so call it before the gradients are changed.

        Returns:
            A 0-dimensional tensor on the device of the first bucket, fp32 (fp64 if a parameter is);
            :func:`torch.nn.utils.get_total_norm` of the gradients, to rounding.

        Raises:
            RuntimeError: no synchronisation has ended since the last forward; call it before the next one.
        """
        parameters = self._parameters_to_reduce.tensors
        is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)
        return measured(self.reducer)[0].sqrt().to(torch.float64 if is_double else torch.float32)

    def found_inf(self) -> Tensor:
        """Whether a synchronised gradient holds an infinity or NaN: 1.0 or 0.0, like ``GradScaler``'s tensor.

        Who asks skips the step where it is 1.0: then this is :meth:`discard_step` too.

        Returns and raises as :meth:`last_grad_norm`; fp32.
        """
        found = (measured(self.reducer)[1] > 0).to(torch.float32)
        self.reducer.discard_step(only_if=found)
        return found

    def discard_step(self) -> None:
        """Say that no optimizer steps with the gradients that there are, since they are too large, say.

        What compression has left out of them is forgotten: it would go into the next step. Call it on all ranks, after
        backward; gradients stay as they are. A step that a ``GradScaler`` skips is noticed without it.

        Raises:
            RuntimeError: gradients travel just now.
        """
        self.reducer.discard_step()

    def find_non_finite_module(self) -> None:
        """Look, in the next forward of this rank, for the first module whose output is not finite.

        What is found goes where ``Watch.corruption`` says, else to the logger "fastddp": the module's name, the rank,
        and the least and the greatest number of its input. That forward waits for the device behind each module.
        """
        find_in_next_forward(self)

    def blame_non_finite(self) -> NonFinite | None:
        """Who brought what is not finite in the gradients of the last backward: rank, parameter, how many elements.

        All ranks that average with each other have to call this, since it makes one small all-gather; the host waits
        for the device. It may be asked behind a replay of a captured graph, too. A wrapper with
        ``Watch(corruption=...)`` asks by itself where a rank had such gradients: at the next optimizer step or the next
        forward.

        Returns:
            None where all gradients are finite; the same on all ranks that share gradients. Under ``noop_hook`` each
            rank keeps its own, and all ranks are asked.

        Raises:
            RuntimeError: the wrapper has no ``Watch(corruption=...)``, so that nothing was measured; or no
                synchronisation has ended since the last forward.
        """
        return blame(self)

    # ----------------------------------------------------------------------------------------------------- pickling

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "Only a DistributedDataParallel over the default process group can be pickled or copied, since that is "
                "the group it is restored with. Save model.module or state_dict() instead."
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "logger", "_setting", "_schedule", "_exchange", "_weight", "_planner"):
            del state[name]
        del state["_parameter_watch"], state["_stall_watch"], state["_main_gradients"], state["_gradients_like"]
        for name in ("_audit", "_slow_ranks", "_of_model"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_parameters_to_reduce" not in state:
            raise RuntimeError(
                "This pickle holds a wrapper of torch's DistributedDataParallel, and fastddp's class, which "
                "fastddp.patch() has put in its place, cannot become one. Load it where nothing is patched, and save "
                "its state_dict(), which either class loads, or its .module, which either class wraps."
            )
        self.process_group = _default_group()
        nn.Module.__setstate__(self, state)
        give_number_of_a_copy(self)
        self._build_reducer()
        check_before_each_step(self)
        if self._low_precision is not None:
            self._low_precision.cast_buffers(self.modules_buffers)  # nothing can be refused any more


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "The default process group has not been initialised. Call torch.distributed.init_process_group() before "
            "wrapping a module, and start the script with torchrun."
        )
    return dist.distributed_c10d._get_default_group()


def _check_group(process_group: dist.ProcessGroup) -> None:
    try:
        dist.get_backend(process_group)  # one look-up, while the list of its ranks is as long as the group is large
    except (ValueError, RuntimeError):
        raise RuntimeError(
            "The process group of this DistributedDataParallel has been destroyed. Wrap the module again after "
            "init_process_group(), or call model.module for inference without other ranks."
        ) from None
