"""Communication hooks, with torch's names and meaning, that run natively: fused into pack and unpack, without the GIL.

>>> model.register_comm_hook(None, comm_hooks.bf16_compress_hook)

The stateless hooks are torch's own functions, so code that imports them from torch gets the native exchange too.
PowerSGD is fastddp's own. Any other function is called for each bucket, as torch's DDP does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from fastddp.exchanges import AllReduce, Exchange, Noop, PythonHook, Schedule, Setting
from fastddp.power_sgd import PowerSGD, PowerSGDState

__all__ = [
    "CompressState",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
]

Hook = Callable[..., Any]

_WIRES = {allreduce_hook: None, fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}


@dataclass(frozen=True)
class CompressState:
    """Settings for :func:`fp16_compress_hook` and :func:`bf16_compress_hook`, in place of a process group.

    Args:
        process_group: the ranks to average over; None: those of the model.
        accumulate: the dtype in which gradients of 16 bits are added up. ``"fp32"``: each rank adds up its share of the
            gradients in fp32, between an all-to-all and an all-gather, so that a sum is rounded once and no part of it
            overflows. ``"wire"``: by the backend's allreduce, in 16 bits. None: ``"fp32"`` over gloo, whose own 16-bit
            sums are slow and lose as many bits, else ``"wire"``.

    Raises:
        ValueError: ``accumulate`` is something else.
    """

    process_group: dist.ProcessGroup | None = None
    accumulate: Literal["fp32", "wire"] | None = None

    def __post_init__(self) -> None:
        if self.accumulate not in (None, "fp32", "wire"):
            raise ValueError(f'accumulate must be "fp32", "wire" or None, got {self.accumulate!r}.')


class _CompressWrapper:
    """A hook whose gradients travel in 16 bits."""

    def __init__(self, hook: Hook, dtype: torch.dtype, wrapper: Callable[[Hook], Hook]) -> None:
        self.hook = hook
        self.dtype = dtype
        self._wrapper = wrapper
        self.__name__ = self.__qualname__ = f"{wrapper.__name__}_hook"  # torch's class asks a hook for both

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._wrapper(self.hook)(state, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let the gradients that ``hook`` exchanges travel in fp16.

    Around a hook of this module that is all; around any other, its bucket is cast before the call, and its result after
    it, as torch's function of this name does.
    """
    return _CompressWrapper(hook, torch.float16, default_hooks.fp16_compress_wrapper)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """As :func:`fp16_compress_wrapper`, in bf16."""
    return _CompressWrapper(hook, torch.bfloat16, default_hooks.bf16_compress_wrapper)


def schedule(state: object, hook: Hook, windows: Callable[[], int], setting: Callable[[], Setting]) -> Schedule:
    """The exchanges that ``hook`` stands for.

    Args:
        state: of the hook.
        hook: of this module, or any other.
        windows: synchronisations of the model up to now; those after this call are the hook's first, second, ...
        setting: of the model, now or later.

    Raises:
        TypeError: ``hook`` is not callable, or ``state`` is nothing that this hook takes.
        ValueError: the annotations of ``hook`` name other types than a hook has.
    """
    check_hook(hook)
    native = _native(state, hook, None, windows, setting)
    if native is not None:
        return native
    python_hook = PythonHook(state, hook)
    return lambda window: python_hook


def is_all_reduce(hook: object) -> bool:
    """Whether ``hook`` stands for one allreduce a bucket, in every window, of gradients as they are or cast."""
    while isinstance(hook, _CompressWrapper):
        hook = hook.hook
    return hook in (allreduce_hook, fp16_compress_hook, bf16_compress_hook)


def _native(
    state: object, hook: Hook, wire: torch.dtype | None, windows: Callable[[], int], setting: Callable[[], Setting]
) -> Schedule | None:
    if isinstance(hook, _CompressWrapper):
        return _native(state, hook.hook, wire or hook.dtype, windows, setting)
    if hook in _WIRES:
        all_reduce = _all_reduce(state, hook, _WIRES[hook] or wire)
        return lambda window: all_reduce
    if hook is noop_hook and wire is None:  # cast to 16 bits and back, gradients would not be what they were
        return lambda window: Noop()
    if hook is post_localSGD_hook and isinstance(state, PostLocalSGDState):
        return _local_sgd(state, wire, windows)
    if hook in (powerSGD_hook, batched_powerSGD_hook):
        return _power_sgd(state, hook, wire, windows, setting)
    return None


def _all_reduce(state: object, hook: Hook, wire: torch.dtype | None) -> AllReduce:
    if isinstance(state, CompressState):
        return AllReduce(state.process_group, wire, state.accumulate)
    if state is None or isinstance(state, dist.ProcessGroup):
        return AllReduce(state, wire)
    raise TypeError(
        f"The state of {hook.__name__} is a process group, None or a CompressState, not a {type(state).__name__}."
    )


def _local_sgd(state: PostLocalSGDState, wire: torch.dtype | None, windows: Callable[[], int]) -> Schedule:
    first = windows() - state.iter  # of the window that counts as the state's iteration 0

    def exchange(window: int) -> Exchange:
        state.iter = min(window - first, state.start_localSGD_iter)
        if state.iter < state.start_localSGD_iter:
            return AllReduce(state.process_group, wire)
        if not state.post_local_gradient_allreduce:
            return Noop()
        if state.subgroup is None:
            state.subgroup, _ = dist.new_subgroups()
        return AllReduce(state.subgroup, wire)

    return exchange


def _power_sgd(
    state: object, hook: Hook, wire: torch.dtype | None, windows: Callable[[], int], setting: Callable[[], Setting]
) -> Schedule:
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            f"The state of {hook.__name__} is a fastddp.comm_hooks.PowerSGDState, not a {type(state).__module__}."
            f"{type(state).__qualname__}. Torch's own state goes with torch's own hook."
        )
    state.belong_to(setting().names, setting().parameters)
    plain = AllReduce(state.process_group, wire)
    power_sgd = PowerSGD(state, hook is batched_powerSGD_hook, wire)
    state.follow(windows, lambda: power_sgd.elements(setting()), lambda: power_sgd.allocate(setting()))

    def exchange(window: int) -> Exchange:
        # Buckets of the model's first window are not those of the others.
        return power_sgd if window > 0 and state.iter >= state.start_powerSGD_iter else plain

    return exchange


def powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send each gradient as the product of two thin matrices; :class:`PowerSGDState` says which.

    Gradients that would save too little, vectors among them, and those that are no real numbers travel as they are. The
    factors of one bucket travel together with those of the next.

    Raises:
        RuntimeError: it was called. It only stands for the native exchange: pass it to
            ``fastddp.DistributedDataParallel.register_comm_hook``.
    """
    _only_native("powerSGD_hook")


def batched_powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As :func:`powerSGD_hook`, but all gradients of a bucket are one square matrix: less to send, and less exact."""
    _only_native("batched_powerSGD_hook")


def _only_native(name: str) -> NoReturn:
    raise RuntimeError(
        f"fastddp's {name} is run by fastddp.DistributedDataParallel and cannot be called. Within a hook of your own, "
        "use the function of this name in torch.distributed.algorithms.ddp_comm_hooks, with torch's PowerSGDState."
    )


def check_hook(hook: Hook) -> None:
    """Raise TypeError or ValueError unless ``hook`` can be called with a state and a ``GradBucket``."""
    if not callable(hook):
        raise TypeError(f"A communication hook must be callable, got {type(hook).__name__}.")
    expected = {
        "bucket": (dist.GradBucket, "torch.distributed.GradBucket"),
        "return": (torch.futures.Future[torch.Tensor], "torch.futures.Future[torch.Tensor]"),
    }
    annotations = _annotations(hook)
    for name, (allowed, in_words) in expected.items():
        if annotations.get(name, allowed) not in (allowed, Any):
            raise ValueError(
                f"A communication hook's {name} must be annotated {in_words} or not at all, not {annotations[name]}."
            )


def _annotations(hook: Hook) -> dict[str, Any]:
    try:
        return inspect.get_annotations(hook, eval_str=True)
    except Exception:  # what cannot be evaluated here, a partial or a forward reference, says nothing about the hook
        return {}
