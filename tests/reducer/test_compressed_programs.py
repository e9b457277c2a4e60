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
from programs import AUTO, EIGHT_BITS, Hook, Options, Program, programs
from ranks import RankPool
from test_programs import examples

NIGHTLY = [(EIGHT_BITS, 2, 150), (EIGHT_BITS, 3, 40), (EIGHT_BITS, 4, 60), (AUTO, 4, 40)]


@pytest.mark.timeout(0)  # a rank that hangs is reported by the ranks' own limit
@pytest.mark.parametrize(
    ("hooks", "world_size", "number"),
    [
        (EIGHT_BITS, 2, 20),
        (AUTO, 2, 10),
        (EIGHT_BITS, 4, 5),
        *(pytest.param(*many, marks=pytest.mark.tier("nightly")) for many in NIGHTLY),
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


def loses_a_hundredth_of_errors(model: Any) -> None:
    for error in blocks_of(model).errors.values():  # type: ignore[union-attr]
        error.mul_(0.99 if dist.get_rank() == 1 else 1.0)


def changes_a_gradient(model: Any) -> None:
    for parameter in model.module.parameters():
        if dist.get_rank() == 1 and parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.mul_(1 + 1e-6)


def found_when_meddled_with(rank: int, program: Program, meddle: Callable[[Any], None]) -> list[str]:
    return differences(rank, program, wrap=meddling(meddle))


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("meddle", [loses_a_hundredth_of_errors, changes_a_gradient])
def test_what_is_wrong_on_one_rank_is_found(ranks: RankPool, meddle: Callable[[Any], None]) -> None:
    def is_found(program: Program) -> bool:
        return any(ranks.run(found_when_meddled_with, 2, program, meddle))

    find(programs(2, hooks=EIGHT_BITS), is_found, settings=settings(max_examples=100, phases=[Phase.generate]))
