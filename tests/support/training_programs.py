"""Training programs drawn from a seed: what a loop of a user's may do. ``training_execution.py`` runs them.

``programs.py`` has programs about gradients. These are about what an optimizer makes of them, whatever it is, wherever
its parts are, and however gradients are set to zero.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

Zeroing = Literal[
    "optimizer", "optimizer, in place", "model", "model, in place", "module, in place", "None", "zero_", "zeros"
]
"""By the optimizer's, the wrapper's or the module's method, or for each parameter."""
Usage = Literal["all", "find_unused_parameters", "static_graph"]
Hook = Literal["none", "fp16", "bf16", "int8", "PowerSGD"]
Kind = Literal["SGD", "momentum", "AdamW", "Adagrad", "Lion", "KeepsTwo", "LARS"]
WHOLE: tuple[Kind, ...] = ("KeepsTwo", "LARS")
"""They need whole parameters."""
SHAPES = ((3,), (), (5, 4), (40,), (2, 3, 2), (9, 8), (16, 17))


class Op(NamedTuple):
    """A method of ``Oracle`` and of ``Execution``, and its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()


LOOK = Op("forward", (False, True))
"""A forward that changes nothing."""


@dataclass(frozen=True)
class TrainingProgram:
    """A model, how it is wrapped and stepped, and what is done with it."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    unused: tuple[frozenset[int], ...]
    """By rank: with a static graph, what no backward that synchronises uses."""
    usage: Usage
    view: bool
    bucket_cap_mb: float | None
    lazy_bucket_allocation: bool
    hook: Hook
    optimizer: Kind
    groups: int
    sharded: Literal["elements", "parameters"] | None
    gather: Literal["step", "forward"]
    ops: tuple[Op, ...]

    @property
    def hook_remembers(self) -> bool:
        """What averages lack, until the next step."""
        return self.hook in ("int8", "PowerSGD")


def _subset(draw: random.Random, number: int, probability: float) -> frozenset[int]:
    """Of parameters, but not all of them."""
    found = frozenset(index for index in range(number) if draw.random() < probability)
    return found - {draw.randrange(number)}


def _backward(draw: random.Random, number: int, ranks: int) -> Op:
    sync = draw.random() < 0.65
    probability = draw.choice([0.0, 0.0, 0.4])
    skip = tuple(_subset(draw, number, probability) for _ in range(ranks))
    if draw.random() < 0.5:
        skip = skip[:1] * ranks
    return Op("backward", (sync, skip, draw.choice([1, 1, 1, 2]), draw.choice([0, 0, 0, 1])))


def _ops(draw: random.Random, number: int, ranks: int) -> list[Op]:
    kind = draw.randrange(20)
    if kind < 8:
        return [_backward(draw, number, ranks)]
    if kind < 12:
        end = [Op("step", (draw.random() < 0.5,))]
        return end if draw.random() < 0.2 else [*end, Op("zero", (draw.choice(get_args(Zeroing)),))]
    if kind < 15:
        return [Op("zero", (draw.choice(get_args(Zeroing)),))]
    others = [
        Op("halves", (draw.randrange(1, number),)),
        LOOK,
        Op("forward", (True, True)),
        Op("forward", (True, draw.random() < 0.5)),
        Op("clip", (draw.choice([0.5, 5.0]),)),
        Op("discard"),
        Op("make_optimizer"),
        Op("save", (draw.random() < 0.5,)),
        Op("load", (draw.random() < 0.3,)),
        Op("load", (False,)),
    ]
    if kind == 15:
        failing = Op("fail", (draw.random() < 0.3,))
        return [failing] if draw.random() < 0.3 else [failing, draw.choice(others)]
    return [draw.choice(others)]


def draw_program(seed: int, ranks: int) -> TrainingProgram:
    """The same for the same arguments."""
    draw = random.Random(seed)
    number = draw.randint(3, 6)
    hook: Hook = draw.choice(["none", "none", "none", *get_args(Hook)])
    draw.randrange(6)  # decides nothing any more; seeds that have found faults still draw what found them
    sharded = None if hook == "PowerSGD" else draw.choice([None, "elements", "parameters"])
    kinds = [kind for kind in get_args(Kind) if sharded != "elements" or kind not in WHOLE]
    dtype = draw.choice(["float64", "float64", "float32"])
    if hook in ("fp16", "bf16"):
        kinds = ["SGD"]  # others are far off for a small rounding
    elif hook != "none":
        kinds = ["SGD", "momentum", "AdamW"]
    usage: Usage = draw.choice(get_args(Usage))
    first = [[Op(name)] if draw.random() < 0.7 else [] for name in ("make_optimizer", "register_hook")]
    ops = [op for some in first for op in some]
    for _ in range(draw.randint(4, 16)):
        ops += _ops(draw, number, ranks)
    for name, some in zip(("make_optimizer", "register_hook"), first, strict=True):
        if not some:
            ops.insert(draw.randint(0, min(4, len(ops))), Op(name))
    return TrainingProgram(
        shapes=tuple(draw.choice(SHAPES) for _ in range(number)),
        dtype=dtype if hook == "none" else "float32",
        unused=tuple(_subset(draw, number, 0.3) for _ in range(ranks)),
        usage=usage,
        view=draw.random() < 0.5,
        bucket_cap_mb=draw.choice([None, 1e-6, 0.0002, 0.0005]),
        lazy_bucket_allocation=draw.random() < 0.2,
        hook=hook,
        optimizer=draw.choice(kinds),
        groups=draw.randint(1, 2),
        sharded=sharded,
        gather=draw.choice(["step", "forward"]),
        ops=tuple(ops),
    )
