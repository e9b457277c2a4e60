"""Communication hooks with torch's names and meaning. They run natively: fused into pack and unpack, without the GIL.

>>> model.register_comm_hook(None, comm_hooks.bf16_compress_hook)

The stateless hooks are torch's own functions, so code that imports them from torch gets the native exchange too. Any
other function is called for each bucket, as torch's DDP does. Torch's functions are bound when this module is imported.
After :func:`fastddp.patch` torch's names stand for the functions of this module, which call torch's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper as _torchs_bf16_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper as _torchs_fp16_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState as TorchPowerSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import batched_powerSGD_hook as _torchs_batched_power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook as _torchs_power_sgd

from fastddp.compression.block8 import Block8, Block8Schedule, BlockState, Number
from fastddp.compression.power_sgd import PowerSGD, PowerSGDState
from fastddp.compression.power_sgd_agreement import PowerSGDSchedule
from fastddp.errors import see
from fastddp.exchange.descriptions import AllReduce, CompressState, Exchange, Noop, PythonHook, Schedule
from fastddp.exchange.of_model import OfModel
from fastddp.ranks.listing import names_near

__all__ = [
    "BlockState",
    "CompressState",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp8_compress_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "int8_compress_hook",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
]

Hook = Callable[..., Any]

_WIRES = {allreduce_hook: None, fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}
_TORCHS_WRAPPERS = {torch.float16: _torchs_fp16_wrapper, torch.bfloat16: _torchs_bf16_wrapper}


class _CompressWrapper:
    """A hook whose gradients travel in 16 bits."""

    def __init__(self, hook: Hook, dtype: torch.dtype, name: str) -> None:
        self.hook = hook
        self.dtype = dtype
        self.__name__ = self.__qualname__ = name  # torch's class asks a hook for both

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _TORCHS_WRAPPERS[self.dtype](self.hook)(state, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let the gradients that ``hook`` exchanges travel in fp16.

    Args:
        hook: a hook of this module then sends fp16; not those of 8 bits. For any other function the
            bucket is cast before the call and the result after it, as torch's function of this name does.
    """
    return _CompressWrapper(hook, torch.float16, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """As :func:`fp16_compress_wrapper`, in bf16.

    Args:
        hook: the same.
    """
    return _CompressWrapper(hook, torch.bfloat16, "bf16_compress_wrapper_hook")


_BY_NAME = ("fp16", "bf16", "int8", "fp8")
_POWERSGD = re.compile(r"powersgd([1-9]|[12]\d|3[0-2])")
HOOK_NAMES = (*_BY_NAME, "powersgdN")


def hook_named(name: str) -> tuple[object, Hook]:
    """A state of its own, and the hook that this name stands for on command lines.

    Args:
        name: "fp16", "bf16", "int8", "fp8" or "powersgdN" of rank N, 1 to 32.

    Raises:
        ValueError: there is no such name.
    """
    if name in _BY_NAME:
        return None, globals()[f"{name}_compress_hook"]
    powersgd = _POWERSGD.fullmatch(name) if isinstance(name, str) else None
    if powersgd is None:
        raise ValueError(
            f"There is no hook {name!r}. {names_near(name, HOOK_NAMES)} (N vectors, 1 to 32.)" + see("FD024")
        )
    return PowerSGDState(None, int(powersgd[1])), powerSGD_hook


if not TYPE_CHECKING:  # mypy knows which names there are

    def __getattr__(name: str) -> object:
        raise AttributeError(f"fastddp.comm_hooks has no {name!r}. {names_near(name, __all__)}" + see("FD024"))


def schedule(state: object, hook: Hook, of_model: OfModel) -> Schedule:
    """The exchanges that ``hook`` stands for.

    Args:
        state: the hook's state.
        hook: a hook of this module, or any other.
        of_model: the model; its windows after this call are the hook's first, second, ...

    Raises:
        TypeError: ``hook`` is not callable, or does not take this ``state``.
        ValueError: the annotations of ``hook`` name other types than a hook has.
    """
    check_hook(hook)
    native = _native(state, hook, None, of_model)
    if native is not None:
        return native
    python_hook = PythonHook(state, hook)
    return lambda window: python_hook


def is_all_reduce(hook: object) -> bool:
    """Whether ``hook`` is one allreduce a bucket in every window, of gradients as they are or cast."""
    return _unwrapped(hook) in tuple(_WIRES)  # which asks for no hash


def check_hook_between_nodes(hook: object) -> None:
    """Raise ValueError if ``hook`` has levels of its own, which average over some of the ranks in some windows."""
    if _unwrapped(hook) is post_localSGD_hook:
        raise ValueError(
            "post_localSGD_hook averages over groups of its own, those of each node for example, and hierarchy= over "
            "all ranks in two levels. Use one or the other." + see("FD028")
        )


def _unwrapped(hook: object) -> object:
    return _unwrapped(hook.hook) if isinstance(hook, _CompressWrapper) else hook


def _native(state: object, hook: Hook, wire: torch.dtype | None, of_model: OfModel) -> Schedule | None:
    if isinstance(hook, _CompressWrapper):
        return _native(state, hook.hook, wire or hook.dtype, of_model)
    if hook in _WIRES:
        all_reduce = _all_reduce(state, hook, _WIRES[hook] or wire)
        return lambda window: all_reduce
    if hook is noop_hook and wire is None:  # a cast to 16 bits and back would change the gradients
        return lambda window: Noop()
    if hook is post_localSGD_hook and isinstance(state, PostLocalSGDState):
        return _local_sgd(state, wire, of_model)
    if hook in (int8_compress_hook, fp8_compress_hook):
        return _block8(state, hook, wire, of_model)
    if isinstance(state, PowerSGDState) and (hook in _TORCHS_POWER_SGD or hook in _TORCHS_POWER_SGD.values()):
        batched = hook in (batched_powerSGD_hook, _torchs_batched_power_sgd)
        return _power_sgd(state, batched, wire, of_model)
    if hook in _TORCHS_POWER_SGD and not isinstance(state, TorchPowerSGDState):
        raise TypeError(_not_a(PowerSGDState, hook, state) + see("FD035"))
    return None


def _all_reduce(state: object, hook: Hook, wire: torch.dtype | None) -> AllReduce:
    if isinstance(state, CompressState):
        return AllReduce(state.process_group, wire, state.accumulate)
    if state is None or isinstance(state, dist.ProcessGroup):
        return AllReduce(state, wire)
    raise TypeError(_not_a(CompressState, hook, state) + see("FD035"))


def _block8(state: object, hook: Hook, wire: torch.dtype | None, of_model: OfModel) -> Schedule:
    if wire is not None:
        raise ValueError(
            f"{hook.__name__} sends 8 bits already: register it without a wrapper that casts." + see("FD037")
        )
    if state is None or isinstance(state, dist.ProcessGroup):
        state = BlockState(state)
    if not isinstance(state, BlockState):
        raise TypeError(_not_a(BlockState, hook, state) + see("FD035"))
    state.belong_to(of_model)
    number: Number = "int8" if hook is int8_compress_hook else state.fp8
    return Block8Schedule(Block8(state, number), of_model.setting)


def _local_sgd(state: PostLocalSGDState, wire: torch.dtype | None, of_model: OfModel) -> Schedule:
    first = of_model.windows() - state.iter  # number of the window that is the state's iteration 0

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


def _power_sgd(state: PowerSGDState, batched: bool, wire: torch.dtype | None, of_model: OfModel) -> Schedule:
    power_sgd = PowerSGD(state, batched, wire)
    power_sgd.check(of_model.setting())
    state.belong_to(of_model.setting().names, of_model.setting().parameters)
    state.follow(
        of_model.windows, lambda: power_sgd.elements(of_model.setting()), lambda: power_sgd.allocate(of_model.setting())
    )
    return PowerSGDSchedule(state, AllReduce(state.process_group, wire), power_sgd, of_model)


def int8_compress_hook(
    state: BlockState | dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Let gradients travel as integers of 8 bits, with a scale for each block of them: a quarter of fp32's bytes.

    The rank that owns a shard adds up its values in fp32. They are rounded once on the way there and once on the way
    back. Rounding errors are added to the next gradient. A registered hook runs natively, and is not called.

    Args:
        state: a :class:`BlockState`; a process group or None stands for one with its defaults.
        bucket: as any hook's.

    Raises:
        TypeError: when it is registered: ``state`` is something else.
        ValueError: when it is registered: inside a wrapper that casts to 16 bits.
        RuntimeError: at the first forward, ranks were told different things; or the function was called.
    """
    raise RuntimeError(_not_to_be_called(int8_compress_hook) + see("FD034"))


def fp8_compress_hook(
    state: BlockState | dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """As :func:`int8_compress_hook`, in 8-bit floating point, where small values of a block keep more digits.

    Args:
        state: the same; ``BlockState.fp8`` is the format.
        bucket: as any hook's.
    """
    raise RuntimeError(_not_to_be_called(fp8_compress_hook) + see("FD034"))


def _not_to_be_called(hook: Hook) -> str:
    return (
        f"{hook.__name__} is run by fastddp.DistributedDataParallel, and cannot be called for a bucket: register it "
        "with model.register_comm_hook(state, hook), where model is fastddp's."
    )


def powerSGD_hook(
    state: PowerSGDState | TorchPowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send each gradient as two thin matrices whose product approximates it (:class:`PowerSGDState`).

    Gradients that would save too little, such as vectors, and complex ones travel as they are. The factors of one
    bucket travel together with those of the next.

    Registered with fastddp's state, the hook runs natively and is not called. Called by another hook, or registered
    with torch's state, it is torch's function of this name, which takes the default group where it is given none.

    Args:
        state: a :class:`PowerSGDState`, or torch's own: ``comm_hooks.TorchPowerSGDState``.
        bucket: as any hook's.

    Raises:
        TypeError: when it is registered: ``state`` is something else.
        RuntimeError: it was called with something else than a PowerSGDState.
    """
    return _call_torchs(powerSGD_hook, state, bucket)


def batched_powerSGD_hook(
    state: PowerSGDState | TorchPowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """As :func:`powerSGD_hook`, with all gradients of a bucket as one square matrix: fewer bytes, and less exact.

    Args:
        state: the same.
        bucket: as any hook's.

    Raises:
        ValueError: when it is registered: the model has complex gradients.
    """
    return _call_torchs(batched_powerSGD_hook, state, bucket)


_TORCHS_POWER_SGD: dict[Hook, Hook] = {
    powerSGD_hook: _torchs_power_sgd,
    batched_powerSGD_hook: _torchs_batched_power_sgd,
}


def _call_torchs(hook: Hook, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, (PowerSGDState, TorchPowerSGDState)):
        raise RuntimeError(
            f"{_not_a(PowerSGDState, hook, state)} With one, {hook.__name__} is run by "
            "fastddp.DistributedDataParallel, or called by a hook of your own." + see("FD035")
        )
    return _TORCHS_POWER_SGD[hook](state, bucket)


def _not_a(kind: type, hook: Hook, state: object) -> str:
    others = "" if kind is PowerSGDState else "a process group, None or "
    return (
        f"The state of {hook.__name__} is {others}a fastddp.comm_hooks.{kind.__name__}, not a "
        f"{type(state).__module__}.{type(state).__qualname__}."
    )


def check_hook(hook: Hook) -> None:
    """Raise TypeError or ValueError unless ``hook`` can be called with a state and a ``GradBucket``."""
    if not callable(hook):
        near = names_near(hook, __all__)
        raise TypeError(
            f"A communication hook must be callable, got {hook!r}. Of fastddp.comm_hooks: {near}" + see("FD034")
        )
    expected = {
        "bucket": (dist.GradBucket, "torch.distributed.GradBucket"),
        "return": (torch.futures.Future[torch.Tensor], "torch.futures.Future[torch.Tensor]"),
    }
    annotations = _annotations(hook)
    for name, (allowed, in_words) in expected.items():
        if annotations.get(name, allowed) not in (allowed, Any):
            raise ValueError(
                f"A hook's {name} must be annotated {in_words} or not at all, not {annotations[name]}." + see("FD034")
            )


def _annotations(hook: Hook) -> dict[str, Any]:
    try:
        return inspect.get_annotations(hook, eval_str=True)
    except Exception:  # a partial or a forward reference, which cannot be evaluated here, is no reason to refuse
        return {}
