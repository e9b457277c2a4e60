"""What exchanges cost, measured with the codec, the network and the ranks of a step.

The codec's arithmetic and the collectives over the network are timed together, since one may hide the other.
``_C.Trial`` runs an exchange as a window does, without a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp import _C
from fastddp.compression.choice import PLAIN, Cost, cost_of
from fastddp.exchange.agreement import greatest
from fastddp.exchange.block8 import Block8
from fastddp.exchange.descriptions import Exchange, Setting
from fastddp.exchange.power_sgd import PowerSGD, is_compressed, matrix_shape
from fastddp.exchange.two_level import in_levels

_SMALLEST = 2**14  # elements
_LARGEST = 2**22
_LARGEST_ON_DEVICES = 2**24  # devices' networks reach full speed only there; each candidate takes that much memory
_STEP = 2
_APART = 16  # the larger size, as a multiple of the smaller
# Sizes stop growing when a plain exchange takes so many seconds. An exchange in 8 bits takes a quarter of that at best,
# and a network may let a burst of some milliseconds pass at once after a pause.
_LONG = 0.2
_PATIENCE = 2.0  # seconds for all rounds
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 9


class Trial(Protocol):
    """Runs an exchange of some elements."""

    def seconds(self) -> float:
        """Run one window, and return its time. All ranks call this together."""


Agree = Callable[[Sequence[float]], "list[float]"]
"""For each number the greatest of all ranks: an exchange is over when the last rank is done."""

Trials = Callable[[int], "tuple[Trial, int]"]
"""Makes a trial of about so many elements. Returns it with the exact number."""


def largest_trial(largest: int, device: torch.device) -> int:
    """The most elements that are measured, if the largest bucket has ``largest``."""
    return min(largest, _LARGEST if device.type == "cpu" else _LARGEST_ON_DEVICES)


def measure_costs(trials: Mapping[str, Trials], agree: Agree, largest: int) -> dict[str, Cost]:
    """The cost of each candidate, with plain among them; the same on all ranks.

    This takes about two seconds, and up to five over a slow network. On a device it takes up to four times as long,
    since a trial has several windows there.

    Sizes grow until a plain exchange takes long. Then all candidates are timed in turn, at that size and at a sixteenth
    of it, so that changes on the machine meanwhile affect all of them.

    Args:
        trials: by candidate.
        agree: a collective.
        largest: the most elements to measure (:func:`largest_trial`).
    """
    size = _large_enough(trials[PLAIN], agree, largest)
    made = [(name, *trials[name](elements)) for name in trials for elements in (size // _APART, size)]
    # The first of two, because a first run may have something to set up.
    once = agree([min(trial.seconds() for _ in range(2)) for _, trial, _ in made])
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(_PATIENCE / sum(once))))
    samples = agree([trial.seconds() for _ in range(rounds) for _, trial, _ in made])
    costs = {}
    for place, name in enumerate(trials):
        small, large = 2 * place, 2 * place + 1
        sizes = [made[small][2], made[large][2]]
        costs[name] = cost_of(sizes, [samples[small :: len(made)], samples[large :: len(made)]])
    return costs


def _large_enough(plain: Trials, agree: Agree, largest: int) -> int:
    size = _SMALLEST
    while True:
        trial, _ = plain(size)
        (seconds,) = agree([min(trial.seconds() for _ in range(2))])
        if seconds > _LONG or size >= largest:
            return size
        size *= _STEP


def trials_of(make: Callable[[], Exchange], setting: Setting, dtype: torch.dtype) -> Trials:
    """Trials of an exchange, over gradients of this dtype like those of the model of ``setting``.

    ``make`` returns an exchange with a memory of its own.
    """

    def made(elements: int) -> tuple[Trial, int]:
        exchange = make()
        gradients = _stand_ins(exchange, setting, dtype, elements)
        names = [f"trial {number}" for number in range(len(gradients))]
        alone = dataclasses.replace(
            setting,
            names=names,
            parameters=gradients,
            plan=[[*range(len(gradients))]],
            sum_audit=None,
            measures_gradients=False,
        )
        if isinstance(exchange, Block8):
            exchange.state.belong_to(names, gradients, lambda: 0)
        trial = _C.Trial(gradients, in_levels(exchange, alone).make(alone))
        return trial, sum(gradient.numel() for gradient in gradients)

    return made


def greatest_over(group: dist.ProcessGroup, device: torch.device) -> Agree:
    """An :data:`Agree` over the ranks of ``group``."""
    return lambda values: greatest(values, group, device)


# ------------------------------------------------------------------------------------------------------------ gradients


def _stand_ins(exchange: Exchange, setting: Setting, dtype: torch.dtype, elements: int) -> list[Tensor]:
    shape: tuple[int, ...] = (elements,)
    if isinstance(exchange, PowerSGD):
        shape = _typical_matrix(setting, exchange)
        # A smaller matrix keeps the ratio of its sides.
        shrink = min(1.0, math.sqrt(elements / math.prod(shape)))
        shape = tuple(max(1, round(size * shrink)) for size in shape)
    count = max(1, elements // math.prod(shape))
    # A generator of its own leaves the program's random numbers alone. On the CPU, since not every device has one.
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(setting.device, dtype)
        for _ in range(count)
    ]


def compressed_elements(exchange: PowerSGD, setting: Setting, bucket: Sequence[int]) -> int:
    """The number of elements of ``bucket`` that become factors; the others travel as they are."""
    state = exchange.state
    parameters = [setting.parameters[index] for index in bucket]
    return sum(
        parameter.numel()
        for parameter in parameters
        if is_compressed(parameter, state.matrix_approximation_rank, state.min_compression_rate)
    )


def _typical_matrix(setting: Setting, exchange: PowerSGD) -> tuple[int, int]:
    """The shape of the matrix with the median one of all compressed elements, ordered by their matrices' sizes."""
    state = exchange.state
    compressed = [
        parameter
        for parameter in setting.parameters
        if is_compressed(parameter, state.matrix_approximation_rank, state.min_compression_rate)
    ]
    compressed.sort(key=Tensor.numel)
    left = sum(map(Tensor.numel, compressed)) / 2
    for parameter in compressed:
        left -= parameter.numel()
        if left <= 0:
            return matrix_shape(parameter)
    raise ValueError("no gradient of the model is compressed by PowerSGD")
