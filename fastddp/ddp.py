"""``fastddp.DistributedDataParallel``: torch's class, with another engine."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from fastddp import comm_hooks
from fastddp._C import Range
from fastddp.additions import Additions
from fastddp.config import Config, check_types
from fastddp.engine import Carried, Recipe
from fastddp.errors import see
from fastddp.module.backward import is_inside_backward
from fastddp.module.buffers import BufferSync
from fastddp.module.main_gradients import MainGradients
from fastddp.module.meshes import LocalParts, group_of_mesh, keeps_refused_module
from fastddp.module.mixed_precision import LowPrecision
from fastddp.module.numbering import ModelNumber, next_number, number_of_a_copy, take_number
from fastddp.module.parameters import collect_parameters, named_buffers, replicated_tensors
from fastddp.module.replicas import PIECE_BYTES, broadcast_replicas, check_dense, verify_replicas
from fastddp.module.stand_ins import StandIns
from fastddp.planning.bucket_plan import BucketPlan
from fastddp.planning.delayed import Delayed
from fastddp.planning.pinned_plan import PinnedPlan
from fastddp.planning.planner import check_planned_hook
from fastddp.ranks.backends import check_group, check_numbers, default_group
from fastddp.ranks.generations import this_process
from fastddp.ranks.hierarchy import HierarchyArgument, check_hierarchy
from fastddp.ranks.wire_memory import WireMemory
from fastddp.regrouping import options_of
from fastddp.torch_compat.compiling import ActiveModel, CompiledGraphs, call, leave_alone
from fastddp.torch_compat.job_options import hook_in_force, with_job_options
from fastddp.torch_compat.optimizer_in_backward import take_over_optimizers
from fastddp.torch_compat.refusals import check_beside_torchs, check_not_replicated, refuse_distributed_autograd
from fastddp.watch import presence
from fastddp.watch.options import Watch, check_watch
from fastddp.watch.stalls import begin_to_watch
from fastddp.window import joining
from fastddp.window.gradient_average import GradientAverage, check_gradient_average


class DistributedDataParallel(Additions):
    """Data parallelism over the ranks of a process group, with the interface of torch's DDP.

    A subclass of :class:`torch.nn.parallel.DistributedDataParallel`, so ``isinstance`` checks for torch's class hold.
    Arguments have torch's names, defaults and meanings; "auto" and those after ``lazy_bucket_allocation`` are not in
    torch. Attributes that are not described here (``module``, ``process_group``, ...) have torch's meanings, too.

    Args:
        module: the module to train; the same on every rank.
        device_ids: None, or the one accelerator device that ``module`` and its inputs live on.
        output_device: None, or a device; accepted with ``device_ids`` as torch does.
        dim: the batch dimension, for the inherited ``scatter`` and ``gather``.
        broadcast_buffers: the older form of ``forward_sync_buffers``; False also leaves buffers out of ``init_sync``.
        init_sync: verify the parameters across ranks and broadcast rank 0's parameters and buffers at construction.
        process_group: the ranks to average over; None: the default group.
        bucket_cap_mb: MiB of gradients in a bucket. None: 25; on accelerators 1 for the first bucket; on the CPU 6 with
            a ``hierarchy``. "auto": the first four steps run with the default and are measured. The plan that leaves
            the least communication after backward replaces it. Steps under that plan are measured too, and from the
            eighth step on a second plan is used. Where no bandwidth can be measured, the default stays, with a warning.
        find_unused_parameters: parameters may get no gradient in a step, on some ranks or on all. A parameter that no
            rank used keeps its gradient as it was.
        check_reduction: deprecated in torch; ignored, with a warning.
        gradient_as_bucket_view: make ``parameter.grad`` a view of its bucket, which saves memory and the unpack kernel.
        static_graph: every step uses the same parameters as the first, each as often. This allows unused parameters,
            and a parameter inside several reentrant checkpoints.
        delay_all_reduce_named_params: (name, parameter) pairs of ``module``. Their gradients travel together, after the
            gradient of ``param_to_hook_all_reduce`` has come.
        param_to_hook_all_reduce: a parameter of ``module``.
        mixed_precision: a ``torch.nn.parallel.distributed._MixedPrecision``: ``module`` runs with parameters and inputs
            of ``param_dtype``, and gradients travel in ``reduce_dtype``. Parameters, their gradients and the optimizer
            keep their dtypes. A communication hook gets gradients in the parameters' dtype and decides what travels.
        device_mesh: a mesh of one dimension, in place of ``process_group``. It may be a slice of a larger mesh. If
            torch's ``parallelize_module`` has spread ``module`` over another slice, each rank trains its own parts of
            the parameters.
        skip_all_reduce_unused_params: with ``find_unused_parameters``: a parameter that no rank used in the first step
            counts as unused for good, and its gradient does not travel.
        bucket_cap_mb_list: MiB of the first, second, ... bucket; the last number holds for all further buckets.
        batched_grad_copy: accepted and ignored: fastddp always packs a bucket with one kernel.
        forward_sync_buffers: begin each forward with rank 0's buffers; None: True.
        lazy_bucket_allocation: give the memory of the wires back to the allocator after each backward. This works where
            a hook of fastddp's sends 16 bits, 8 bits or PowerSGD's factors. Otherwise gradients live in the wires,
            which stay. With a ``ShardedOptimizer`` every wire is given back, so that a rank keeps its own part of the
            gradients alone; on the CPU as soon as a bucket is averaged. Wires between nodes (``hierarchy``) stay, and
            so do all once a step is captured as a graph.
        buckets: a plan that another model's :meth:`bucket_plan` returned, or the file it was saved to. The model uses
            these buckets, and does not rebuild them after the first step.
        gradient_average: "mean" or "sum" over ranks; or this rank's weight w, which makes gradients sum(w g) / sum(w)
            over ranks (for example where g is of a mean over w tokens). A weight is a tensor of one element, or a
            callable that returns a number. It is read when a forward that asks for synchronisation begins.
        watch: which faults of training to look for, and whom to tell.
        main_grads: fp16 and bf16 parameters get fp32 gradients: microbatches and ranks are added up in fp32, in the
            buckets' memory. "grad": in ``parameter.grad``; needs a torch with ``Tensor.grad_dtype``. "main_grad": in
            ``parameter.main_grad``, which Megatron's and Apex' optimizers read. None: in their parameter's dtype.
        hierarchy: exchange gradients in two levels: the ranks of a node add up theirs without compression, and only
            these sums travel as the communication hook says. "node": torchrun says which ranks share a node, or else
            each machine is one. Or a mesh of two dimensions (nodes, ranks of a node) of the ranks to average over. With
            one node, or one rank on each, there is one level.
        wire_memory: memory for wires over NCCL. "registered": memory that NCCL has registered; a warning where it has
            none. "symmetric": windows that all GPUs of an NVLink domain see, or an error; over a communicator of the
            model's own, where all-gathers and all-to-alls (8 bits) take no multiprocessors, by NCCL's zero-CTA policy,
            and allreduces do. Neither goes with ``gradient_as_bucket_view``, "main_grad", ``lazy_bucket_allocation``
            or ``hierarchy``. None: ordinary memory, unless torch's ``DDP_DISABLE_COMM_MEM`` is 0: registered memory.

    Raises:
        RuntimeError: no parameter requires a gradient; a parameter is uninitialised or on the meta device;
            ``device_mesh`` has several dimensions or comes with ``process_group``; a buffer to broadcast is sparse; a
            parameter has a gradient of another dtype than ``main_grads`` wants; or, on every rank, the ranks hold
            different models or were given different plans.
        TypeError: an argument is of another type.
        ValueError: parameters on several types of device; arguments that contradict each other; a ``SyncBatchNorm`` on
            the CPU; a plan that does not fit the module, or a file without a plan; ``main_grads`` for sparse gradients,
            or "grad" under a torch without ``Tensor.grad_dtype``.
    """

    @keeps_refused_module
    @with_job_options
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
            warnings.warn("check_reduction is deprecated and has no effect.", FutureWarning, stacklevel=4)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            process_group = group_of_mesh(device_mesh, process_group)
        self.process_group = process_group if process_group is not None else default_group()
        check_numbers(self.process_group)
        begin_to_watch(self.process_group)
        local_parts = LocalParts(module, self.process_group)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = collect_parameters(module, self.parameters_to_ignore)
        if not self._is_alone:
            check_not_replicated(module)
        for child in module.modules():
            check_beside_torchs(child, parameters.tensors)
        delayed = Delayed.from_arguments(delay_all_reduce_named_params, param_to_hook_all_reduce, parameters)
        config = Config.from_arguments(
            parameters.tensors[0].device.type,
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
            some_delayed=delayed is not None,
            main_grads=main_grads,
            is_mixed_precision=mixed_precision is not None,
            has_hierarchy=hierarchy is not None,
            wire_memory=wire_memory,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )
        main_gradients = MainGradients.of_config(config)
        main_gradients.check(parameters)
        like = main_gradients.like(parameters.tensors)
        pinned_plan = PinnedPlan.of(buckets, parameters.names, like, parameters.sparse)
        if pinned_plan.caps:
            config = dataclasses.replace(config, bucket_caps=pinned_plan.caps)
        ignored = self.parameters_to_ignore
        self._recipe = Recipe(
            module, ignored, parameters, config, watch, gradient_average, hierarchy, pinned_plan, delayed
        )
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self._set_torch_attributes(module, dim, batched_grad_copy)
        self.bucket_bytes_cap_list = list(config.bucket_caps) if bucket_cap_mb_list is not None else []
        self.bucket_bytes_cap_default = bucket_cap_mb is None and bucket_cap_mb_list is None and buckets is None
        self._set_devices(device_ids, output_device)
        self._number = self._synchronise_replicas()
        self.mixed_precision = mixed_precision
        self._low_precision: LowPrecision | None = None
        steps = [local_parts.as_dtensor] if local_parts else []
        if mixed_precision is not None:
            self._low_precision = LowPrecision(mixed_precision, module, self.parameters_to_ignore)
            self._recipe = dataclasses.replace(self._recipe, wire=self._low_precision.wire)
            steps.insert(0, self._low_precision.copy_of)
        self._stand_ins = StandIns(steps) if steps else None
        self._graphs = CompiledGraphs(parameters.tensors, parameters.names, have_stand_ins=bool(steps))
        self._buffer_sync = BufferSync()
        self._comm_hook: tuple[object, Callable[..., Any]] | None = None
        self._hook_may_change = False
        self._make_engine()
        hook = hook_in_force()
        if hook is not None:
            self.register_comm_hook(*hook)
            self._hook_may_change = True
        self._assign_modules_buffers()
        if self._low_precision is not None:
            self._low_precision.cast_buffers(self.modules_buffers)  # last: construction can no longer fail
        presence.tell(self.engine.now, watch, hook and hook[1])

    # ------------------------------------------------------------------------------------------------- construction

    def _make_engine(self, carried: Carried | None = None) -> None:
        cls = DistributedDataParallel
        leave_alone(cls.forward, cls._run_ddp_forward, cls._callee)
        super()._make_engine(carried)

    def _set_torch_attributes(self, module: nn.Module, dim: int, batched_grad_copy: bool) -> None:
        """Set the attributes that frameworks and torch's inherited methods read."""
        self.module = module
        self.dim = dim
        self.forward_sync_buffers = self._recipe.config.forward_sync_buffers
        self.gradient_as_bucket_view = self._recipe.config.gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = self._recipe.config.lazy_bucket_allocation
        self.broadcast_bucket_size = PIECE_BYTES
        self.bucket_bytes_cap = max(self._recipe.config.bucket_caps)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self.use_side_stream_for_tensor_copies = True
        self._use_python_reducer = False

    def _set_devices(
        self, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
    ) -> None:
        """Set ``device``, ``device_ids`` and related attributes; raise for combinations that make no sense."""
        parameters = self._recipe.parameters.tensors
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in parameters}) > 1
        self.device_ids = self.output_device = None
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids can be None or hold one device, got {device_ids}." + see("FD022"))
        if not device_ids and not output_device:  # 0 counts as None, as for torch's DDP
            return
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            raise ValueError(
                "device_ids and output_device are for modules on one accelerator device, but got "
                f"device_ids={device_ids}, output_device={output_device} and parameters on "
                f"{sorted({str(parameter.device) for parameter in parameters})}. Leave both None." + see("FD022")
            )
        self.device_ids = [_get_device_index(device_ids[0], True)]
        self.output_device = _get_device_index(device_ids[0] if output_device is None else output_device, True)

    def _synchronise_replicas(self) -> ModelNumber:
        """Compare the ranks' models, number this model, and broadcast rank 0's values."""
        recipe = self._recipe
        tensors: list[tuple[str, Tensor]] = []
        number, is_agreed, members = next_number(self.process_group), False, []
        if recipe.config.init_sync:
            tensors = replicated_tensors(self.module, self.parameters_to_ignore, recipe.config.init_sync_buffers)
        if tensors or recipe.pinned_plan.rows or recipe.hierarchy is not None:
            numbers = [number, this_process()]
            told = verify_replicas(
                tensors, self.process_group, self.device, recipe.pinned_plan.rows, options_of(recipe), numbers
            )
            number, is_agreed, members = max(row[0] for row in told), True, [row[1] for row in told]
        taken = take_number(self.process_group, number, is_agreed, members=tuple(members))
        if recipe.pinned_plan.problem is not None:
            raise recipe.pinned_plan.problem
        check_dense(tensors)
        broadcast_replicas([tensor.detach() for _, tensor in tensors], self.process_group)
        return taken

    def _assign_modules_buffers(self) -> None:
        # Called before each use, because user code may replace buffers.
        self.named_module_buffers = named_buffers(self.module, self.parameters_to_ignore)
        self.modules_buffers = list(self.named_module_buffers.values())

    # -------------------------------------------------------------------------------------------------------- a step

    # torch.compile leaves these methods alone, and compiles the module.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; outside ``no_sync``, its next backward synchronises gradients.

        Args:
            *inputs: the module's; moved to its device where ``device_ids`` says so.
            **kwargs: the same.

        Raises:
            RuntimeError: the process group is destroyed; parameters were replaced or added; or the last backward left
                gradients out.
        """
        with Range("DistributedDataParallel.forward"):  # torch's name for it
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward() as needs_a_frame:
            run = self._callee()
            if self._stand_ins is not None:
                return self._stand_ins.run(self.module, run, inputs, kwargs)
            return call(run, inputs, kwargs) if needs_a_frame else run(*inputs, **kwargs)

    def _callee(self) -> Callable[..., Any]:
        """What runs the module."""
        return self.module

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        check_beside_torchs(TorchDDP._active_ddp_module, self._recipe.parameters.tensors)
        grad_enabled = torch.is_grad_enabled()
        self._begin(grad_enabled and self.require_backward_grad_sync, grad_enabled)
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        return (inputs, kwargs) if self._low_precision is None else self._low_precision.cast((inputs, kwargs))

    def _begin(self, synchronises: bool, grad_enabled: bool) -> None:
        """Do what comes before the module runs, and check that it may run."""
        engine = self.engine.here
        if engine.sharded is not None:
            engine.sharded.check_parameters()
        if synchronises:
            check_group(self.process_group)
            refuse_distributed_autograd()
            if self._stand_ins is not None:
                self._stand_ins.put_parameters_back()
            if self._stand_ins is None or not is_inside_backward():  # there they may be in the parameters' places
                engine.parameter_watch.check()
        if grad_enabled:
            engine.check_none_missing()
            engine.look_for_corruption()
            self._graphs.check(self.reducer, self.process_group.rank())
        self.reducer.begin_forward(grad_enabled)
        Join.notify_join_context(self)
        self._note_who_has_inputs()
        joining.tell_of_forward(engine.now, synchronises)
        self._begin_step(synchronises, grad_enabled)

    def _begin_step(self, synchronises: bool, grad_enabled: bool, is_shadow: bool = False) -> None:
        """Do what ranks do together before a forward; ``is_shadow``: this rank has no inputs (torch's Join)."""
        engine = self.engine
        if grad_enabled and not engine.has_rebuilt_buckets:
            take_over_optimizers(self.reducer, self._recipe.parameters.tensors, engine.now.main_gradients.are_apart)
            self._rebuild_buckets()
        if grad_enabled:
            engine.plan_buckets()
        if synchronises:
            engine.begin_window(counts=not is_shadow)
        self._buffer_sync.wait()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers(is_shadow)
        if grad_enabled and engine.slow_ranks is not None:
            self.reducer.begin_module()

    def _rebuild_buckets(self) -> None:
        self.engine.rebuild_buckets()

    def _begin_shadow(self, synchronises: bool, grad_enabled: bool) -> None:
        """Take part in a forward and a backward of other ranks, for which this rank has no inputs."""
        self._note_who_has_inputs()
        self._begin_step(synchronises, grad_enabled, is_shadow=True)
        self.require_forward_param_sync = synchronises
        if synchronises:
            self.engine.shadow_window()

    @torch._disable_dynamo
    def _inside_ddp_forward(self) -> ActiveModel:  # type: ignore[override]
        return ActiveModel(self, self._recipe.config.bucket_caps[0], self._graphs)

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self._buffer_sync.follow(output)
        self.reducer.end_forward()
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronises:
            self._arm(output)
            self._graphs.look(output, self.reducer)
        elif torch.is_grad_enabled():
            self.engine.local_steps.note_forward_without_sync()
        # If this forward synchronises nothing, the next one does not synchronise buffers.
        self.require_forward_param_sync = synchronises
        return output

    def _arm(self, output: Any) -> None:
        self.logger.forward_ends(self.reducer)
        self.engine.arm(output)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self.modules_buffers) > 0

    def _sync_buffers(self, is_shadow: bool = False) -> None:
        self._assign_modules_buffers()
        self._sync_module_buffers(joining.source_of_buffers(self.engine.now, is_shadow))

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if hasattr(self, "buffer_hook"):  # torch's own checks ask this, too
            self._buffer_sync.call(self.buffer_hook, self.named_module_buffers)
        else:
            check_dense(self.named_module_buffers.items())
            # A graph of an earlier forward may have saved a buffer, and must still be able to run backward.
            broadcast_replicas(self.modules_buffers, self.process_group, authoritative_rank, preserve_versions=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let each rank add up its own gradients, as long as forward and backward run within this context.

        The next backward whose forward ran outside the context synchronises the sum.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            with self.engine.local_steps.are_wanted():
                yield
        finally:
            self.require_backward_grad_sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as :meth:`torch.nn.Module.zero_grad`.

        Args:
            set_to_none: free gradients in ``parameter.grad``. Those in ``main_grad`` are always set to zero in place.
        """
        super().zero_grad(set_to_none)
        self.engine.zero_gradients()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` exchange the gradients of each bucket, in place of the averaging allreduce.

        Args:
            state: handed to each call of the hook.
            hook: ``hook(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]``. The
                bucket's buffer holds gradients that are not divided by the number of ranks. The future's tensor, laid
                out like the buffer, becomes the gradients. Hooks written for torch's DDP run unchanged. On the CPU a
                bucket's hook is called after the hook of the bucket before has done its work. Hooks of
                :mod:`fastddp.comm_hooks`, and torch's own stateless hooks, are not called but run natively.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: the hook's annotations name other types; buckets are planned (``bucket_cap_mb="auto"``) and the
                hook is not the mean by one allreduce a bucket; or there is a ``hierarchy`` and the hook is written in
                Python, names another process group or is ``post_localSGD_hook``.
            RuntimeError: there is a hook already, or gradients are being synchronised.
        """
        comm_hooks.check_hook(hook)
        if self._recipe.config.plans_buckets:
            check_planned_hook(hook)
        if self._recipe.hierarchy is not None:
            comm_hooks.check_hook_between_nodes(hook)
        if self._comm_hook is not None and not self._hook_may_change:
            raise RuntimeError(
                "A communication hook is already registered; wrap the module again to use another one." + see("FD034")
            )
        self.engine.here.register_hook(state, hook)
        self._comm_hook = (state, hook)
        self._hook_may_change = False

    # ----------------------------------------------------------------------------------------------------- pickling

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "Only a DistributedDataParallel over the default process group can be pickled or copied, since that is "
                "the group it is restored with. Save model.module or state_dict() instead." + see("FD039")
            )
        state = copy.copy(self.__dict__)
        state.pop("_compiled_call_impl", None)  # of Module.compile(); it would call this model
        for name in ("process_group", "reducer", "logger", "engine", "_number", "_waits"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_recipe" not in state:
            raise RuntimeError(
                "This pickle holds a wrapper of torch's DistributedDataParallel, which cannot become one of fastddp's. "
                "Load it where fastddp.patch() is not in force; save its state_dict() or .module." + see("FD039")
            )
        self.process_group = default_group()
        nn.Module.__setstate__(self, state)
        self._number = number_of_a_copy()
        self._make_engine()
        self._assign_modules_buffers()
        if self._low_precision is not None:
            self._low_precision.cast_buffers(self.modules_buffers)  # last: construction can no longer fail
