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
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp.bucket_plan import Buckets
from fastddp.engine import Engine
from fastddp.torch_compat.logged_times import LoggedTimes

if TYPE_CHECKING:
    from fastddp._C import Reducer

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
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def logging_data(model: TorchDDP, engine: Engine, logger: Logger, hook: str | None) -> LoggingData:
    """Describe how ``model`` is synchronised, under torch's keys.

    Sizes are in bytes, times in ns, lists are joined by commas, flags are 0 or 1, and unset environment variables are
    ``"N/A"``. As with torch's DDP, ``iteration`` and times (keys with ``_time``) are those of the last sampled step.
    Times appear after the first sample. The first ten steps are sampled, then every hundredth
    (``_set_ddp_runtime_logging_sample_rate``). All else is current. What differs:

    - Times are 0 on a device, where torch's logger makes the host wait; :meth:`DistributedDataParallel.step_report` has
      them. They are also 0 after a call of :meth:`DistributedDataParallel.sample_steps`, and for the first two steps if
      the second one's forward changes the buckets. Averages leave these out.
    - The order in which gradients came is that of the first window. No other is noted.
    - ``can_set_static_graph``, with ``find_unused_parameters``: whether all windows up to now have used the same
      parameters, on all ranks together. Torch's logger tells when they did not, and else when the model is freed.
    - ``error`` is about missing gradients, or arguments. After a forward or backward that raised, it says so until the
      next one begins.
    """
    data = {**_of_construction(model, engine, logger), **_of_environment(dist.get_backend(model.process_group))}
    if hook is not None:
        data["comm_hook"] = hook
    if logger.times.samples > 0:
        data |= _of_steps(engine, logger)
    return data | logger.outcome(engine.reducer)


def name_of_hook(hook: object) -> str:
    """The name that torch's logger gives to a hook that is not torch's."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


@dataclass(frozen=True)
class TypedLoggingData:
    """:func:`logging_data`, divided as torch's logger gives it."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class Logger:
    """The ``logger`` of torch's DDP: notes what happens while a model trains.

    Most of :func:`logging_data` is looked up on demand, so the methods that tell torch's logger of it do nothing.
    """

    def __init__(self, model: TorchDDP) -> None:
        self._model = weakref.ref(model)  # weak: the model holds its logger, and must be freed when its user drops it
        self.times = LoggedTimes()
        self.iteration = 0
        self.others_sample = False
        """Whether somebody else has asked the reducer for samples. The logger then no longer takes any."""
        self._takes_times = model.device_type == "cpu"
        self._samples = False
        self._windows = -1
        self._error: str | None = None
        self._raised: str | None = None
        self._watches_usage = model.find_unused_parameters and not model.static_graph
        self._used: list[int] | None = None
        self._is_static: bool | None = None

    def forward_begins(self, reducer: Reducer) -> None:
        """Before each forward that a backward may follow."""
        self._raised = None
        windows = reducer.windows()
        if windows == self._windows:
            return
        self._windows = windows
        self.times.step_begins()
        samples = self._takes_times and self.times.samples_after(windows + 1)
        if samples != self._samples and not self.others_sample:
            reducer.sample_every(int(samples))
        self._samples = samples

    def forward_raised(self, error: Exception) -> None:
        """Note the error of a forward until the next one begins."""
        self._raised = f"{type(error).__name__}: {error}"

    def forward_ends(self, reducer: Reducer) -> None:
        """After each forward that asked for synchronisation."""
        self.times.forward_ends()
        if self._watches_usage and self._windows > 0:
            self._compare_usage(reducer)
        if self.iteration != self._windows and self.times.samples_after(self._windows):
            self.iteration = self._windows
            sampled = reducer.sampled() if self._takes_times and not self.others_sample else None
            self.times.add(None if sampled is None else sampled.times())

    def _compare_usage(self, reducer: Reducer) -> None:
        used = reducer.used_parameters()
        if self._used is not None:
            self._is_static = self._is_static is not False and used == self._used
        self._used = used

    def outcome(self, reducer: Reducer) -> LoggingData:
        """What went wrong, and which option could be switched on."""
        data: LoggingData = {}
        if self._is_static is not None:
            data["can_set_static_graph"] = int(self._is_static)
        error = self._error if self._error is not None else self._raised
        if error is None and reducer.state == "failed":
            error = "The last backward raised."
        if error is not None:
            data |= {"has_error": 1, "error": error, "iteration": reducer.windows()}
        return data

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing; torch's logger samples the step that begins."""

    def set_error_and_log(self, error: str) -> None:
        """Keep the error for ``has_error`` and ``error``; torch's logger also logs it."""
        self._error = error

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Do nothing; torch's constructor describes the model here."""

    def _set_comm_hook_name(self, name: str) -> None:
        """Do nothing; the model knows its hook."""

    def _set_static_graph(self) -> None:
        """Do nothing; the model knows it."""

    def _set_uneven_input_join(self) -> None:
        """Do nothing; it is not among the data."""

    def _get_ddp_logging_data(self) -> TypedLoggingData:
        """The result of the model's method of this name, texts and numbers apart."""
        model = self._model()
        assert model is not None, "a logger is used after its model"
        data: LoggingData = model._get_ddp_logging_data()  # type: ignore[assignment]  # of ours
        return TypedLoggingData(
            {key: value for key, value in data.items() if isinstance(value, str)},
            {key: value for key, value in data.items() if not isinstance(value, str)},
        )


def _of_construction(model: TorchDDP, engine: Engine, logger: Logger) -> LoggingData:
    parameters = engine.now.parameters.tensors
    data: LoggingData = {
        "module_name": type(model.module).__name__,
        "world_size": model.process_group.size(),
        "rank": model.process_group.rank(),
        "backend_name": dist.get_backend(model.process_group),
        "iteration": logger.iteration,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtypes": _joined(sorted({_CPP_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in parameters})),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "bucket_sizes": _sizes(engine.first_plan(), engine.now.setting.parameters),
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
    return data


def _of_environment(backend: str) -> LoggingData:
    names = _ENVIRONMENT["any"] + _ENVIRONMENT.get(backend, ())
    data: LoggingData = {name.lower(): os.environ.get(name, "N/A") for name in names}
    if backend == "gloo":
        data["gloo_num_threads"] = 2  # c10d's default, and nothing in Python can change it
    return data


def _of_steps(engine: Engine, logger: Logger) -> LoggingData:
    parameters, plan = engine.now.parameters.tensors, engine.now.setting.plan
    unused = set(range(len(parameters))).difference(engine.reducer.used_parameters())
    data: LoggingData = {
        **logger.times.as_dict(),
        "num_buckets_reduced": len(plan),
        "prev_iteration_grad_ready_order_indices": _joined(engine.reducer.arrival_order()),
        "unused_parameter_size": sum(parameters[index].nbytes for index in unused),
    }
    if engine.has_rebuilt_buckets:
        data["has_rebuilt_buckets"] = 1
        data["rebuilt_bucket_sizes"] = _sizes(plan, engine.now.setting.parameters)
        data["rebuilt_per_bucket_param_indices"] = _joined(" ".join(map(str, bucket)) for bucket in plan)
    return data


def _sizes(plan: Buckets, parameters: Sequence[Tensor]) -> str:
    return _joined(sum(parameters[index].nbytes for index in bucket) for bucket in plan)


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
