"""Training programs drawn from a seed: what a loop of a user's may do. ``training_execution.py`` runs them.

``programs.py`` has programs about gradients. These are about what an optimizer makes of them, whatever it is, wherever
its parts are, and however gradients are set to zero.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

Zeroing = Literal[
    "optimizer", "optimizer, in place", "model", "model, in place", "module, in place", "None", "zero_", "zeros"
]
"""By the optimizer's, the wrapper's or the module's method, or for each parameter."""
Usage = Literal["all", "find_unused_parameters", "static_graph"]
Hook = Literal["none", "fp16", "bf16", "int8", "PowerSGD"]
Kind = Literal["SGD", "momentum", "AdamW", "Adagrad", "Lion", "Factored", "Lamb"]
WHOLE: tuple[Kind, ...] = ("Factored", "Lamb")
"""They need whole parameters."""
SHAPES = ((3,), (), (5, 4), (40,), (2, 3, 2), (9, 8), (16, 17))


@dataclass(frozen=True)
class Backward:
    """Forwards and a backward over the sum of their losses. ``skip``: by rank, parameters that it does not use, where
    that is legal. ``local_forwards``: before the others, under no_sync.
    """

    sync: bool
    skip: tuple[frozenset[int], ...]
    forwards: int = 1
    local_forwards: int = 0


@dataclass(frozen=True)
class Halves:
    """Two forwards, of the parameters up to one and of the others; then a backward for each."""

    split: int


@dataclass(frozen=True)
class Forward:
    """A forward without a backward."""

    with_gradients: bool
    sync: bool = True


@dataclass(frozen=True)
class Fail:
    """A backward that raises on all ranks; then gradients are removed. ``repairs``: the next forward comes at once."""

    repairs: bool


@dataclass(frozen=True)
class Zero:
    """Gradients are set to zero."""

    how: Zeroing


@dataclass(frozen=True)
class Step:
    """An optimizer's step. ``looks``: whether parameters are read at once."""

    looks: bool


@dataclass(frozen=True)
class Clip:
    """The norm of all gradients is limited."""

    norm: float


@dataclass(frozen=True)
class Discard:
    """A step is not taken, and the model is told."""


@dataclass(frozen=True)
class MakeOptimizer:
    """Another one, which knows nothing of the one before, if there was one."""


@dataclass(frozen=True)
class RegisterHook:
    """The program's."""


@dataclass(frozen=True)
class Save:
    """Parameters and the optimizer's state."""

    whole: bool


@dataclass(frozen=True)
class Load:
    """What was saved, into the optimizer or into another one."""

    into_another: bool


Op = Backward | Halves | Forward | Fail | Zero | Step | Clip | Discard | MakeOptimizer | RegisterHook | Save | Load


@dataclass(frozen=True)
class TrainingProgram:
    """A model, how it is wrapped and stepped, and what is done with it."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float64"
    unused: tuple[frozenset[int], ...] = ()
    """By rank: with a static graph, what no backward that synchronises uses."""
    usage: Usage = "all"
    view: bool = False
    bucket_cap_mb: float | None = None
    lends_wires: bool = False
    main_grads: Literal["grad", "main_grad"] | None = None
    hook: Hook = "none"
    optimizer: Kind = "SGD"
    groups: int = 1
    sharded: Literal["elements", "parameters"] | None = None
    gather: Literal["step", "forward"] = "step"
    ops: tuple[Op, ...] = ()


def _subset(draw: random.Random, number: int, probability: float) -> frozenset[int]:
    """Of parameters, but not all of them."""
    found = frozenset(index for index in range(number) if draw.random() < probability)
    return found - {draw.randrange(number)}


def _backward(draw: random.Random, number: int, ranks: int) -> Backward:
    sync = draw.random() < 0.65
    probability = draw.choice([0.0, 0.0, 0.4])
    skip = tuple(_subset(draw, number, probability) for _ in range(ranks))
    if draw.random() < 0.5:
        skip = skip[:1] * ranks
    return Backward(sync, skip, draw.choice([1, 1, 1, 2]), draw.choice([0, 0, 0, 1]))


def _op(draw: random.Random, number: int, ranks: int) -> list[Op]:
    kind = draw.randrange(20)
    if kind < 8:
        return [_backward(draw, number, ranks)]
    if kind < 12:
        end: list[Op] = [Step(draw.random() < 0.5)]
        return end if draw.random() < 0.2 else [*end, Zero(draw.choice(get_args(Zeroing)))]
    if kind < 15:
        return [Zero(draw.choice(get_args(Zeroing)))]
    others: list[Op] = [
        Halves(draw.randrange(1, number)),
        Forward(with_gradients=False),
        Forward(with_gradients=True),
        Forward(with_gradients=True, sync=draw.random() < 0.5),
        Clip(draw.choice([0.5, 5.0])),
        Discard(),
        MakeOptimizer(),
        Save(draw.random() < 0.5),
        Load(draw.random() < 0.3),
        Load(False),
    ]
    if kind == 15:
        failing = Fail(draw.random() < 0.3)
        return [failing] if draw.random() < 0.3 else [failing, draw.choice(others)]
    return [draw.choice(others)]


def draw_program(seed: int, ranks: int) -> TrainingProgram:
    """The same for the same arguments."""
    draw = random.Random(seed)
    number = draw.randint(3, 6)
    hook: Hook = draw.choice(["none", "none", "none", *get_args(Hook)])
    main_grads = draw.choice([None, None, None, None, "grad", "main_grad"])
    if main_grads == "main_grad" and hook in ("int8", "PowerSGD"):
        main_grads = None  # hooks hear of no optimizer
    sharded = None if hook == "PowerSGD" or main_grads == "main_grad" else draw.choice([None, "elements", "parameters"])
    kinds = [kind for kind in get_args(Kind) if sharded != "elements" or kind not in WHOLE]
    dtype = "bfloat16" if main_grads == "grad" and hook == "none" else draw.choice(["float64", "float64", "float32"])
    if dtype == "bfloat16" or hook in ("fp16", "bf16"):
        kinds = ["SGD"]  # others are far off for a small rounding
    elif hook != "none":
        kinds = ["SGD", "momentum", "AdamW"]
    if hook != "none":
        dtype = "float32"
    usage: Usage = draw.choice(get_args(Usage))
    made = [MakeOptimizer()] if draw.random() < 0.7 else []
    hooked = [RegisterHook()] if draw.random() < 0.7 else []
    ops: list[Op] = [*made, *hooked]
    for _ in range(draw.randint(4, 16)):
        ops += _op(draw, number, ranks)
    for late in [*([] if made else [MakeOptimizer()]), *([] if hooked else [RegisterHook()])]:
        ops.insert(draw.randint(0, min(4, len(ops))), late)
    return TrainingProgram(
        shapes=tuple(draw.choice(SHAPES) for _ in range(number)),
        dtype=dtype,
        unused=tuple(_subset(draw, number, 0.3) for _ in range(ranks)),
        usage=usage,
        view=draw.random() < 0.5 and main_grads is None,
        bucket_cap_mb=draw.choice([None, 1e-6, 0.0002, 0.0005]),
        lends_wires=draw.random() < 0.2,
        main_grads=main_grads,
        hook=hook,
        optimizer=draw.choice(kinds),
        groups=draw.randint(1, 2),
        sharded=sharded,
        gather=draw.choice(["step", "forward"]),
        ops=tuple(ops),
    )
