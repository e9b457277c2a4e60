"""fastddp does what the obvious implementation does, whatever the program; compressed, but for what errors remember."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, find, given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

import program_errors
import program_sharded
from fastddp.reference import ReferenceDataParallel
from models import MODELS, inputs
from on_ranks import Wrap, gradients, on_ranks, same_under_both
from program_execution import differences, wrap_in_reference
from program_oracle import Oracle
from programs import (
    EIGHT_BITS,
    EXACT,
    SIXTEEN_BITS,
    Backward,
    Change,
    Hook,
    Options,
    ParameterSpec,
    Program,
    Raise,
    TwoBackwards,
    programs,
    programs_of_accumulation,
    programs_of_sharded_optimizers,
)
from ranks import RankPool, RanksFailed
from releases import TORCH_WITH_USABLE_GRAPHS

# The profile decides how many hundreds of programs to try (conftest.py).
PER_PROFILE = settings().max_examples / 100


def examples(number: int) -> settings:
    return settings(max_examples=max(1, int(number * PER_PROFILE)))


Differences = Callable[[int, Program], list[str]]
NIGHTLY = pytest.mark.tier("nightly")


def check(ranks: RankPool, strategy: SearchStrategy[Program], world_size: int, number: int, how: Differences) -> None:
    @examples(number)
    @given(program=strategy)
    def one_by_one(program: Program) -> None:
        assert ranks.run(how, world_size, program) == [[]] * world_size

    one_by_one()


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
def test_gradients_are_those_of_the_reference_24005_46166_128949_143580_187732(
    ranks: RankPool, strategy: Any, world_size: int, number: int
) -> None:
    check(ranks, strategy(world_size), world_size, number, differences)


SHARDED = [(EXACT, 2, 400), (SIXTEEN_BITS, 2, 100), (EIGHT_BITS, 2, 150), (EXACT, 3, 60), (EXACT, 4, 150)]
LONG = [(EIGHT_BITS, 2, 150), (EIGHT_BITS, 3, 40), (EIGHT_BITS, 4, 60)]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("hooks", "world_size", "number"),
    [
        (EIGHT_BITS, 2, 20),
        (EIGHT_BITS, 4, 5),
        *(pytest.param(*many, marks=NIGHTLY) for many in LONG),
    ],
    ids=lambda value: "8 bits" if value is EIGHT_BITS else str(value),
)
def test_what_compressed_gradients_lack_is_in_the_errors(
    ranks: RankPool, hooks: Sequence[Hook], world_size: int, number: int
) -> None:
    check(ranks, programs(world_size, hooks=hooks), world_size, number, program_errors.differences)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("hooks", "world_size", "number"),
    [
        (EXACT, 2, 15),
        (SIXTEEN_BITS, 2, 5),
        (EIGHT_BITS, 2, 5),
        *(pytest.param(*many, marks=NIGHTLY) for many in SHARDED),
    ],
    ids=lambda value: {EXACT: "exact", EIGHT_BITS: "8 bits", SIXTEEN_BITS: "16 bits"}.get(value, str(value)),
)
def test_a_sharded_optimizer_trains_as_a_replicated_one(
    ranks: RankPool, hooks: Sequence[Hook], world_size: int, number: int
) -> None:
    strategy = programs_of_sharded_optimizers(world_size, hooks=hooks)
    check(ranks, strategy, world_size, number, program_sharded.differences)


def test_a_forward_that_finds_no_gradients_begins_a_step_also_after_one_that_raised_and_found_some(
    ranks: RankPool,
) -> None:
    program = Program(options=Options(hook="int8"), ops=(Backward(), Raise("forward"), Raise("backward")))
    assert ranks.run(program_errors.differences, 2, program) == [[], []]


def test_a_sharded_gradient_that_the_last_window_left_out_adds_up_where_it_begins_the_next(ranks: RankPool) -> None:
    options = Options(usage="find_unused_parameters", sharded="elements")
    ops = (Backward(), Backward(skip=frozenset([0])), Backward())
    program = Program((ParameterSpec(), ParameterSpec()), (1, 0), output="namespace", options=options, ops=ops)
    assert ranks.run(program_sharded.differences, 2, program) == [[], []]


def test_a_local_gradient_in_main_grad_that_was_set_to_zero_does_not_end_the_next_window_early(ranks: RankPool) -> None:
    options = Options(usage="static_graph", main_gradients="main_grad")
    ops = (Backward(), Backward(sync=False), Change("none"), TwoBackwards(1))
    program = Program((ParameterSpec(), ParameterSpec()), (0, 1), options=options, ops=ops)
    assert ranks.run(differences, 2, program) == [[], []]


# ----------
# ------------------------------------------------------------------------- a program finds what is wrong, if it is


class IgnoresNoSync(Oracle):
    def forward(self, *args: object) -> object:
        self._syncs = True
        return super().forward(*args)


class SharesTheSparseGradientsOfRank0(Oracle):
    def _average(self, parameter: Tensor) -> None:
        if parameter in self._sparse and dist.get_rank() > 0:
            parameter.grad = None
        super()._average(parameter)


class KeepsTheModelItHadWhenItsInputsEnded(Oracle):
    def end_batches(self, ranks: Sequence[int]) -> None:
        self.begin_batch(range(dist.get_world_size()), True)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    "wrong", [IgnoresNoSync, SharesTheSparseGradientsOfRank0, KeepsTheModelItHadWhenItsInputsEnded]
)
def test_a_wrapper_that_is_wrong_is_found(ranks: RankPool, wrong: type[Oracle]) -> None:
    def is_found(program: Program) -> bool:
        try:
            return any(ranks.run(differences, 2, program, wrap=functools.partial(wrap_in_reference, reference=wrong)))
        except RanksFailed:
            return True  # ranks wait for one another: wrong too

    find(programs(2), is_found, settings=settings(max_examples=400, phases=[Phase.generate]))


@pytest.mark.parametrize("name", MODELS)
@same_under_both(both=(TORCH_WITH_USABLE_GRAPHS, ReferenceDataParallel))
def test_the_reference_trains_as_torchs_ddp(wrap: Wrap, rank: int, name: str) -> Any:
    torch.manual_seed(rank)
    model = wrap(MODELS[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(6):
        syncs = step not in (1, 2)
        with nullcontext() if syncs else model.no_sync():
            model(inputs(name, rank, step)).square().mean().backward()
        found.append(gradients(model))
        if syncs:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [found, list(model.state_dict().values())]


@on_ranks(2)
def test_the_reference_leaves_alone_what_is_ignored(rank: int) -> None:
    module = nn.Linear(1, 1)
    module._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    nn.init.constant_(module.weight, rank)
    nn.init.constant_(module.bias, rank)
    ReferenceDataParallel(module)
    assert (module.weight.item(), module.bias.item()) == (0, rank)
