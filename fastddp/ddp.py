"""``fastddp.DistributedDataParallel``: torch's class, with another engine."""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp import comm_hooks
from fastddp._C import Reducer
from fastddp.bucket_plan import BucketPlan, plan_buckets
from fastddp.config import Config, reject_unsupported
from fastddp.exchanges import AllReduce, Exchange, Schedule, Setting
from fastddp.lanes import lanes_pay
from fastddp.parameters import (
    check_optimizer_in_backward,
    collect_parameters,
    named_buffers,
    replicated_tensors,
)
from fastddp.replicas import agree_on, agree_on_order, broadcast_replicas, verify_replicas
from fastddp.step_check import check_before_each_step


class DistributedDataParallel(TorchDDP):
    """Data parallelism over the ranks of a process group, with the interface of torch's DDP.

    A subclass of :class:`torch.nn.parallel.DistributedDataParallel`, so that ``isinstance`` holds wherever it is asked.
    It calls neither torch's constructor nor torch's reducer. Constructor arguments have torch's names, defaults and
    meanings; those not described here are for later versions and raise ``NotImplementedError`` when used.

    Args:
        module: the module to train; the same on every rank.
        device_ids: None, or the one accelerator device that ``module`` and its inputs live on.
        output_device: None, or a device; accepted with ``device_ids`` as torch does.
        dim: the batch dimension, for the inherited ``scatter`` and ``gather``.
        broadcast_buffers: older form of ``forward_sync_buffers``; False also leaves buffers out of ``init_sync``.
        init_sync: verify the parameters across ranks and broadcast rank 0's parameters and buffers at construction.
        process_group: the ranks to average over. Default: the default group.
        bucket_cap_mb: MiB of gradients in a bucket. Default: 25; on accelerators 1 for the first bucket.
        gradient_as_bucket_view: make ``parameter.grad`` a view of its bucket, which saves the memory of the gradients
            and the unpack kernel.
        check_reduction: deprecated in torch; ignored.
        bucket_cap_mb_list: MiB of the first, second, ... bucket; the last one holds for all further ones.
        batched_grad_copy: accepted and ignored: fastddp always packs a bucket with one kernel.
        forward_sync_buffers: begin each forward with rank 0's buffers. Default: True.

    Raises:
        RuntimeError: no parameter requires a gradient; a parameter is uninitialised or on the meta device; or, on every
            rank, the ranks hold different models.
        ValueError: parameters on several types of device, or arguments that contradict each other.
        NotImplementedError: an option that fastddp does not have yet.
    """

    reducer: Reducer  # type: ignore[assignment]  # torch's class has one of torch's

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        reject_unsupported(
            {
                "find_unused_parameters": find_unused_parameters,
                "static_graph": static_graph,
                "delay_all_reduce_named_params": delay_all_reduce_named_params,
                "param_to_hook_all_reduce": param_to_hook_all_reduce is not None,
                "mixed_precision": mixed_precision,
                "device_mesh": device_mesh is not None,
                "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            }
        )
        if check_reduction:
            warnings.warn("check_reduction is deprecated and has no effect.", FutureWarning, stacklevel=2)
        self.process_group = process_group if process_group is not None else _default_group()
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._parameters_to_reduce = collect_parameters(module, self.parameters_to_ignore)
        self._config = Config.from_arguments(
            self._parameters_to_reduce.tensors[0].device.type,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            init_sync=init_sync,
        )
        self._set_torch_attributes(module, dim, batched_grad_copy)
        self._set_devices(device_ids, output_device)
        if init_sync:
            self._synchronise_replicas()
        self._comm_hook: tuple[object, Callable[..., Any]] | None = None
        self._build_reducer()

    # ------------------------------------------------------------------------------------------------- construction

    def _set_torch_attributes(self, module: nn.Module, dim: int, batched_grad_copy: bool) -> None:
        """Set the attributes that frameworks, and torch's inherited methods, read."""
        self.module = module
        self.dim = dim
        self.forward_sync_buffers = self._config.forward_sync_buffers
        self.gradient_as_bucket_view = self._config.gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.bucket_bytes_cap = max(self._config.bucket_caps)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.find_unused_parameters = False
        self.static_graph = False
        self.mixed_precision = None
        self.logger = None
        self.use_side_stream_for_tensor_copies = True
        self._use_python_reducer = False
        self._delay_all_reduce_params: list[nn.Parameter] = []

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
        if not device_ids and output_device is None:
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
        tensors = replicated_tensors(self.module, self.parameters_to_ignore, self._config.init_sync_buffers)
        verify_replicas(tensors, self.process_group, self.device)
        broadcast_replicas([tensor.detach() for _, tensor in tensors], self.process_group)

    def _build_reducer(self) -> None:
        parameters = self._parameters_to_reduce.tensors
        names = self._parameters_to_reduce.names
        plan = self._plan()
        self.reducer = Reducer(parameters, names, plan, self.process_group, self._config.gradient_as_bucket_view)
        self._has_rebuilt_buckets = False
        self._setting = Setting(self.process_group, names, parameters, plan)
        self._use(_all_reduce if self._comm_hook is None else self._schedule_of(*self._comm_hook))
        self._assign_modules_buffers()
        check_before_each_step(self)

    def _schedule_of(self, state: object, hook: Callable[..., Any]) -> Schedule:
        this = weakref.ref(self)  # a state may outlive the model
        return comm_hooks.schedule(state, hook, lambda: this().reducer.windows(), lambda: this()._setting)  # type: ignore[union-attr]

    def _use(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._install(schedule(self.reducer.windows()))

    def _install(self, exchange: Exchange) -> None:
        exchange.install(self.reducer, self._setting)
        self._exchange = exchange

    def _plan(self, order: Sequence[int] | None = None) -> BucketPlan:
        return plan_buckets(self._parameters_to_reduce.tensors, self._config.bucket_caps, order)

    def _assign_modules_buffers(self) -> None:
        # Anew before each use: user code may replace buffers.
        self.named_module_buffers = named_buffers(self.module, self.parameters_to_ignore)
        self.modules_buffers = list(self.named_module_buffers.values())

    # -------------------------------------------------------------------------------------------------------- a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; outside ``no_sync``, its next backward synchronises gradients."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
            return self._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled and self.require_backward_grad_sync:
            _check_group(self.process_group)
        self.reducer.begin_forward(grad_enabled)
        if grad_enabled and not self._has_rebuilt_buckets:
            check_optimizer_in_backward(self._parameters_to_reduce.tensors)
            self._rebuild_buckets()
        if grad_enabled and self.require_backward_grad_sync:
            exchange = self._schedule(self.reducer.windows())
            if exchange != self._exchange:
                self._install(exchange)
        if self.will_sync_module_buffers():
            self._sync_buffers()
        if not self.device_ids:
            return inputs, kwargs
        moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
        return moved_inputs[0], moved_kwargs[0]

    def _post_forward(self, output: Any) -> Any:
        synchronising = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronising:
            self.reducer.arm()
        # After a forward that began no synchronisation, the next one finds buffers as it left them.
        self.require_forward_param_sync = synchronising
        return output

    def _rebuild_buckets(self) -> None:
        """After the first window: replan in the order in which gradients came, rank 0's order for all."""
        if not (arrived := self.reducer.arrival_order()):
            return
        seen = set(arrived)
        expected_later = [index for bucket in self._plan() for index in bucket if index not in seen]
        order = agree_on_order(arrived + expected_later, self.process_group, self.device)
        plan = self._plan(order)
        self.reducer.set_plan(plan)
        parameters = self._parameters_to_reduce.tensors
        bucket_bytes = [sum(parameters[index].nbytes for index in bucket) for bucket in plan]
        # Training that zeroes gradients in place leaves them in their buckets: then nothing but the division would
        # need a kernel.
        keeps_gradients = all(parameter.grad is not None for parameter in parameters)
        divide = self.device_type != "cpu" and agree_on(keeps_gradients, self.process_group, self.device)
        self._setting = dataclasses.replace(
            self._setting, plan=plan, several_lanes=lanes_pay(bucket_bytes), divide_in_collective=divide
        )
        self._install(self._exchange)
        self._has_rebuilt_buckets = True

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with rank 0's buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self.modules_buffers) > 0

    def _sync_buffers(self) -> None:
        self._assign_modules_buffers()
        # A graph of an earlier forward may have saved a buffer, and still has to run backward.
        broadcast_replicas(self.modules_buffers, self.process_group, preserve_versions=True)

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
            ValueError: its annotations name other types.
            RuntimeError: there is a hook already, or gradients are being synchronised.
        """
        comm_hooks.check_hook(hook)
        if self._comm_hook is not None:
            raise RuntimeError(
                "A communication hook is already registered; build a new DistributedDataParallel to use another one."
            )
        self._use(self._schedule_of(state, hook))
        self._comm_hook = (state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """As :meth:`register_comm_hook` with torch's ALLREDUCE or FP16_COMPRESS."""
        builtin = dist.BuiltinCommHookType
        hooks = {builtin.ALLREDUCE: comm_hooks.allreduce_hook, builtin.FP16_COMPRESS: comm_hooks.fp16_compress_hook}
        self.register_comm_hook(None, hooks[comm_hook_type])

    def last_grad_norm(self) -> Tensor:
        """The 2-norm of all synchronised gradients, as the last backward left them, without a wait for the device.

        Where unpack has written the gradients it was computed on the way; else one pass over the buckets computes it
        now, so call it before the gradients are changed.

        Returns:
            A 0-dimensional tensor on the device of the first bucket, fp32 (fp64 if a parameter is);
            :func:`torch.nn.utils.get_total_norm` of the gradients, to rounding.

        Raises:
            RuntimeError: no synchronisation has ended since the last forward.
        """
        parameters = self._parameters_to_reduce.tensors
        is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)
        return self.reducer.measure()[0].sqrt().to(torch.float64 if is_double else torch.float32)

    def found_inf(self) -> Tensor:
        """Whether a synchronised gradient holds an infinity or NaN: 1.0 or 0.0, like ``GradScaler``'s tensor.

        Returns and raises as :meth:`last_grad_norm`; fp32.
        """
        return (self.reducer.measure()[1] > 0).to(torch.float32)

    # ----------------------------------------------------------------------------------------------------- pickling

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "Only a DistributedDataParallel over the default process group can be pickled or copied, since that is "
                "the group it is restored with. Save model.module or state_dict() instead."
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "_setting", "_schedule", "_exchange"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = _default_group()
        nn.Module.__setstate__(self, state)
        self._build_reducer()

    # ------------------------------------------------------------------------- torch's surface that is yet to come

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Uneven inputs; not supported yet."""
        _not_yet("join()")

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Uneven inputs; not supported yet."""
        _not_yet("join_hook()")

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_yet("_register_buffer_comm_hook()")

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_yet("_register_fused_optim()")

    def _set_static_graph(self) -> NoReturn:
        _not_yet("_set_static_graph()")

    def _get_ddp_logging_data(self) -> NoReturn:
        _not_yet("_get_ddp_logging_data()")

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> NoReturn:
        _not_yet("_set_ddp_runtime_logging_sample_rate()")

    def _set_sparse_metadata(self, global_unique_ids: Any) -> NoReturn:
        _not_yet("_set_sparse_metadata()")

    def _update_process_group(self, new_process_group: Any) -> NoReturn:
        _not_yet("_update_process_group()")

    def _remove_autograd_hooks(self) -> None:
        """Take the gradient hooks off the module's parameters; the wrapper then no longer synchronises."""
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward left gradients incomplete."""
        self.reducer.check_complete()


def _all_reduce(window: int) -> Exchange:
    return AllReduce()


def _not_yet(method: str) -> NoReturn:
    reject_unsupported({method: True})
    raise AssertionError


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "The default process group has not been initialised. Call torch.distributed.init_process_group() before "
            "wrapping a module, and start the script with torchrun."
        )
    return dist.distributed_c10d._get_default_group()


def _check_group(process_group: dist.ProcessGroup) -> None:
    try:
        dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError, RuntimeError):
        raise RuntimeError(
            "The process group of this DistributedDataParallel has been destroyed. Wrap the module again after "
            "init_process_group(), or call model.module for inference without other ranks."
        ) from None
