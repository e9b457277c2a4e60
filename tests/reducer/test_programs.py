"""fastddp does what the obvious implementation does, whatever the program."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch.distributed as dist
from hypothesis import Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from torch import Tensor

from program_execution import differences, wrap_in_reference
from program_oracle import Oracle, read_weight
from programs import Program, programs, programs_of_accumulation
from ranks import RankPool, RanksFailed

# The profile decides how many hundreds of programs to try (conftest.py).
PER_PROFILE = settings().max_examples / 100


def examples(number: int) -> settings:
    return settings(max_examples=max(1, int(number * PER_PROFILE)))


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("world_size", "number"),
    [(2, 25), *(pytest.param(*many, marks=pytest.mark.tier("nightly")) for many in [(2, 700), (3, 200), (4, 300)])],
)
def test_gradients_are_those_of_the_reference(ranks: RankPool, world_size: int, number: int) -> None:
    @examples(number)
    @given(program=programs(world_size))
    def check(program: Program) -> None:
        assert ranks.run(differences, world_size, program) == [[]] * world_size

    check()


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("world_size", "number"), [(2, 10), pytest.param(4, 60, marks=pytest.mark.tier("nightly"))])
def test_what_windows_leave_and_a_user_scales_adds_up(ranks: RankPool, world_size: int, number: int) -> None:
    @examples(number)
    @given(program=programs_of_accumulation(world_size))
    def check(program: Program) -> None:
        assert ranks.run(differences, world_size, program) == [[]] * world_size

    check()


# ------------------------------------------------------------------------- a program finds what is wrong, if it is


class Unscaled(Oracle):
    def _average(self, parameter: Tensor) -> None:
        super()._average(parameter)
        parameter.grad *= 2


class IgnoresNoSync(Oracle):
    def forward(self, *args: object) -> object:
        self._syncs = True
        return super().forward(*args)


class ForgetsLocalGradients(Oracle):
    """Averages only what came in the last backward."""

    def _on_backward(self) -> None:
        if self._armed and not self._callback_queued:
            self._received.clear()
        super()._on_backward()


class AveragesRowMajorOnly(Oracle):
    def _average(self, parameter: Tensor) -> None:
        if parameter.is_contiguous():
            super()._average(parameter)


class KeepsBuffers(Oracle):
    def _buffers_to_sync(self) -> list[Tensor]:
        return super()._buffers_to_sync()[:1]


class AveragesWhatNobodyUsed(Oracle):
    def _is_used_anywhere(self, used_here: bool) -> bool:
        return super()._is_used_anywhere(used_here) or True


class LeavesAloneWhatThisRankDidNotUse(Oracle):
    def _is_used_anywhere(self, used_here: bool) -> bool:
        is_used = super()._is_used_anywhere(used_here)
        self._uses_all = used_here or not self._find_unused_parameters
        return is_used

    def _average(self, parameter: Tensor) -> None:
        before = parameter.grad
        super()._average(parameter)
        if not getattr(self, "_uses_all", True):
            parameter.grad = before


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


class StepsBeforeTheMean(Oracle):
    def _average(self, parameter: Tensor) -> None:
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            optimizer.step()
            parameter.grad = None
        super()._average(parameter)


WRONG = [
    Unscaled,
    IgnoresNoSync,
    ForgetsLocalGradients,
    AveragesRowMajorOnly,
    KeepsBuffers,
    AveragesWhatNobodyUsed,
    LeavesAloneWhatThisRankDidNotUse,
    SharesTheSparseGradientsOfRank0,
    ReadsTheWeightWhenBackwardEnds,
    KeepsTheModelItHadWhenItsInputsEnded,
    StepsBeforeTheMean,
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


def test_the_reference_does_not_differ_from_itself(ranks: RankPool) -> None:
    with pytest.raises(NoSuchExample):
        find(
            programs(2),
            lambda program: any(ranks.run(differences, 2, program, wrap=wrap_in_reference)),
            settings=settings(max_examples=20),
        )
