"""What ``_get_ddp_logging_data()`` reports, under torch's keys."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastddp.bucket_plan import Buckets

if TYPE_CHECKING:
    from fastddp.ddp import DistributedDataParallel

LoggingData: TypeAlias = dict[str, str | int]

_ENVIRONMENT = {
    "any": ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"),
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
_NOT_MEASURED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
    "avg_forward_compute_time",
    "avg_backward_compute_time",
    "avg_backward_comm_time",
    "avg_backward_compute_comm_overlap_time",
    "forward_compute_time_start",
    "backward_compute_time_start",
    "backward_comm_time_start",
    "backward_compute_time_end",
    "backward_comm_time_end",
)
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def logging_data(model: DistributedDataParallel) -> LoggingData:
    """Describe how ``model`` is synchronised, in torch's words, as of now.

    Torch's DDP samples some steps; here every value is current, so a sample rate changes nothing. Sizes are in bytes,
    lists are joined by commas, flags are 0 or 1, and what the environment does not say is ``"N/A"``. ``iteration``
    counts synchronisations that have ended. The order in which gradients came is that of the first window, the only one
    of which it is noted. Torch's times (keys with ``_time``) are there and 0: fastddp takes none; ``torch.profiler``
    shows where a step's time goes.
    """
    data = {**_of_construction(model), **_of_environment(dist.get_backend(model.process_group))}
    return {**data, **_of_steps(model)} if model.reducer.windows() > 0 else data


@dataclass(frozen=True)
class TypedLoggingData:
    """:func:`logging_data`, divided as torch's logger gives it."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class Logger:
    """What torch's DDP has as ``logger``, for code that was copied from its methods.

    There is nothing to note: :func:`logging_data` looks when it is asked. So all methods but one do nothing.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)  # the model holds its logger, and is to be freed when its user drops it

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing; torch's samples the step that begins."""

    def set_error_and_log(self, error: str) -> None:
        """Do nothing; torch's writes the error to its log, and it is raised in any case."""

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Do nothing; torch's constructor says here what was built."""

    def _set_comm_hook_name(self, name: str) -> None:
        """Do nothing; the model knows its hook."""

    def _set_static_graph(self) -> None:
        """Do nothing; the model knows it."""

    def _set_uneven_input_join(self) -> None:
        """Do nothing; it is not among the data."""

    def _get_ddp_logging_data(self) -> TypedLoggingData:
        """What the model's method of this name gives, texts and numbers apart."""
        model = self._model()
        assert model is not None, "a logger is used after its model"
        data = logging_data(model)
        return TypedLoggingData(
            {key: value for key, value in data.items() if isinstance(value, str)},
            {key: value for key, value in data.items() if not isinstance(value, str)},
        )


def _of_construction(model: DistributedDataParallel) -> LoggingData:
    parameters = model._parameters_to_reduce.tensors
    data: LoggingData = {
        "module_name": type(model.module).__name__,
        "world_size": model.process_group.size(),
        "rank": model.process_group.rank(),
        "backend_name": dist.get_backend(model.process_group),
        "iteration": model.reducer.windows(),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtypes": _joined(sorted({_CPP_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in parameters})),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "bucket_sizes": _sizes(model._plan(), parameters),
        "is_multi_device_module": int(model.is_multi_device_module),
        "device_ids": _joined(model.device_ids or ()),
        "output_device": -1 if model.output_device is None else model.output_device,
        "broadcast_buffers": int(model.forward_sync_buffers),
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "has_sync_bn": int(any(isinstance(module, nn.SyncBatchNorm) for module in model.module.modules())),
    }
    if model.static_graph:
        data["static_graph"] = 1
    if model._comm_hook is not None:
        hook = model._comm_hook[1]
        data["comm_hook"] = getattr(hook, "__qualname__", type(hook).__qualname__)
    return data


def _of_environment(backend: str) -> LoggingData:
    names = _ENVIRONMENT["any"] + _ENVIRONMENT.get(backend, ())
    data: LoggingData = {name.lower(): os.environ.get(name, "N/A") for name in names}
    if backend == "gloo":
        data["gloo_num_threads"] = 2  # c10d's default, and nothing in Python can change it
    return data


def _of_steps(model: DistributedDataParallel) -> LoggingData:
    parameters = model._parameters_to_reduce.tensors
    unused = set(range(len(parameters))).difference(model.reducer.used_parameters())
    data: LoggingData = {
        **dict.fromkeys(_NOT_MEASURED, 0),
        "num_buckets_reduced": len(model._setting.plan),
        "prev_iteration_grad_ready_order_indices": _joined(model.reducer.arrival_order()),
        "unused_parameter_size": sum(parameters[index].nbytes for index in unused),
    }
    if model._has_rebuilt_buckets:
        plan = model._setting.plan
        data["has_rebuilt_buckets"] = 1
        data["rebuilt_bucket_sizes"] = _sizes(plan, parameters)
        data["rebuilt_per_bucket_param_indices"] = _joined(" ".join(map(str, bucket)) for bucket in plan)
    return data


def _sizes(plan: Buckets, parameters: Sequence[Tensor]) -> str:
    return _joined(sum(parameters[index].nbytes for index in bucket) for bucket in plan)


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
