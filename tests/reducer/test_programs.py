"""fastddp does what the obvious implementation does, whatever the program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import Phase, find, given, settings
from torch import Tensor

from program_execution import differences, wrap_in_reference
from program_oracle import Oracle, read_weight
from programs import Program, programs, programs_of_accumulation
from ranks import RankPool, RanksFailed

# The profile decides how many hundreds of programs to try (conftest.py).
PER_PROFILE = settings().max_examples / 100


def examples(number: int) -> settings:
    return settings(max_examples=max(1, int(number * PER_PROFILE)))


NIGHTLY = pytest.mark.tier("nightly")


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("strategy", "world_size", "number"),
    [
        (programs, 2, 25),
        *(pytest.param(programs, *many, marks=NIGHTLY) for many in [(2, 700), (3, 200), (4, 300)]),
        (programs_of_accumulation, 2, 10),
        pytest.param(programs_of_accumulation, 4, 60, marks=NIGHTLY),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_are_those_of_the_reference(ranks: RankPool, strategy: Any, world_size: int, number: int) -> None:
    @examples(number)
    @given(program=strategy(world_size))
    def check(program: Program) -> None:
        assert ranks.run(differences, world_size, program) == [[]] * world_size

    check()


# ------------------------------------------------------------------------- a program finds what is wrong, if it is


class IgnoresNoSync(Oracle):
    def forward(self, *args: object) -> object:
        self._syncs = True
        return super().forward(*args)


class AveragesWhatNobodyUsed(Oracle):
    def _is_used_anywhere(self, used_here: bool) -> bool:
        return super()._is_used_anywhere(used_here) or True


class SharesTheSparseGradientsOfRank0(Oracle):
    def _average(self, parameter: Tensor) -> None:
        if parameter in self._sparse and dist.get_rank() > 0:
            parameter.grad = None
        super()._average(parameter)


class ReadsTheWeightWhenBackwardEnds(Oracle):
    def _scale(self) -> float:
        self._weight = read_weight(self._gradient_average)
        return super()._scale()


class KeepsTheModelItHadWhenItsInputsEnded(Oracle):
    def end_batches(self, ranks: Sequence[int]) -> None:
        self.begin_batch(range(dist.get_world_size()), True)


WRONG = [
    IgnoresNoSync,
    AveragesWhatNobodyUsed,
    SharesTheSparseGradientsOfRank0,
    ReadsTheWeightWhenBackwardEnds,
    KeepsTheModelItHadWhenItsInputsEnded,
]


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrapper_that_is_wrong_is_found(ranks: RankPool, wrong: type[Oracle]) -> None:
    def is_found(program: Program) -> bool:
        try:
            return any(ranks.run(differences, 2, program, wrap=functools.partial(wrap_in_reference, reference=wrong)))
        except RanksFailed:
            return True  # ranks wait for one another: wrong too

    find(programs(2), is_found, settings=settings(max_examples=400, phases=[Phase.generate]))
