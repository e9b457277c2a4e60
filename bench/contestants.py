"""Who competes in `bench.step`: each one wraps its own twin of the case's model and runs a training step on it.

A contestant may have a communication hook: the one of that name in its own library, torch's or fastddp's. The hook says
what can be demanded of the gradients (`Check`) and which of torch's hooks it is held against.
"""

from __future__ import annotations

import copy
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bench.cases import Batch
from bench.checks import COMPILED, EXACT, RANKS_AGREE, Check, eight_bits, rounded_to

# Who may be compared with whom. default: a gradient has memory of its own. view: gradients are views of the buckets.
# floor: no DDP at all, what the others are made of.
Semantics = Literal["floor", "default", "view"]


class Step:
    """One contestant, ready to run: forward and backward of a module, wrapped or not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, batch: Batch) -> None:
        """What is timed: forward and backward, and with them the reduction of the gradients."""
        self.module(*batch).backward()

    def gradients(self) -> list[Tensor]:
        """Those that the last run left, in the order of the parameters."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def clear(self) -> None:
        """Frees them, as an optimizer's zero_grad does between two steps."""
        self.module.zero_grad(set_to_none=True)

    def without_exchange(self) -> AbstractContextManager[Any]:
        """Within it, runs leave each rank its own gradients."""
        return getattr(self.module, "no_sync", nullcontext)()  # type: ignore[no-any-return]

    def plans(self) -> dict[str, Any]:
        """The sizes of the buckets now, if the wrapper tells."""
        buckets = getattr(self.module, "bucket_plan", lambda: None)()
        sizes = None if buckets is None else [round(bucket.bytes / 2**20, 3) for bucket in buckets.buckets]
        return {"buckets_mib": sizes}


class MethodStep(Step):
    """Of a module that is replicated in place: no forward that fastddp sees leads to the backward."""

    def run(self, batch: Batch) -> None:
        """What is timed."""
        self.module.forward(*batch).backward()


class CompiledStep(Step):
    """Under torch.compile. Counts the graphs that are compiled in the first run, and again in later ones."""

    def __init__(self, module: nn.Module, optimize_ddp: bool) -> None:
        super().__init__(torch.compile(module))  # type: ignore[arg-type]
        self.optimize_ddp = optimize_ddp
        self.graphs: list[int] = []  # of each run

    def run(self, batch: Batch) -> None:
        """What is timed; what surrounds it takes some microseconds."""
        before = _graphs()
        with torch._dynamo.config.patch(optimize_ddp=self.optimize_ddp):
            super().run(batch)
        self.graphs.append(_graphs() - before)

    def plans(self) -> dict[str, Any]:
        """The sizes of the buckets, and how many graphs there are."""
        return super().plans() | {"graphs": self.graphs[0], "graphs_of_later_runs": sum(self.graphs[1:])}


def _graphs() -> int:
    """That AOT autograd got in this process."""
    return torch._dynamo.utils.counters["aot_autograd"]["total"]


class FlatAllReduce(Step):
    """The wire alone: one allreduce of as many bytes as the module has gradients, of which it leaves none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        sizes = [parameter.numel() for parameter in module.parameters()]
        # Zeros stay zeros, however often they are summed.
        self.flat = next(module.parameters()).new_zeros(sum(sizes))

    def run(self, batch: Batch) -> None:
        """What is timed."""
        dist.all_reduce(self.flat)


# -------------------------------------------------------------------------------------------------- communication hooks


@dataclass(frozen=True)
class Hook:
    """A communication hook by its name on the command line."""

    name: str
    # The state and the hook to register, taken from fastddp.comm_hooks, or from torch's under the same names.
    state_and_hook: Callable[[Any], tuple[object, Callable[..., Any]]]
    check: Check
    # The hook of torch that this one is held against.
    held_against: str
    # On gloo torch's PowerSGD waits for ever with several buckets under torch's DDP: it gets a single one.
    one_bucket_in_torch: bool = False
    # Whether torch's own can be measured.
    works_in_torch: Callable[[], bool] = lambda: True


def _powersgd(name: str, rank: int) -> Hook:
    def state_and_hook(hooks: Any) -> tuple[object, Callable[..., Any]]:
        # The first two steps are allreduced, as few as error feedback allows: they are warm-up here.
        state = hooks.PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        return state, hooks.powerSGD_hook

    return Hook(name, state_and_hook, RANKS_AGREE, held_against=name, one_bucket_in_torch=True)


def _stateless(name: str, check: Check, **options: Any) -> Hook:
    """One that takes no state. As many bytes travel as with fp16, or fewer: all have the same mark to beat."""
    return Hook(name, lambda hooks: (None, getattr(hooks, f"{name}_compress_hook")), check, "fp16", **options)


_HOOKS = {
    hook.name: hook
    for hook in (
        _stateless("fp16", rounded_to(torch.float16)),
        # Torch's DDP refuses it where torch was built without NCCL, whatever the backend.
        _stateless("bf16", rounded_to(torch.bfloat16), works_in_torch=lambda: dist.is_nccl_available()),
        _stateless("int8", eight_bits(1 / 254), works_in_torch=lambda: False),
        _stateless("fp8", eight_bits(1 / 28), works_in_torch=lambda: False),
    )
}
_POWERSGD = re.compile(r"powersgd([1-9]\d*)")

NO_HOOK = "none"
HOOK_NAMES = f"{NO_HOOK}, {', '.join(_HOOKS)}, powersgdN with rank N"


def hook_named(name: str) -> Hook | None:
    """The hook of a name; None for "none". Raises ValueError where there is no such hook.

    >>> hook_named("powersgd4").name, hook_named("bf16").held_against, hook_named("none")
    ('powersgd4', 'fp16', None)
    """
    if name == NO_HOOK:
        return None
    powersgd = _POWERSGD.fullmatch(name)
    if powersgd:
        return _powersgd(name, int(powersgd[1]))
    if name not in _HOOKS:
        raise ValueError(f"there is no hook {name!r}; there are {HOOK_NAMES}")
    return _HOOKS[name]


# ---------------------------------------------------------------------------------------------------------- contestants

_ONE_BUCKET_MB = float(1 << 20)

Cap = float | Literal["auto"] | None
Engine = Literal["plain", "wire", "torch", "fastddp", "replicate"]


def wrapped(module: nn.Module, engine: Engine, hook: Hook | None, options: Mapping[str, Any]) -> nn.Module:
    """A twin of the module under a DDP, or under none."""
    own = twin(module)
    if engine == "plain":
        return own
    ddp: Any
    hooks: Any
    if engine == "torch":
        ddp, hooks = TorchDDP(own, **options), torch_hooks()
    else:
        import fastddp  # here, so that torch's contestants can be measured where the extension is not built
        from fastddp import comm_hooks

        wrap: Any = fastddp.replicate if engine == "replicate" else fastddp.DistributedDataParallel
        ddp, hooks = wrap(own, **options), comm_hooks
    if hook:
        ddp.register_comm_hook(*hook.state_and_hook(hooks))
    return ddp  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Contestant:
    """A name, who it may be compared with, and how it makes its step."""

    name: str
    semantics: Semantics
    engine: Engine
    options: Mapping[str, Any] = field(default_factory=dict)
    baseline: bool = False  # one of the settings of torch's DDP that a user could choose instead
    hookable: bool = True  # can be measured with a hook too
    hook: Hook | None = None
    cap_mb: Cap = None  # of its own, whatever is asked
    by_default: bool = True  # measured where nobody is named
    compiled: bool = False  # under torch.compile, with code of its own
    by_method: bool = False  # not by the forward
    optimize_ddp: bool = True  # dynamo's setting; False: it does not cut torch's DDP into a graph for each bucket

    @property
    def check(self) -> Check:
        """What is demanded of its gradients."""
        if self.hook:
            return self.hook.check
        return COMPILED if self.compiled else EXACT

    @property
    def hook_name(self) -> str:
        """As on the command line."""
        return self.hook.name if self.hook else NO_HOOK

    @property
    def held_against(self) -> str | None:
        """The name of the contestant with torch's hook."""
        return f"{REFERENCE}+{self.hook.held_against}" if self.hook else None

    def with_hook(self, hook: Hook) -> Contestant:
        """The same with a hook."""
        return replace(self, name=f"{self.name}+{hook.name}", hook=hook)

    @property
    def exists(self) -> bool:
        """Whether its library can run it."""
        return self.hook is None or self.engine != "torch" or self.hook.works_in_torch()

    def bucket_cap_mb(self, asked: float | None) -> Cap:
        """The cap that it gets; None is its own default."""
        if self.cap_mb is not None:
            return self.cap_mb
        is_one = self.engine == "torch" and self.hook is not None and self.hook.one_bucket_in_torch
        return _ONE_BUCKET_MB if is_one else asked

    def step(self, module: nn.Module, bucket_cap_mb: float | None) -> Step:
        """Ready to run on a twin of the module."""
        if self.engine == "wire":
            return FlatAllReduce(module)
        options = {"bucket_cap_mb": self.bucket_cap_mb(bucket_cap_mb)} | dict(self.options)
        own = wrapped(with_own_code(module) if self.compiled else module, self.engine, self.hook, options)
        if self.compiled:
            return CompiledStep(own, self.optimize_ddp)
        return MethodStep(own) if self.by_method else Step(own)


def twin(module: nn.Module) -> nn.Module:
    """A second module with parameters of its own (so with gradients and hooks of its own) in the same memory.

    No step of the bench changes a parameter, and nine copies of GPT-2 on each of two ranks would not fit many machines.
    """
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, shared)


def with_own_code(module: nn.Module) -> nn.Module:
    """The same module, whose classes have forwards of their own.

    torch.compile keeps what it has compiled with a function's code, and asks nobody which DDP it was compiled for: two
    contestants with the same code would share graphs.
    """
    own = twin(module)
    classes: dict[type, type] = {}
    for part in own.modules():
        kind = type(part)
        if kind not in classes:
            old: Any = kind.forward
            code = types.FunctionType(
                old.__code__.replace(), old.__globals__, old.__name__, old.__defaults__, old.__closure__
            )
            classes[kind] = type(kind.__name__, (kind,), {"forward": code})
        part.__class__ = classes[kind]
    return own


def torch_hooks() -> SimpleNamespace:
    """Torch's hooks under the names that fastddp.comm_hooks has them."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    return SimpleNamespace(**{**vars(default_hooks), **vars(powerSGD_hook)})


def torch_takes(options: Collection[str]) -> bool:
    """Whether the DDP of this torch has these options: batched_grad_copy is younger than the oldest one supported."""
    return set(options) <= inspect.signature(TorchDDP.__init__).parameters.keys()


# The one that every ratio is compared with, and every gradient that is compared with another; always measured.
REFERENCE = "torch"

VIEW = {"gradient_as_bucket_view": True}
BATCHED = {"batched_grad_copy": True}
_SELDOM: dict[str, Any] = {"by_default": False}
_ONCE: dict[str, Any] = {"hookable": False}

_ALL = (
    Contestant("alone", "floor", "plain", **_ONCE),
    Contestant("flat-allreduce", "floor", "wire", **_ONCE),
    Contestant(REFERENCE, "default", "torch", baseline=True),
    # The same once more: how far its ratio is from 1 is the noise floor of the whole table.
    Contestant("torch-again", "default", "torch", **_ONCE),
    # Only under torch.compile is it another one.
    Contestant("torch-whole", "default", "torch", baseline=True, optimize_ddp=False, **_ONCE, **_SELDOM),
    Contestant("torch-batched", "default", "torch", BATCHED, baseline=True),
    Contestant("torch-view", "view", "torch", VIEW, baseline=True),
    Contestant("torch-view-batched", "view", "torch", VIEW | BATCHED, baseline=True),
    Contestant("fastddp", "default", "fastddp"),
    Contestant("fastddp-again", "default", "fastddp", **_ONCE, **_SELDOM),
    Contestant("fastddp-view", "view", "fastddp", VIEW),
    # fastddp.replicate, by the module's forward and by another method.
    Contestant("replicate", "default", "replicate", **_SELDOM),
    Contestant("replicate-by-method", "default", "replicate", by_method=True, **_SELDOM),
    # The baseline of bench.pays once more, for its noise floor.
    Contestant("fastddp-bf16-again", "default", "fastddp", hook=hook_named("bf16"), **_ONCE, **_SELDOM),
    # NCCL's registered memory, and its symmetric windows. For several GPUs: one takes neither. The zero-CTA policy of
    # windows does nothing for an allreduce, so it takes a hook of 8 bits to see it.
    Contestant("fastddp-registered", "default", "fastddp", {"wire_memory": "registered"}, **_SELDOM),
    Contestant("fastddp-symmetric", "default", "fastddp", {"wire_memory": "symmetric"}, **_SELDOM),
    # For several ranks on each of several nodes: --ranks-per-node.
    Contestant("fastddp-nodes", "default", "fastddp", {"hierarchy": "node"}, **_SELDOM),
    # Of one DDP, only how buckets are cut.
    *(
        Contestant(f"fastddp-{cap}", "default", "fastddp", cap_mb=cap, **_ONCE, **_SELDOM)
        for cap in ("auto", 1, 5, 25, 100)  # MiB
    ),
)
CONTESTANTS = tuple(one for one in _ALL if one.engine != "torch" or torch_takes(one.options))


def line_up(names: Sequence[str], hooks: Sequence[str], compiled: bool = False) -> list[Contestant]:
    """Those of CONTESTANTS with these names, with each of these hooks; the reference, which has none, is always there.

    What is no DDP, and torch-again, are there once, without a hook. With a hook of torch comes the one that it is held
    against.

    >>> [contestant.name for contestant in line_up(["alone", "torch", "fastddp"], ["fp16"])]
    ['alone', 'torch', 'torch+fp16', 'fastddp+fp16']
    >>> [contestant.name for contestant in line_up(["fastddp"], ["none", "bf16"])]
    ['torch', 'fastddp', 'fastddp+bf16']
    """
    everyone = [replace(contestant, compiled=compiled) for contestant in CONTESTANTS]
    chosen = [contestant for contestant in everyone if contestant.name in names]
    plain = [c for c in chosen if NO_HOOK in hooks or not c.hookable]
    result = [c for c in everyone if c in plain or c.name == REFERENCE]
    for hook in filter(None, map(hook_named, hooks)):
        for contestant in (c for c in chosen if c.hookable):
            if contestant.name == REFERENCE:
                result.append(contestant.with_hook(_HOOKS.get(hook.held_against, hook)))
            result.append(contestant.with_hook(hook))
    return list({contestant.name: contestant for contestant in result if contestant.exists}.values())
