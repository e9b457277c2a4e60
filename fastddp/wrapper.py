"""What other modules use of the wrapper, :class:`fastddp.DistributedDataParallel`: it imports them, and not they it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastddp import _C
from fastddp.bucket_plan import Buckets
from fastddp.config import Config
from fastddp.exchange.descriptions import Exchange, Setting
from fastddp.exchange.gradient_average import GradientAverage
from fastddp.module.main_gradients import MainGradients
from fastddp.module.parameters import NamedParameters


class _BeginStep(Protocol):
    def __call__(self, synchronises: bool, grad_enabled: bool, is_shadow: bool = False) -> None: ...


class Wrapper(TorchDDP):
    """The wrapper's base: names and types, no code. Attributes that torch's class has too are not repeated."""

    reducer: _C.Reducer  # type: ignore[assignment]  # torch's class has one of torch's
    _config: Config
    _setting: Setting
    _exchange: Exchange
    _parameters_to_reduce: NamedParameters
    _gradient_average: GradientAverage
    _comm_hook: tuple[object, Callable[..., Any]] | None
    _builtin_hook_name: str | None = None  # torch's name of the hook, where it has no function of its own
    _has_rebuilt_buckets: bool
    _divide_by_initial_world_size: bool
    _main_gradients: MainGradients
    _gradients_like: Sequence[Tensor]
    _stall_watch: _C.StallWatch | None
    _watch: Any  # a watch.options.Watch

    _plan: Callable[[], Buckets]
    _build_reducer: Callable[[], None]
    _rebuild_buckets: Callable[[], None]
    _begin_step: _BeginStep
    _agree_on_window: Callable[[], None]
    _adds_up_weights: Callable[[], bool]
    _set_average: Callable[[], None]
    _arm: Callable[[Tensor | Sequence[Tensor]], None]
    _check_none_missing: Callable[[], None]
    _check_reducer_finalized: Callable[[], None]
    _look_for_corruption: Callable[[], None]
