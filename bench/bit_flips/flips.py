"""Which bits flip, and where: targets, precisions, and the seeded choice of everything else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

FIRST_STEP = 3  # buckets have been rebuilt, optimizers have their state
FIRST_STEPS = 4  # a flip is in one of so many

KINDS = ("sign", "high exponent", "low exponent", "high mantissa", "low mantissa")
HIGH_MANTISSA, LOW_MANTISSA = KINDS[-2:]

BITS: dict[torch.dtype, tuple[tuple[int, ...], ...]] = {  # of each kind
    torch.float32: ((31,), (30, 29, 27), (24, 23), (22, 20), (1, 0)),
    torch.bfloat16: ((15,), (14, 13, 11), (8, 7), (6, 5), (1, 0)),
    torch.float16: ((15,), (14, 13), (11, 10), (9, 8), (1, 0)),
}


@dataclass(frozen=True)
class Precision:
    """What parameters are, and what travels."""

    name: str
    parameters: torch.dtype
    wire: torch.dtype


FP32 = Precision("fp32", torch.float32, torch.float32)
BF16 = Precision("bf16", torch.bfloat16, torch.bfloat16)
BF16_WIRE = Precision("bf16 wire", torch.float32, torch.bfloat16)
FP16_WIRE = Precision("fp16 wire", torch.float32, torch.float16)


@dataclass(frozen=True)
class Target:
    """What a flipped bit is a bit of."""

    name: str
    about: str
    precisions: tuple[Precision, ...]
    draws: int  # flips of each bit and precision
    why_not: str = ""
    """What is true of those that are not found. Empty: each has to be found, unless it has no effect, or heals."""
    makes_ranks_differ: bool = False  # whether what it changes is on one rank alone


_IN_MEMORY, _TRAVELLING = (FP32, BF16), (FP32, BF16_WIRE, FP16_WIRE)  # the wire has what flips, in both

LOCAL_GRADIENT = Target(
    "gradient, before the sum",
    "of one rank, in memory, before it is packed",
    _IN_MEMORY,
    draws=3,
    why_not="an honest input to the sum: all ranks take the same step",
)
BACK = Target(
    "wire, back to a rank",
    "of the sum, as it comes to one rank",
    _TRAVELLING,
    draws=2,
    makes_ranks_differ=True,
)
AVERAGED_GRADIENT = Target(
    "gradient, after the sum",
    "of one rank, in memory, before the optimizer's step",
    _IN_MEMORY,
    draws=3,
    makes_ranks_differ=True,
)
PARAMETER = Target("parameter", "of one rank, between two steps", _IN_MEMORY, draws=3, makes_ranks_differ=True)
STATE = Target("optimizer state", "of one rank, between two steps", _IN_MEMORY, draws=3, makes_ranks_differ=True)
STATE_NOT_AUDITED = Target(
    "state, not audited",
    "of one rank, between two steps, without audit(optimizer)",
    _IN_MEMORY,
    draws=2,
    why_not="it is not compared, and has not changed the parameter",
    makes_ranks_differ=True,
)
TARGETS = (LOCAL_GRADIENT, BACK, AVERAGED_GRADIENT, PARAMETER, STATE, STATE_NOT_AUDITED)


@dataclass(frozen=True)
class Flip:
    """One bit that flips on one rank."""

    target: Target
    precision: Precision
    kind: str
    bit: int
    ranks: int
    rank: int  # whose number flips: that gets it, or in whose memory it is
    parameter: int  # its number among the model's
    place: float  # where in the parameter, from 0 to below 1
    step: int  # from 0
    optimizer: str
    state: int  # which of the optimizer's tensors for this parameter, counted round

    def element(self, elements: int) -> int:
        """Its number, of so many."""
        return int(self.place * elements)


def all_flips(targets: Sequence[Target], ranks: Sequence[int], parameters: int, seed: int) -> Iterator[Flip]:
    """Of each target, in each precision, each bit as often as the target has draws; all else is drawn.

    Args:
        targets: which ones.
        ranks: how many there may be; the first number is taken every other time.
        parameters: how many the model has.
        seed: of the draws.
    """
    for target in targets:
        for precision in target.precisions:
            # Of its own for each, so that a selection has the same flips.
            chance = random.Random(f"{seed} {target.name} {precision.name}")
            each = [(kind, bit) for kind, bits in zip(KINDS, BITS[precision.wire], strict=True) for bit in bits]
            for kind, bit in itertools.chain.from_iterable([pair] * target.draws for pair in each):
                count = ranks[0] if chance.random() < 0.5 else chance.choice(ranks)
                yield Flip(
                    target,
                    precision,
                    kind,
                    bit,
                    count,
                    rank=chance.randrange(count),
                    parameter=chance.randrange(parameters),
                    place=chance.random(),
                    step=FIRST_STEP + chance.randrange(FIRST_STEPS),
                    optimizer=chance.choice(("sgd", "adam")),
                    state=chance.randrange(2),
                )
