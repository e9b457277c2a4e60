"""fastddp does what the obvious implementation does, whatever the program."""

from __future__ import annotations

import functools

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from torch import Tensor, nn

from fastddp.reference import ReferenceDataParallel
from programs import Options, Program, differences, programs, wrap_in_reference
from ranks import RankPool

# The profile decides how many hundreds of programs to try (conftest.py).
PER_PROFILE = settings().max_examples / 100


def examples(number: int) -> settings:
    return settings(max_examples=max(1, int(number * PER_PROFILE)))


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_are_those_of_the_reference(ranks: RankPool, world_size: int) -> None:
    @examples({2: 250, 3: 80, 4: 100}[world_size])
    @given(program=programs(world_size))
    def check(program: Program) -> None:
        assert ranks.run(differences, world_size, program) == [[]] * world_size

    check()


# ------------------------------------------------------------------------- a program finds what is wrong, if it is


class Unscaled(ReferenceDataParallel):
    def _average(self, gradient: Tensor | None) -> None:
        super()._average(gradient)
        gradient *= 2


class IgnoresNoSync(ReferenceDataParallel):
    def forward(self, *args: object) -> object:
        self._syncs = True
        return super().forward(*args)


class ForgetsLocalGradients(ReferenceDataParallel):
    """Averages only what came in the last backward."""

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._armed and not self._callback_queued:
            self._received.clear()
        super()._on_gradient(parameter)


class AveragesRowMajorOnly(ReferenceDataParallel):
    def _average(self, gradient: Tensor | None) -> None:
        if gradient.is_contiguous():
            super()._average(gradient)


class KeepsBuffers(ReferenceDataParallel):
    def _buffers_to_sync(self) -> list[Tensor]:
        return super()._buffers_to_sync()[:1]


WRONG = [Unscaled, IgnoresNoSync, ForgetsLocalGradients, AveragesRowMajorOnly, KeepsBuffers]


def wrap_in(wrong: type[ReferenceDataParallel], module: nn.Module, options: Options) -> nn.Module:
    return wrong(module, forward_sync_buffers=options.forward_sync_buffers)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrapper_that_is_wrong_is_found(ranks: RankPool, wrong: type[ReferenceDataParallel]) -> None:
    def is_found(program: Program) -> bool:
        return any(ranks.run(differences, 2, program, wrap=functools.partial(wrap_in, wrong)))

    find(programs(2), is_found, settings=settings(max_examples=60, phases=[Phase.generate]))


def test_the_reference_does_not_differ_from_itself(ranks: RankPool) -> None:
    with pytest.raises(NoSuchExample):
        find(
            programs(2),
            lambda program: any(ranks.run(differences, 2, program, wrap=wrap_in_reference)),
            settings=settings(max_examples=20),
        )
