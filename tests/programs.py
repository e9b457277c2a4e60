"""Random training programs: what they are made of, and how two wrappers are driven by one and compared.

A program prints as the code that builds it, so a failure can be replayed:

    ranks.run(differences, 2, Program(...))

Gradients are small dyadic rationals: sums and means over two or four ranks are exact in whatever order they are taken,
in every dtype, so gradients are demanded to be equal bit for bit. Over three ranks they may be a few roundings apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fastddp
from fastddp.reference import ReferenceDataParallel

# ------------------------------------------------------------------------------------------ what a program consists of


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. ``layout`` is an order of dimensions, or "gaps": not dense. A shared one belongs to two layers."""

    shape: tuple[int, ...] = (3,)
    dtype: str = "float32"
    layout: str = "row-major"
    shared: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Options:
    """Arguments of the wrapper."""

    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | tuple[float, ...] | None = None
    forward_sync_buffers: bool = True
    hook: bool = False  # torch's allreduce_hook instead of the built-in exchange


@dataclass(frozen=True)
class Backward:
    """Some forwards, more of them under no_sync, and one backward over the sum of all losses.

    Parameters in ``skip`` are not used where that is legal: always under no_sync; in a backward that synchronises only
    those that received a gradient in this window already. ``skipping_rank`` limits it to one rank.
    """

    sync: bool = True
    forwards: int = 1
    local_forwards: int = 0
    evaluate: bool = False  # a forward under no_grad before backward
    skip: frozenset[int] = frozenset()
    skipping_rank: int | None = None


@dataclass(frozen=True)
class TwoBackwards:
    """Two forwards, which use the parameters up to one and those after it; then a backward for each."""

    split: int = 1


@dataclass(frozen=True)
class ZeroGrad:
    set_to_none: bool = True


@dataclass(frozen=True)
class ReplaceGradients:
    """``p.grad = p.grad.clone()``: what a library does that unscales or clips out of place."""


@dataclass(frozen=True)
class Step:
    """An optimizer's step."""


@dataclass(frozen=True)
class Evaluate:
    """A forward under no_grad."""


@dataclass(frozen=True)
class WrapAgain:
    """The wrapper is dropped, and its module gets another one."""


Op = Backward | TwoBackwards | ZeroGrad | ReplaceGradients | Step | Evaluate | WrapAgain


@dataclass(frozen=True)
class Program:
    """A model, options, and what is done with both.

    ``order`` is that in which a forward uses the parameters. ``rotated``: it begins one later on each rank.
    """

    parameters: tuple[ParameterSpec, ...] = (ParameterSpec(),)
    order: tuple[int, ...] = (0,)
    rotated: bool = False
    options: Options = Options()
    ops: tuple[Op, ...] = (Backward(),)


# -------------------------------------------------------------------------------------------------------- strategies

SHAPES: list[tuple[int, ...]] = [(3,), (), (1,), (2, 3), (4, 3, 2, 2), (0, 3), (300, 257)]
DTYPES = ["float32", "float16", "bfloat16", "float64", "complex64"]
CAPS: list[float | tuple[float, ...] | None] = [None, 1e-6, 5e-5, 0.2, (1e-5, 0.3), (0.0, 1e-4, 25)]


@st.composite
def parameter_specs(draw: st.DrawFn) -> ParameterSpec:
    shape = draw(st.sampled_from(SHAPES))
    layouts = ["row-major", *(["gaps"] if shape else []), *(["reversed"] if len(shape) > 1 else [])]
    layouts += ["channels_last"] if len(shape) == 4 else []
    return ParameterSpec(
        shape,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(layouts)),
        shared=draw(st.booleans()),
        frozen=draw(st.sampled_from([False, False, False, True])),
    )


def ops(parameters: int, world_size: int) -> st.SearchStrategy[Op]:
    some_parameters = st.frozensets(st.integers(0, parameters - 1), max_size=parameters)
    rank = st.none() | st.integers(0, world_size - 1)
    few = st.integers(0, 2)
    synchronising = st.builds(Backward, st.just(True), st.integers(1, 3), few, st.booleans(), some_parameters, rank)
    local = st.builds(Backward, st.just(False), st.integers(1, 2), st.just(0), st.booleans(), some_parameters, rank)
    others = [st.builds(TwoBackwards, st.integers(1, parameters)), st.builds(ZeroGrad, st.booleans())]
    return st.one_of(
        synchronising, local, *others, st.sampled_from([Step(), Evaluate(), ReplaceGradients(), WrapAgain()])
    )


@st.composite
def programs(draw: st.DrawFn, world_size: int) -> Program:
    parameters = draw(
        st.lists(parameter_specs(), min_size=1, max_size=6).filter(lambda specs: not all(s.frozen for s in specs))
    )
    options = Options(
        gradient_as_bucket_view=draw(st.booleans()),
        bucket_cap_mb=draw(st.sampled_from(CAPS)),
        forward_sync_buffers=draw(st.booleans()),
        hook=draw(st.sampled_from([False, False, True])),
    )
    order = draw(st.permutations(range(len(parameters))))
    sequence = draw(st.lists(ops(len(parameters), world_size), min_size=1, max_size=9))
    return Program(tuple(parameters), tuple(order), draw(st.booleans()), options, tuple(sequence))


# ------------------------------------------------------------------------------------------------------------- models


def empty_in_layout(spec: ParameterSpec, device: str) -> Tensor:
    empty = partial(torch.empty, dtype=getattr(torch, spec.dtype), device=device)
    if spec.layout == "gaps":
        return empty(*spec.shape[:-1], 2 * spec.shape[-1] + 1)[..., : 2 * spec.shape[-1] : 2]
    if spec.layout == "reversed":
        return empty(spec.shape[::-1]).permute(*reversed(range(len(spec.shape))))
    memory_format = torch.channels_last if spec.layout == "channels_last" else torch.contiguous_format
    return empty(spec.shape, memory_format=memory_format)


def dyadic(spec: ParameterSpec, *seeds: int) -> Tensor:
    """Halves from -1 to 1, the same for the same seeds."""
    generator = torch.Generator().manual_seed(hash(seeds))
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_complex:
        return torch.randint(-2, 3, spec.shape, generator=generator).div(2).to(dtype)
    return torch.view_as_complex(torch.randint(-2, 3, (*spec.shape, 2), generator=generator).div(2))


class Layer(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter


class Linear(nn.Module):
    """The loss is the sum of all parameters, each element times a number of its own: that number is its gradient."""

    def __init__(self, program: Program, rank: int, device: str) -> None:
        super().__init__()
        self.program, self.rank, self.device = program, rank, device
        self.layers = nn.ModuleList()
        for index, spec in enumerate(program.parameters):
            values = empty_in_layout(spec, device).copy_(dyadic(spec, rank, index))
            parameter = nn.Parameter(values, requires_grad=not spec.frozen)
            self.layers.append(nn.ModuleList([Layer(parameter) for _ in range(1 + spec.shared)]))
        self.register_buffer("forwards", torch.tensor(rank, device=device))
        self.register_buffer("drifts", torch.full((2, 3), float(rank), device=device).t())

    def forward(self, number: int, skip: Iterable[int] = ()) -> Tensor:
        self.forwards += 1
        self.drifts += self.rank + 1
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        first = self.rank % len(self.program.order) if self.program.rotated else 0
        for index in self.program.order[first:] + self.program.order[:first]:
            spec = self.program.parameters[index]
            for use, layer in enumerate(self.layers[index] if index not in skip else []):
                products = layer.parameter * dyadic(spec, self.rank, number, index, use).to(self.device)
                loss = loss + (products.real if products.is_complex() else products).sum().double()
        return loss


# ---------------------------------------------------------------------------------------------------------- execution


def wrap_in_fastddp(module: nn.Module, options: Options) -> nn.Module:
    cap = options.bucket_cap_mb
    model = fastddp.DistributedDataParallel(
        module,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        forward_sync_buffers=options.forward_sync_buffers,
        bucket_cap_mb=None if isinstance(cap, tuple) else cap,  # type: ignore[arg-type]
        bucket_cap_mb_list=list(cap) if isinstance(cap, tuple) else None,  # type: ignore[arg-type]
    )
    if options.hook:
        model.register_comm_hook(None, allreduce_hook)
    return model


def wrap_in_reference(module: nn.Module, options: Options) -> nn.Module:
    return ReferenceDataParallel(module, forward_sync_buffers=options.forward_sync_buffers)


Wrap = Callable[[nn.Module, Options], nn.Module]


@dataclass
class Execution:
    """One wrapped model under way. Two of them that run one program decide alike what is legal."""

    program: Program
    rank: int
    wrap: Wrap
    device: str = "cpu"
    forwards: int = 0
    received: set[int] = field(default_factory=set)  # parameters that received a gradient in this window

    def __post_init__(self) -> None:
        self.module = Linear(self.program, self.rank, self.device)
        self._wrap_module()
        self.trainable = {index for index, spec in enumerate(self.program.parameters) if not spec.frozen}
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5)

    def _wrap_module(self) -> None:
        self.model = self.wrap(self.module, self.program.options)
        self.received.clear()

    def parameter(self, index: int) -> Tensor:
        layer = self.module.layers[index][0]  # type: ignore[index]
        return layer.parameter  # type: ignore[return-value]

    def run(self, op: Op) -> None:
        match op:
            case Backward():
                self._run_backward(op)
            case TwoBackwards():
                self._run_two_backwards(op)
            case ZeroGrad(set_to_none):
                self.optimizer.zero_grad(set_to_none)
                if set_to_none:
                    self.received.clear()
            case ReplaceGradients():
                for parameter in self.module.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            case Step():
                self.optimizer.step()
            case Evaluate():
                self._evaluate()
            case WrapAgain():
                del self.model
                self._wrap_module()

    def _run_backward(self, op: Backward) -> None:
        skip = self._legal(op)
        with nullcontext() if op.sync else self.model.no_sync():  # type: ignore[operator]
            losses = [self._forward(skip) for _ in range(op.forwards)]
        with self.model.no_sync():  # type: ignore[operator]
            losses += [self._forward(skip) for _ in range(op.local_forwards)]
        if op.evaluate:
            self._evaluate()
        self._backward(
            sum(losses, start=torch.zeros((), device=self.device)), self.trainable - skip, ends_window=op.sync
        )

    def _run_two_backwards(self, op: TwoBackwards) -> None:
        first = {index for index in self.trainable if index < op.split}
        second = self.trainable - first
        if self.received or not first or not second:
            return self._run_backward(Backward())
        losses = [self._forward(second), self._forward(first)]
        self._backward(losses[0], first, ends_window=False)
        self._backward(losses[1], second, ends_window=True)
        return None

    def _legal(self, op: Backward) -> set[int]:
        if op.skipping_rank not in (None, self.rank):
            return set()
        skip = set(op.skip & self.trainable)
        if op.sync:
            skip &= self.received
        return skip - {max(self.trainable)}  # a backward needs something to do

    def _forward(self, skip: Iterable[int]) -> Tensor:
        self.forwards += 1
        return self.model(self.forwards, skip)

    def _evaluate(self) -> None:
        with torch.no_grad():
            self._forward(())

    def _backward(self, loss: Tensor, used: set[int], ends_window: bool) -> None:
        loss.backward()
        self.received |= used
        if ends_window:
            self.received.clear()


def differences(rank: int, program: Program, wrap: Wrap = wrap_in_fastddp, device: str = "cpu") -> list[str]:
    """Where the model under ``wrap`` was not as under the reference, after each op; empty if all is well."""
    candidate = Execution(program, rank, wrap, device)
    reference = Execution(program, rank, wrap_in_reference, device)
    found = compare(candidate, reference, "construction")
    for number, op in enumerate(program.ops):
        candidate.run(op)
        reference.run(op)
        found += compare(candidate, reference, f"op {number}, {op}")
    return found[:5]


def compare(candidate: Execution, reference: Execution, when: str) -> list[str]:
    found = []
    magnitude = 2 * candidate.forwards  # bounds what the elements of a gradient can have added up to
    for index in range(len(candidate.program.parameters)):
        ours, theirs = candidate.parameter(index), reference.parameter(index)
        found.append(difference(f"parameter {index}", ours, theirs, magnitude))
        found.append(difference(f"gradient {index}", ours.grad, theirs.grad, magnitude))
    for name, buffer in candidate.module.named_buffers():
        found.append(difference(f"buffer {name}", buffer, reference.module.get_buffer(name), 0))
    return [f"after {when}: {text}" for text in found if text]


def form(tensor: Tensor) -> tuple[object, ...]:
    """Dtype, shape, and the strides that say something about the layout."""
    strides = [
        stride if size > 1 and tensor.numel() else None
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.dtype, tensor.shape, strides


def difference(name: str, ours: Tensor | None, theirs: Tensor | None, magnitude: int) -> str:
    """In words; empty where there is none. Three ranks may differ by roundings of numbers of that magnitude."""
    if ours is None or theirs is None:
        return "" if ours is theirs else f"{name} is {ours}, expected {theirs}"
    if form(ours) != form(theirs):
        return f"{name} is {form(ours)}, expected {form(theirs)}"
    ours, theirs = ours.cpu(), theirs.cpu()
    tolerance = 0.0
    if not math.log2(dist.get_world_size()).is_integer() and ours.dtype.is_floating_point | ours.dtype.is_complex:
        tolerance = 4 * torch.finfo(ours.dtype).eps * magnitude
    distance = (ours.detach() - theirs.detach()).abs()
    if bool((distance <= tolerance).all()):
        return ""
    worst = distance.flatten().nan_to_num(torch.inf).argmax()
    values = ours.flatten()[worst].item(), theirs.flatten()[worst].item()
    return f"{name} is {values[0]} at {int(worst)}, expected {values[1]}"
