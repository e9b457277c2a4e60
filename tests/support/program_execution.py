"""How two wrappers are driven by one random training program (``programs.py``) and compared. Where gradients are
compressed ``program_errors.py`` compares.

Gradients are demanded to be equal bit for bit over two or four ranks, since all sums are exact (``program_models.py``).
Over three ranks they may be a few roundings apart, and so may weighted ones in 16 bits, or over four ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fake_cuda
import fastddp
from fastddp import comm_hooks
from fastddp.comm_hooks import BlockState
from fastddp.window.gradient_average import GradientAverage
from hooks_by_name import averages
from models import Expected
from nodes import by_reads
from outputs import SEEN, loss_in
from program_models import MOST_ROWS, Linear
from program_oracle import Oracle
from programs import (
    EIGHT_BITS,
    METRIC,
    SIXTEEN_BITS,
    Backward,
    Change,
    Evaluate,
    Op,
    Options,
    Program,
    Raise,
    Step,
    TwoBackwards,
    Uneven,
    WrapAgain,
    Write,
)

LEARNING_RATE = 0.5


def gradient_average(module: Linear, options: Options) -> GradientAverage:
    if options.gradient_average == "callable":
        return lambda: module.weight_in_average.item()
    return module.weight_in_average if options.gradient_average == "tensor" else options.gradient_average


@functools.lru_cache(maxsize=1)
def two_nodes(group: dist.ProcessGroup) -> DeviceMesh:
    """Two nodes of two ranks, made once for the process group of a call."""
    return init_device_mesh("cpu", (2, 2))


def wrap_in_fastddp(module: Linear, options: Options) -> nn.Module:
    module.output = module.program.output
    cap = options.bucket_cap_mb
    parameters = [layers[0].parameter for layers in module.layers]  # type: ignore[index]
    delayed = [(f"number {index}", parameters[index]) for index in options.delayed]
    model = fastddp.DistributedDataParallel(
        module,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        forward_sync_buffers=options.forward_sync_buffers,
        bucket_cap_mb=None if isinstance(cap, tuple) else cap,  # type: ignore[arg-type]
        bucket_cap_mb_list=list(cap) if isinstance(cap, tuple) else None,  # type: ignore[arg-type]
        find_unused_parameters=options.usage not in ("all", "static_graph"),
        static_graph=options.usage == "static_graph",
        skip_all_reduce_unused_params=options.usage == "skip_all_reduce_unused_params",
        gradient_average=gradient_average(module, options),
        delay_all_reduce_named_params=delayed or None,
        param_to_hook_all_reduce=parameters[options.awaited] if delayed else None,
        main_grads=None if options.main_gradients == "no" else options.main_gradients,
        hierarchy=two_nodes(dist.group.WORLD) if options.two_levels else None,
        lazy_bucket_allocation=options.lazy_bucket_allocation,
        watch=fastddp.Watch(audit_every=options.audit_every),
    )
    if options.hook in ("allreduce", "python"):
        model.register_comm_hook(None, averages if options.hook == "python" else allreduce_hook)
    elif options.hook in SIXTEEN_BITS:
        model.register_comm_hook(None, getattr(comm_hooks, f"{options.hook}_compress_hook"))
    elif options.hook in EIGHT_BITS:  # what they leave out stays with the module, whoever wraps it
        state = getattr(module, "block_state", None) or BlockState(fp8="e5m2" if options.hook == "e5m2" else "e4m3")
        module.block_state = state
        is_int8 = options.hook == "int8"
        model.register_comm_hook(state, comm_hooks.int8_compress_hook if is_int8 else comm_hooks.fp8_compress_hook)
    return model


def blocks_of(model: fastddp.DistributedDataParallel) -> BlockState | None:
    """What remembers the errors of 8 bits; None: nothing does."""
    state = model._comm_hook[0] if model._comm_hook else None
    return state if isinstance(state, BlockState) else None


def wrap_in_reference(module: Linear, options: Options, reference: type[Oracle] = Oracle) -> nn.Module:
    if options.main_gradients != "no":
        for parameter in module.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.grad_dtype = torch.float32
    return reference(
        module,
        gradient_average(module, options),
        forward_sync_buffers=options.forward_sync_buffers,
        find_unused_parameters=options.usage != "all",
    )


Wrap = Callable[[Linear, Options], nn.Module]


@dataclass
class Execution:
    """One wrapped model under way. Two of them that run one program decide alike what is legal."""

    program: Program
    rank: int
    wrap: Wrap
    device: str = "cpu"
    forwards: int = 0
    received: set[int] = field(default_factory=set)  # parameters that received a gradient in this window
    begun: bool = False  # whether a backward of this window has been, on whatever parameters
    armed: bool = False  # whether a forward of it was a metric's, so that any backward synchronises
    raised: tuple[Sequence[int], str] = ((), "")  # on which ranks the last one did that was to raise, and where

    def __post_init__(self) -> None:
        self.module = Linear(self.program, self.rank, self.device)
        self._wrap_module()
        self.trainable = {index for index, spec in enumerate(self.program.parameters) if not spec.frozen}
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)

    def _wrap_module(self) -> None:
        self.model = self.wrap(self.module, self.program.options)
        self._end_window()
        self.armed = False

    def _wrap_again(self) -> None:
        options = self.program.options
        if options.main_gradients == "main_grad" or options.gradient_average == "sum":
            self.zero_gradients()  # the next wrapper makes others, or does not know that they are a sum
        if isinstance(self.model, Oracle):
            self.model.end_window()  # its hooks stay, and would add up once more after a metric
        del self.model
        self._wrap_module()

    def parameter(self, index: int) -> Tensor:
        layer = self.module.layers[index][0]  # type: ignore[index]
        return layer.parameter  # type: ignore[return-value]

    @property
    def keeps_main_gradients(self) -> bool:
        return self.program.options.main_gradients == "main_grad" and not isinstance(self.model, Oracle)

    def gradient(self, index: int) -> Tensor | None:
        parameter = self.parameter(index)
        return getattr(parameter, "main_grad", None) if self.keeps_main_gradients else parameter.grad

    def zero_gradients(self, set_to_none: bool = True) -> None:
        if self.keeps_main_gradients:
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def _step(self) -> None:
        for index in self.trainable if self.keeps_main_gradients else ():  # as an optimizer would that looks there
            self.parameter(index).sub_(self.gradient(index), alpha=LEARNING_RATE)
        if not self.keeps_main_gradients:
            self.optimizer.step()

    def run(self, op: Op) -> None:
        match op:
            case Backward():
                self._run_backward(op)
            case TwoBackwards():
                self._run_two_backwards(op)
            case Raise():
                self._raise(op)
            case Change():
                self._change_gradients(op.how)
            case Step():
                self._step()
            case Write():
                self.parameter(op.parameter).detach().mul_(0.5)
            case Evaluate(metric=False):
                self._evaluate()
            case Evaluate():
                self._forward(self._legal(Backward()))
                self.armed = True
            case WrapAgain():
                self._wrap_again()
            case Uneven():
                self._run_uneven(op)

    def _change_gradients(self, how: str) -> None:
        if how == "discarded" and not isinstance(self.model, Oracle):
            self.model.discard_step()  # type: ignore[operator]
        if how in ("none", "zero", "discarded"):
            self.zero_gradients(set_to_none=how != "zero")
        if how in ("none", "discarded"):
            self._end_window()
        if how == "copies" and not self.keeps_main_gradients:
            for parameter in self.module.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        if how == "half":
            for index in self.trainable:
                if (gradient := self.gradient(index)) is not None:
                    gradient.mul_(0.5)

    def _run_backward(self, op: Backward) -> None:
        syncs = op.sync or self.armed
        skip = self._legal(replace(op, sync=syncs))
        # Each use in a reentrant checkpoint is a gradient of its own, and the number of them must not change.
        several = self.program.checkpointed != "reentrant"
        with nullcontext() if op.sync else self.model.no_sync():  # type: ignore[operator]
            losses = [self._forward(skip) for _ in range(op.forwards if several else 1)]
        with self.model.no_sync():  # type: ignore[operator]
            losses += [self._forward(skip) for _ in range(op.local_forwards if several else 0)]
        if op.evaluate:
            self._evaluate()
        self._backward(sum(losses, start=torch.zeros((), device=self.device)), self.trainable - skip, ends_window=syncs)

    def _run_two_backwards(self, op: TwoBackwards) -> None:
        first = {index for index in self.trainable if index < op.split}
        second = self.trainable - first
        ends_early = self.program.options.usage != "all"
        if self.begun or not first or not second or (ends_early and self._needed):
            self._run_backward(Backward())
            return
        if ends_early and self.program.unused_by in (None, self.rank):
            first, second = first - self.program.unused, second - self.program.unused
        losses = [self._forward(self.trainable - first), self._forward(self.trainable - second)]
        self._backward(losses[0], first, ends_window=ends_early)
        self._backward(losses[1], second, ends_window=True)

    def _run_uneven(self, op: Uneven) -> None:
        if self.armed:  # a rank without inputs would not know
            self._run_backward(Backward())
        before = self.forwards
        oracle = self.model if isinstance(self.model, Oracle) else None
        with nullcontext() if oracle else self.model.join(op.divide_by_initial_world_size):  # type: ignore[operator]
            for number, backward in enumerate(op.backwards[: max(op.batches)]):
                self.forwards = before + 2 * number  # on ranks too that have not run the others
                ranks = [rank for rank, batches in enumerate(op.batches) if batches > number]
                if oracle:
                    oracle.begin_batch(ranks, op.divide_by_initial_world_size)
                if self.rank in ranks:
                    self._train(backward)
                elif oracle:  # what it does in place of that
                    oracle.take_part(backward.sync)
                    if backward.evaluate:
                        oracle.take_part(synchronises=False)
        if oracle:
            oracle.end_batches([rank for rank, batches in enumerate(op.batches) if batches == max(op.batches)])
        self.forwards = before + 2 * len(op.backwards)
        self.run(Change("none"))  # those of ranks that ran out of inputs are old

    def _train(self, op: Backward) -> None:
        self._run_backward(replace(op, forwards=1, local_forwards=0, evaluate=False))
        if op.sync:
            self.run(Step())
            self.run(Change("none"))
        if op.evaluate:
            self._evaluate()

    def _raise(self, op: Raise) -> None:
        is_reference = isinstance(self.model, Oracle)
        raising = range(dist.get_world_size()) if op.rank is None else [op.rank]
        where = op.where if all(map(self._is_noticed_on, raising)) else "forward"
        self.raised = (raising, where)
        # In backward, the reference's other ranks would wait for this one.
        everywhere = where == "forward" or is_reference
        # Of the ranks that did not raise, fastddp's learn of it and raise, too.
        is_healthy = not (everywhere or self.rank in raising)
        told = False
        try:
            fails = where if everywhere or self.rank in raising else ""
            self._backward(self._forward(self._legal(Backward()), fails), set(), ends_window=True)
        except Expected:
            pass
        except RuntimeError:
            assert is_healthy
            told = True
        if is_reference and where == "backward":
            self.model.end_window()  # type: ignore[operator]
        self.zero_gradients()
        self._end_window()
        if is_healthy and not told:  # on a device with streams a rank learns it at its next forward, if by then it can
            fake_cuda.synchronize()
            with pytest.raises(RuntimeError, match="failed on rank"):
                self._evaluate()
            self.forwards -= 1
        self._evaluate()  # where a rank on which backward raised finds back to the others

    def _end_window(self) -> None:
        self.received.clear()
        self.begun = False

    def _is_noticed_on(self, rank: int) -> bool:
        """An exception in backward. By default the first gradient tells that there is one, as under torch's DDP.

        Where optimizers step in backward nothing can be noticed in time.
        """
        later = set(self.program.order_on(rank)[1:]) - self._always_unused(rank)
        may_repeat = not any(spec.steps_in_backward for spec in self.program.parameters)
        is_seen = self.program.options.usage != "all" and self.program.output in SEEN
        return may_repeat and (is_seen or bool(later & self.trainable))

    def _legal(self, op: Backward) -> set[int]:
        if self.program.options.usage_is_fixed:
            of_all = self._always_unused(self.rank)
            return of_all if op.sync else self._skipped(op) | (of_all if self.program.unused_by is None else set())
        if self.program.options.usage == "find_unused_parameters" and op.sync:
            return self._skipped(op) - self._needed
        if not op.sync:
            return self._skipped(op)
        return self._skipped(op) & self.received - {max(self.trainable)}  # a backward needs something to do

    def _skipped(self, op: Backward) -> set[int]:
        return set(op.skip & self.trainable) if op.skipping_rank in (None, self.rank) else set()

    def _always_unused(self, rank: int) -> set[int]:
        is_one_of_them = self.program.unused_by in (None, rank) and self.program.options.usage_is_fixed
        return set(self.program.unused & self.trainable) - self._needed if is_one_of_them else set()

    @property
    def _needed(self) -> set[int]:
        """What brings a gradient in each backward that synchronises, where nothing else shows that there is one."""
        is_seen = self.program.output in SEEN and METRIC not in self.program.ops
        return set() if is_seen else {max(self.trainable)}

    def _forward(self, skip: Iterable[int], fails: str = "") -> Tensor:
        self.forwards += 1
        self.module.begin(self.forwards)
        return loss_in(self.model(self.forwards, skip, fails))

    def _evaluate(self) -> None:
        with torch.no_grad():
            self._forward(())

    def _backward(self, loss: Tensor, used: set[int], ends_window: bool) -> None:
        loss.backward()
        self.received |= used
        self.begun = True
        if ends_window:
            self._end_window()
            self.armed = False


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """So that whoever reads what nobody has written is seen, which by chance is zero most of the time."""
    torch.use_deterministic_algorithms(True)  # which fills memory too, unless torch was told not to
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@new_memory_is_nan()
def differences(rank: int, program: Program, wrap: Wrap = wrap_in_fastddp, device: str = "cpu") -> list[str]:
    """Where the model under ``wrap`` was not as under the reference, after each op; empty if all is well."""
    candidate = Execution(program, rank, wrap, device)
    reference = Execution(program, rank, wrap_in_reference, device)
    found = compare(candidate, reference, "construction")
    with by_reads() if program.options.reads else nullcontext():
        for number, op in enumerate(program.ops):
            candidate.run(op)
            reference.run(op)
            found += compare(candidate, reference, f"op {number}, {op}")
    return found[:5]


def compare(candidate: Execution, reference: Execution, when: str) -> list[str]:
    found = []
    for index in range(len(candidate.program.parameters)):
        error = rounding(candidate, index)
        found.append(difference(f"parameter {index}", candidate.parameter(index), reference.parameter(index), error))
        found.append(difference(f"gradient {index}", *gradients(candidate, reference, index), error))
    for name, buffer in candidate.module.named_buffers():
        found.append(difference(f"buffer {name}", buffer, reference.module.get_buffer(name), 0))
    return [f"after {when}: {text}" for text in found if text]


def gradients(candidate: Execution, reference: Execution, index: int) -> tuple[Tensor | None, Tensor | None]:
    """Those of a parameter; main gradients are never None."""
    ours, theirs = candidate.gradient(index), reference.gradient(index)
    if theirs is None and ours is not None and candidate.program.options.main_gradients == "main_grad":
        theirs = torch.zeros_like(ours)
    return ours, theirs


def rounding(execution: Execution, index: int) -> float:
    """How far a parameter, or its gradient, may be from the reference's: a few roundings, where sums are not exact."""
    spec, average = execution.program.parameters[index], execution.program.options.gradient_average
    world_size = dist.get_world_size()
    is_uneven = any(isinstance(op, Uneven) for op in execution.program.ops)
    bits_to_spare = torch.finfo(getattr(torch, spec.dtype)).bits > 16
    is_mean = average in ("mean", "sum") and not is_uneven
    is_exact = world_size in (2, 4) if is_mean else world_size == 2 and bits_to_spare
    return 0.0 if is_exact else 4 * torch.finfo(getattr(torch, spec.dtype)).eps * magnitude(execution, index)


def magnitude(execution: Execution, index: int) -> float:
    """Bounds what the elements of a parameter's gradient can have added up to."""
    is_sum = execution.program.options.gradient_average == "sum"
    rows = MOST_ROWS if execution.program.parameters[index].sparse else 1
    return 2 * execution.forwards * rows * (dist.get_world_size() if is_sum else 1)


def form(tensor: Tensor) -> tuple[object, ...]:
    """Dtype, shape, and the strides that say something about the layout; which rows are there, a sparse tensor may say
    in several ways."""
    if tensor.is_sparse:
        return tensor.dtype, tensor.shape, tensor.layout
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.dtype, tensor.shape, [stride for size, stride in strides if size > 1 and tensor.numel()]


def difference(name: str, ours: Tensor | None, theirs: Tensor | None, tolerance: float) -> str:
    """In words; empty where there is none."""
    if ours is None or theirs is None:
        return "" if ours is theirs else f"{name} is {ours}, expected {theirs}"
    if form(ours) != form(theirs):
        return f"{name} is {form(ours)}, expected {form(theirs)}"
    ours, theirs = ours.detach().cpu().to_dense(), theirs.detach().cpu().to_dense()
    distance = (ours - theirs).abs()
    if bool((distance <= tolerance).all()):
        return ""
    worst = distance.flatten().nan_to_num(torch.inf).argmax()
    values = ours.flatten()[worst].item(), theirs.flatten()[worst].item()
    return f"{name} is {values[0]} at {int(worst)}, expected {values[1]}"
