"""Random programs with compressed gradients: nothing is lost but what errors remember, whatever the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import Phase, find, given, settings
from torch import nn

from program_errors import differences
from program_execution import wrap_in_fastddp
from program_hooks import blocks_of
from program_models import Linear
from programs import AUTO, EIGHT_BITS, Backward, Evaluate, Hook, Options, Program, programs
from ranks import RankPool
from test_programs import examples


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.tier("nightly"))


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("hooks", "world_size", "number"),
    [
        (EIGHT_BITS, 2, 20),
        (AUTO, 2, 10),
        (EIGHT_BITS, 4, 5),
        *(slow(*many) for many in [(EIGHT_BITS, 2, 150), (EIGHT_BITS, 3, 40), (EIGHT_BITS, 4, 60), (AUTO, 4, 40)]),
    ],
    ids=lambda value: "auto" if value is AUTO else "8 bits" if value is EIGHT_BITS else str(value),
)
def test_what_gradients_lack_is_in_the_errors(
    ranks: RankPool, hooks: Sequence[Hook], world_size: int, number: int
) -> None:
    @examples(number)
    @given(program=programs(world_size, hooks=hooks))
    def check(program: Program) -> None:
        assert ranks.run(differences, world_size, program) == [[]] * world_size

    check()


# ------------------------------------------------------------------------- a program finds what is wrong, if it is


def meddling(meddle: Callable[[Any], None]) -> Callable[[Linear, Options], nn.Module]:
    """A wrapper whose forwards begin with ``meddle``."""

    def wrap(module: Linear, options: Options) -> nn.Module:
        model = wrap_in_fastddp(module, options)
        model.register_forward_pre_hook(lambda model, inputs: meddle(model))
        return model

    return wrap


def scale_errors(model: Any, factor: float) -> None:
    for error in blocks_of(model).errors.values():  # type: ignore[union-attr]
        error.mul_(factor)


def loses_errors(model: Any) -> None:
    scale_errors(model, 0.0)


def counts_errors_twice(model: Any) -> None:
    scale_errors(model, 2.0)


def loses_a_hundredth_on_one_rank(model: Any) -> None:
    scale_errors(model, 0.99 if dist.get_rank() == 1 else 1.0)


def changes_a_gradient_on_one_rank(model: Any) -> None:
    for parameter in model.module.parameters():
        if dist.get_rank() == 1 and parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.mul_(1 + 1e-6)


WRONG = [loses_errors, counts_errors_twice, loses_a_hundredth_on_one_rank]


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("meddle", WRONG, ids=lambda meddle: meddle.__name__)
def test_what_is_wrong_is_found(ranks: RankPool, meddle: Callable[[Any], None]) -> None:
    def is_found(program: Program) -> bool:
        return any(ranks.run(found_when_meddled_with, 2, program, meddle))

    find(programs(2, hooks=EIGHT_BITS), is_found, settings=settings(max_examples=100, phases=[Phase.generate]))


def found_when_meddled_with(rank: int, program: Program, meddle: Callable[[Any], None]) -> list[str]:
    return differences(rank, program, wrap=meddling(meddle))


def test_ranks_that_differ_are_found(ranks: RankPool) -> None:
    program = Program(options=Options(hook="int8"), ops=(Backward(), Evaluate()))
    assert any(ranks.run(found_when_meddled_with, 2, program, changes_a_gradient_on_one_rank))
