"""What ``_get_ddp_logging_data()`` reports, under torch's keys."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp.engine import Engine
from fastddp.planning.bucket_plan import Buckets

if TYPE_CHECKING:
    from fastddp._C import Reducer

LoggingData: TypeAlias = dict[str, str | int]

_ENVIRONMENT = "MASTER_ADDR MASTER_PORT TORCH_DISTRIBUTED_DEBUG CUDA_VISIBLE_DEVICES"
_OF_BACKEND = {
    "gloo": "GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT",
    "nccl": "NCCL_SOCKET_IFNAME NCCL_BLOCKING_WAIT NCCL_ASYNC_ERROR_HANDLING NCCL_DEBUG NCCL_NTHREADS NCCL_IB_TIMEOUT",
}
_CPP_NAMES = {torch.float32: "float", torch.float64: "double"}
_CPP_NAMES |= {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}


def logging_data(model: TorchDDP, engine: Engine, logger: Logger, hook: object) -> LoggingData:
    """Describe how ``model`` is synchronised now, under torch's keys, without torch's times.

    Sizes are in bytes, lists are joined by commas, flags are 0 or 1, and unset environment variables are ``"N/A"``.

    ``iteration`` is the number of steps that have ended. The order in which gradients came is that of the first step.
    ``can_set_static_graph``, with ``find_unused_parameters``: whether all steps up to now used the same parameters.
    """
    parameters, setting = engine.now.parameters.tensors, engine.now.setting
    backend = dist.get_backend(model.process_group)
    names = f"{_ENVIRONMENT} {_OF_BACKEND.get(backend, '')}".split()
    data: LoggingData = {
        "module_name": type(model.module).__name__,
        "world_size": model.process_group.size(),
        "rank": model.process_group.rank(),
        "backend_name": backend,
        "iteration": engine.reducer.windows(),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtypes": _joined(sorted({_CPP_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in parameters})),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "bucket_sizes": _sizes(engine.first_plan(), setting.parameters),
        "is_multi_device_module": int(model.is_multi_device_module),
        "device_ids": _joined(model.device_ids or ()),
        "output_device": -1 if model.output_device is None else model.output_device,
        "broadcast_buffers": int(model.forward_sync_buffers),
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "has_sync_bn": int(any(isinstance(module, nn.SyncBatchNorm) for module in model.module.modules())),
        **{name.lower(): os.environ.get(name, "N/A") for name in names},
    }
    if backend == "gloo":
        data["gloo_num_threads"] = 2  # c10d's default, and nothing in Python can change it
    if model.static_graph:
        data["static_graph"] = 1
    if hook is not None:
        data["comm_hook"] = hook if isinstance(hook, str) else getattr(hook, "__qualname__", type(hook).__qualname__)
    if engine.reducer.windows() > 0:
        unused = set(range(len(parameters))).difference(engine.reducer.used_parameters())
        data["num_buckets_reduced"] = len(setting.plan)
        data["prev_iteration_grad_ready_order_indices"] = _joined(engine.reducer.arrival_order())
        data["unused_parameter_size"] = sum(parameters[index].nbytes for index in unused)
    if engine.has_rebuilt_buckets:
        data["has_rebuilt_buckets"] = 1
        data["rebuilt_bucket_sizes"] = _sizes(setting.plan, setting.parameters)
        data["rebuilt_per_bucket_param_indices"] = _joined(" ".join(map(str, bucket)) for bucket in setting.plan)
    if logger.is_static is not None:
        data["can_set_static_graph"] = int(logger.is_static)
    if logger.error is not None:
        data |= {"has_error": 1, "error": logger.error}
    return data


def _sizes(plan: Buckets, parameters: Sequence[Tensor]) -> str:
    return _joined(sum(parameters[index].nbytes for index in bucket) for bucket in plan)


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


class Logger:
    """The ``logger`` of torch's DDP. What it is told, and the model knows, it does not note."""

    def __init__(self, model: TorchDDP) -> None:
        self._model = weakref.ref(model)  # weak: the model holds its logger, and must be freed when its user drops it
        self.error: str | None = None
        self.is_static: bool | None = None
        self._watches_usage = model.find_unused_parameters and not model.static_graph
        self._used: list[int] | None = None

    def forward_ends(self, reducer: Reducer) -> None:
        """After each forward that asked for synchronisation."""
        if self._watches_usage and reducer.windows() > 0:
            used = reducer.used_parameters()
            if self._used is not None:
                self.is_static = self.is_static is not False and used == self._used
            self._used = used

    def set_error_and_log(self, error: str) -> None:
        """Keep the error for ``has_error`` and ``error``; torch's logger also logs it."""
        self.error = error

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """The result of the model's method of this name, texts and numbers apart, as torch's logger gives it."""
        model = self._model()
        assert model is not None, "a logger is used after its model"
        items = model._get_ddp_logging_data().items()
        texts = {key: value for key, value in items if isinstance(value, str)}
        return SimpleNamespace(strs_map=texts, ints_map={key: value for key, value in items if key not in texts})

    def _ignore(self, *arguments: object, **named: object) -> None:
        """Do nothing: copied code tells torch's logger what the model knows here."""

    set_runtime_stats_and_log = set_construction_data_and_log = _ignore
    _set_comm_hook_name = _set_static_graph = _set_uneven_input_join = _ignore
