"""Random training programs: what they are made of. ``program_execution.py`` runs them.

A program prints as the code that builds it, so a failure can be replayed:

    ranks.run(differences, 2, Program(...))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from hypothesis import strategies as st

from outputs import OUTPUTS, SEEN

# ------------------------------------------------------------------------------------------ what a program consists of


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. ``layout`` is an order of dimensions, or "gaps": not dense. A shared one belongs to two layers.

    ``sparse``: of an embedding, with gradients that are sparse tensors. ``steps_in_backward``: it has an optimizer that
    steps as soon as its gradient is averaged.
    """

    shape: tuple[int, ...] = (3,)
    dtype: str = "float32"
    layout: str = "row-major"
    shared: bool = False
    frozen: bool = False
    sparse: bool = False
    steps_in_backward: bool = False


Usage = Literal["all", "find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"]
Average = Literal["mean", "sum", "tensor", "callable"]
Hook = Literal["none", "allreduce", "python", "fp16", "bf16", "int8", "e4m3", "e5m2"]
EXACT: tuple[Hook, ...] = ("none", "none", "allreduce")
SIXTEEN_BITS: tuple[Hook, ...] = ("fp16", "bf16")
EIGHT_BITS: tuple[Hook, ...] = ("int8", "e4m3", "e5m2")
Sharded = Literal["no", "elements", "parameters"]
Gather = Literal["step", "forward"]


@dataclass(frozen=True)
class Options:
    """Arguments of the wrapper."""

    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | tuple[float, ...] | None = None
    forward_sync_buffers: bool = True
    hook: Hook = "none"  # "allreduce": torch's, instead of the built-in exchange
    usage: Usage = "all"
    gradient_average: Average = "mean"  # the last two: weights that differ by rank and forward
    delayed: frozenset[int] = frozenset()  # parameters whose gradients wait for that of ``awaited``
    awaited: int = 0
    main_gradients: Literal["no", "grad", "main_grad"] = "no"  # those of 16 bits are fp32, and where
    two_levels: bool = False  # two nodes of two ranks
    lazy_bucket_allocation: bool = False
    audit_every: int | None = None
    reads: bool = False  # of gradients, however few
    sharded: Sharded = "no"  # the optimizer
    gather: Gather = "step"
    parameter_wire: bool = False  # fp32 parameters travel as bf16

    @property
    def usage_is_fixed(self) -> bool:
        """Whether every step has to use what the first one used."""
        return self.usage in ("static_graph", "skip_all_reduce_unused_params")


@dataclass(frozen=True)
class Backward:
    """Some forwards, more of them under no_sync, and one backward over the sum of all losses.

    Parameters in ``skip`` are not used where that is legal: always under no_sync; in a backward that synchronises any
    with ``find_unused_parameters``, the program's own choice where that must not change, and else only those that
    received a gradient in this window already. ``skipping_rank`` limits it to one rank.
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
class Raise:
    """An exception in forward, on all ranks, or in the middle of backward, on one or all; then a new start."""

    where: Literal["forward", "backward"] = "backward"
    rank: int | None = None


@dataclass(frozen=True)
class Change:
    """Of gradients, which become none, or zero; or half, in place, as if clipped; or copies, as a library makes them
    that unscales out of place; or ``model.discard_step()`` and none, as in a step that a user skips."""

    how: Literal["none", "zero", "half", "copies", "discarded"] = "none"


@dataclass(frozen=True)
class Step:
    """An optimizer's step."""


@dataclass(frozen=True)
class Write:
    """Somebody halves one parameter in place, on all ranks."""

    parameter: int = 0


@dataclass(frozen=True)
class Save:
    """A sharded optimizer's state, whole or each rank's part, and parameters are kept."""

    whole: bool = False


@dataclass(frozen=True)
class Load:
    """What was saved last, or is saved now, comes back: into the same optimizer, or new ones of old or new wrappers."""

    into: Literal["same", "optimizer", "wrapper"] = "same"


@dataclass(frozen=True)
class Evaluate:
    """A forward without a backward: under no_grad; or that of a ``metric``, with gradients, outside of no_sync."""

    metric: bool = False


@dataclass(frozen=True)
class WrapAgain:
    """The wrapper is dropped, and its module gets another one."""


@dataclass(frozen=True)
class Uneven:
    """Training under ``join()``: backwards, and a step and new gradients after each that synchronises.

    Rank r has the first ``batches[r]`` of them. A backward is one of one forward here, as ``join`` demands: a rank
    without inputs takes part in the others' forwards and backwards in turn; and an evaluation comes after it.
    """

    backwards: tuple[Backward, ...] = (Backward(), Backward())
    batches: tuple[int, ...] = (1, 2)
    divide_by_initial_world_size: bool = True


METRIC = Evaluate(metric=True)
Op = Backward | TwoBackwards | Raise | Change | Step | Write | Save | Load | Evaluate | WrapAgain | Uneven


@dataclass(frozen=True)
class Program:
    """A model, options, and what is done with both.

    ``order`` is that in which a forward uses the parameters. ``rotated``: it begins one later on each rank.
    ``checkpointed``: activation checkpoints around each layer, reentrant ones or not. ``unused``: what no backward uses
    that synchronises, on ``unused_by`` or on all ranks, where the options demand that this stays the same. ``output``:
    in what a forward returns its loss.
    """

    parameters: tuple[ParameterSpec, ...] = (ParameterSpec(),)
    order: tuple[int, ...] = (0,)
    rotated: bool = False
    checkpointed: Literal["no", "reentrant", "not reentrant"] = "no"
    unused: frozenset[int] = frozenset()
    unused_by: int | None = None
    output: str = "tensor"  # outputs.py
    options: Options = Options()
    ops: tuple[Op, ...] = (Backward(),)

    def order_on(self, rank: int) -> tuple[int, ...]:
        first = rank % len(self.order) if self.rotated else 0
        return self.order[first:] + self.order[:first]


# -------------------------------------------------------------------------------------------------------- strategies

SHAPES: list[tuple[int, ...]] = [(3,), (), (1,), (2, 3), (4, 3, 2, 2), (0, 3), (300, 257)]
DTYPES = ["float32", "float16", "bfloat16", "float64", "complex64"]
SPARSE_DTYPES = ["float32", "float64", "bfloat16"]  # that torch can add up on the CPU
CAPS: list[float | tuple[float, ...] | None] = [None, 1e-6, 5e-5, 0.2, (1e-5, 0.3), (0.0, 1e-4, 25)]


@st.composite
def parameter_specs(draw: st.DrawFn) -> ParameterSpec:
    shape = draw(st.sampled_from(SHAPES))
    layouts = ["row-major", *(["gaps"] if shape else []), *(["reversed"] if len(shape) > 1 else [])]
    layouts += ["channels_last"] if len(shape) == 4 else []
    dtype = draw(st.sampled_from(DTYPES))
    return ParameterSpec(
        shape,
        dtype,
        draw(st.sampled_from(layouts)),
        shared=draw(st.booleans()),
        frozen=draw(st.sampled_from([False, False, False, True])),
        sparse=len(shape) == 2 and dtype in SPARSE_DTYPES and draw(st.sampled_from([False, True, True])),
        steps_in_backward=draw(st.booleans()),
    )


def backwards_of(parameters: int, world_size: int, forwards: int) -> tuple[st.SearchStrategy[Backward], ...]:
    """Those that synchronise, with up to so many forwards, and local ones."""
    rest = (
        st.booleans(),
        st.frozensets(st.integers(0, parameters - 1), max_size=parameters),
        st.none() | st.integers(0, world_size - 1),
    )
    synchronising = st.builds(Backward, st.just(True), st.integers(1, forwards), st.integers(0, forwards - 1), *rest)
    return synchronising, st.builds(Backward, st.just(False), st.integers(1, 2), st.just(0), *rest)


def ops(parameters: int, world_size: int) -> st.SearchStrategy[Op]:
    synchronising, local = backwards_of(parameters, world_size, 3)
    rank = st.none() | st.integers(0, world_size - 1)
    backwards = synchronising | local  # of which several in a row, with nothing between them, make a window
    others: list[st.SearchStrategy[Op]] = [
        st.builds(TwoBackwards, st.integers(1, parameters)),
        st.booleans().map(lambda to_none: Change("none" if to_none else "zero")),
        st.builds(Raise, st.sampled_from(["forward", "backward"]), rank),
        st.sampled_from([Step(), Evaluate(), METRIC, METRIC, Change("copies"), Change("discarded"), WrapAgain()]),
        uneven(backwards, world_size),
    ]
    return st.booleans().flatmap(lambda is_backward: backwards if is_backward else st.one_of(*others))


@st.composite
def uneven(draw: st.DrawFn, backwards: st.SearchStrategy[Backward], world_size: int) -> Uneven:
    most = draw(st.integers(1, 3))
    return Uneven(
        draw(st.tuples(*[backwards] * most)),
        draw(st.tuples(*[st.integers(0, most)] * world_size)),
        divide_by_initial_world_size=draw(st.booleans()),
    )


def main_gradients_of(parameters: Sequence[ParameterSpec]) -> list[Literal["no", "grad", "main_grad"]]:
    """What may be drawn; those in .grad take a torch that can, and 16 bits of no sparse gradient."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        return ["no"]  # nor has the reference them
    in_grad = not any(spec.sparse and spec.dtype == "bfloat16" for spec in parameters)
    return ["no", "no", "no", "no", "grad" if in_grad else "no", "main_grad"]


@st.composite
def programs(draw: st.DrawFn, world_size: int, sparse: bool = True, hooks: Sequence[Hook] = EXACT) -> Program:
    """``sparse``: whether there may be sparse gradients."""
    parameters = draw(
        st.lists(parameter_specs(), min_size=1, max_size=6).filter(lambda specs: not all(s.frozen for s in specs))
    )
    if not sparse:
        parameters = [replace(spec, sparse=False) for spec in parameters]
    if not draw(st.sampled_from([False, False, False, True])):
        parameters = [replace(spec, steps_in_backward=False) for spec in parameters]
    main_gradients = draw(st.sampled_from(main_gradients_of(parameters)))
    if main_gradients == "main_grad":  # which is for neither
        parameters = [replace(spec, sparse=False, steps_in_backward=False) for spec in parameters]
    options = Options(
        gradient_as_bucket_view=draw(st.booleans()) and main_gradients != "main_grad",
        bucket_cap_mb=draw(st.sampled_from(CAPS)),
        forward_sync_buffers=draw(st.booleans()),
        hook=draw(st.sampled_from(hooks)),
        usage=draw(st.sampled_from(["all", "find_unused_parameters", *get_args(Usage)])),
        gradient_average=draw(st.sampled_from(["mean", "mean", *get_args(Average)])),
        delayed=draw(st.just(frozenset[int]()) | st.frozensets(st.integers(0, len(parameters) - 1))),
        awaited=draw(st.sampled_from([index for index, spec in enumerate(parameters) if not spec.frozen])),
        main_gradients=main_gradients,
        two_levels=world_size == 4 and draw(st.booleans()),
        reads=hooks == EXACT and draw(st.booleans()),
    )
    checkpointed = draw(st.sampled_from(["no", "no", "reentrant", "not reentrant"]))
    if checkpointed == "reentrant" and options.usage == "all":
        parameters = [replace(spec, shared=False) for spec in parameters]  # it would have two gradients
    order = draw(st.permutations(range(len(parameters))))
    sequence = draw(st.lists(ops(len(parameters), world_size), min_size=1, max_size=9))
    unused_by = draw(st.none() | st.integers(0, world_size - 1))
    if options.usage_is_fixed and any(isinstance(op, Uneven) for op in sequence):
        # What any rank used in the first step, in which all need inputs, is used in every step, also without inputs.
        unused_by, first = None, list[Op]([Backward()])
        sequence = [each for op in sequence for each in [*(first if isinstance(op, Uneven) else []), op]]
    program = Program(
        tuple(parameters),
        tuple(order),
        rotated=draw(st.booleans()),
        checkpointed=checkpointed,
        unused=draw(st.frozensets(st.integers(0, len(parameters) - 1), max_size=len(parameters))),
        unused_by=unused_by,
        output=draw(st.sampled_from([*SEEN, *OUTPUTS])),
        options=options,
        ops=tuple(sequence),
    )
    if checkpointed != "reentrant":
        return program
    # Fastddp refuses a backward that is not seen before a checkpoint inside of it brings a gradient.
    return replace(program, output="tensor", ops=tuple(Evaluate() if op == METRIC else op for op in sequence))


@st.composite
def programs_of_accumulation(draw: st.DrawFn, world_size: int) -> Program:
    """Windows that add up what earlier ones left, scaled in place, under a hook of a user's own and an audit."""
    number = draw(st.integers(2, 5))
    shapes, dtypes = [(3,), (2, 3), (40,), (300, 257)], ["float32", "float32", "float64"]  # in which a half is exact
    spec = st.builds(ParameterSpec, st.sampled_from(shapes), st.sampled_from(dtypes), shared=st.booleans())
    synchronising, local = backwards_of(number, world_size, 2)
    between = st.sampled_from([Change("half"), Change("none"), Change("zero"), Step()])
    return Program(
        tuple(draw(st.lists(spec, min_size=number, max_size=number))),
        tuple(draw(st.permutations(range(number)))),
        rotated=draw(st.booleans()),
        options=Options(
            gradient_as_bucket_view=draw(st.sampled_from([True, True, False])),
            bucket_cap_mb=draw(st.sampled_from([0.01, 1e-6, 5e-5, None])),
            hook=draw(st.sampled_from(["python", "python", "none"])),
            usage=draw(st.sampled_from(["find_unused_parameters", "find_unused_parameters", "all"])),
            audit_every=draw(st.sampled_from([1, None])),
            reads=draw(st.booleans()),
        ),
        ops=tuple(draw(st.lists(st.one_of(synchronising, synchronising, local, between), min_size=3, max_size=12))),
    )


@st.composite
def programs_of_sharded_optimizers(draw: st.DrawFn, world_size: int, hooks: Sequence[Hook] = EXACT) -> Program:
    """Over dense parameters, beside sparse ones with an optimizer of their own, and with many steps."""
    program = draw(programs(world_size, hooks=hooks))
    other = {"complex64": "float32"} if program.options.hook == "bf16" else {}  # for which there are no complex numbers
    if program.options.hook in EIGHT_BITS:  # whose sums a part of the gradient has before they are rounded
        other = {"float16": "float32", "bfloat16": "float32"}
        # Another order makes a replicated model alone rebuild its buckets, and the error of a sum stays with its owner.
        program = replace(program, order=tuple(range(len(program.parameters))))
    wire = draw(st.sampled_from([False, False, True]))
    if wire:  # it could round real numbers only here: copies of complex ones are not written by hand
        other = {**other, "complex64": "float32"}
    parameters = [replace(s, dtype=other.get(s.dtype, s.dtype), steps_in_backward=False) for s in program.parameters]
    if draw(st.booleans()) or all(spec.frozen or spec.sparse for spec in parameters):  # then ranks share the first
        parameters[0] = replace(parameters[0], shape=SHAPES[-1], layout="reversed", frozen=False, sparse=False)
    options = program.options
    if options.main_gradients == "main_grad":
        options = replace(options, main_gradients="no")
    options = replace(
        options,
        sharded="elements"
        if options.hook in EIGHT_BITS
        else draw(st.sampled_from(["elements", "elements", "parameters"])),
        gather=draw(st.sampled_from(get_args(Gather))),
        parameter_wire=wire,
        lazy_bucket_allocation=draw(st.booleans()),
        audit_every=draw(st.sampled_from([None, None, 1])) if not options.two_levels else None,
    )
    writes = st.builds(Write, st.integers(0, len(parameters) - 1))
    saves, loads = st.builds(Save, st.booleans()), st.sampled_from([Load("same"), Load("optimizer"), Load("wrapper")])
    steps = st.just(Step())
    more = st.lists(st.one_of(steps, steps, st.just(Change("half")), writes, saves, loads), max_size=2)
    ops: list[Op] = draw(st.sampled_from([[], [Backward(), Step()]]))[:]  # so that there is state to save
    for op in program.ops:
        ops += [Backward() if isinstance(op, Uneven) else op, *draw(more)]
    return replace(program, parameters=tuple(parameters), options=options, ops=tuple(ops))
