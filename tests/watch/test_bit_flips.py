"""Bits that flip while ranks train: what `bench.bit_flips` claims to be found is, with rank and parameter."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastddp
from fastddp import comm_hooks
from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench.bit_flips import flips
from bench.bit_flips.flipping import Damage, Flipping
from bench.bit_flips.flips import BF16, BF16_WIRE, FP32, Flip
from bench.bit_flips.judging import Outcome, Runs
from bench.bit_flips.training import PARAMETERS, WITHIN, Net, travel_over

sys.path.pop()

# Target, precision, kind, bit, ranks, rank, parameter, place, step, optimizer, state.
IN_PARAMETER = Flip(flips.PARAMETER, FP32, flips.HIGH_MANTISSA, 20, 2, 1, 2, 0.3, 4, "adam", 0)
IN_STATE = Flip(flips.STATE, FP32, flips.SIGN, 31, 2, 0, 4, 0.7, 5, "sgd", 0)
IN_AVERAGED = Flip(flips.AVERAGED_GRADIENT, BF16, flips.SIGN, 15, 2, 1, 2, 0.1, 3, "adam", 0)
ON_THE_WAY_BACK = Flip(flips.BACK, BF16_WIRE, flips.SIGN, 15, 2, 1, 5, 0.5, 4, "sgd", 0)
TOO_LARGE = Flip(flips.LOCAL_GRADIENT, FP32, flips.HIGH_EXPONENT, 30, 2, 0, 4, 0.5, 4, "adam", 0)
INTO_A_CHECKED_SUM = Flip(flips.TO_SUM_CHECKED, FP32, flips.LOW_EXPONENT, 24, 2, 0, 4, 0.5, 4, "sgd", 0)


def outcomes(rank: int, chosen: list[Flip]) -> list[Outcome]:
    """Of runs each of which was silent without its flip, or this raises."""
    runs = Runs()
    return [runs.outcome(flip) for flip in chosen]


@pytest.mark.tier("slow")
def test_a_few(ranks: RankPool) -> None:
    chosen = [IN_PARAMETER, IN_STATE, IN_AVERAGED, ON_THE_WAY_BACK, TOO_LARGE, INTO_A_CHECKED_SUM]
    found, others = ranks.run(outcomes, 2, chosen)
    assert [dataclasses.replace(one, said=()) for one in found] == [dataclasses.replace(one, said=()) for one in others]
    assert [one.found_by for one in found] == ["replicas"] * 4 + ["too_large", "sum"]
    for one in found:
        assert one.told_alike, one
        assert one.parameter_named, one
        assert one.steps is not None
        assert one.steps <= WITHIN, one
    assert [one.rank_named for one in found] == [True] * 5 + [False]  # who has spoilt a sum nobody knows
    assert found[4].steps == 0  # before the optimizer's step


def selection() -> Iterator[Any]:
    """Of all flips of the bench, so many of each target that there are about fifty."""
    drawn = list(flips.all_flips(flips.TARGETS, (2, 3, 4), PARAMETERS, seed=1))
    for flip in drawn[::11]:
        name = f"{flip.target.name}-{flip.precision.name}-{flip.bit}-{flip.ranks}".replace(", ", "-").replace(" ", "-")
        yield pytest.param(flip, id=name)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("flip", list(selection()))
def test_what_has_to_be_found_is(ranks: RankPool, flip: Flip) -> None:
    (outcome,), *_ = ranks.run(outcomes, flip.ranks, [flip])
    assert outcome.is_as_promised(), outcome
    target = flip.target
    if outcome.found_by == "replicas":
        assert target.makes_ranks_differ
        assert outcome.parameter_named, outcome
    if outcome.found_by == "sum":
        assert target == flips.TO_SUM or target.waits_for_its_turn or outcome.rank_named
    is_coarse = flip.kind not in (flips.LOW_MANTISSA, flips.HIGH_MANTISSA)
    if target == flips.TO_SUM_LASTING and is_coarse:
        assert outcome.found_by == "sum"
        assert outcome.parameter_named


# ------------------------------------------------------------------------------- a result that only one rank cannot use


def spoilt_on_its_way_back(rank: int, hook: bool) -> list[tuple[int, str, tuple[int, ...], str | None]]:
    """An element of the sum, 1.25, becomes infinite as it comes to rank 1, in the sixth step."""
    torch.manual_seed(0)
    told: list[tuple[int, str, tuple[int, ...], str | None]] = []
    step = 0
    model = fastddp.DistributedDataParallel(
        Net(),
        bucket_cap_mb=0.004,
        audit_every=4,
        on_corruption=lambda of: told.append((step, of.kind, of.ranks, of.parameter)),
    )
    if hook:
        model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wire = Flipping(dist.group.WORLD)
    for step in range(12):
        if step == 3:
            travel_over(wire, model)
        optimizer.zero_grad()
        outputs = model(torch.ones(4, 24))
        wire.begin_step(Damage("back", 0, 0, 14 if hook else 30, rank=1) if step == 5 else None)
        outputs.sum().mul(1.25 / 4).backward()  # all elements of the gradient of the last bias are 1.25
        optimizer.step()
    assert wire.has_flipped == (rank == 1)
    return told


@pytest.mark.parametrize("hook", [False, True], ids=["allreduce", "fp16"])
def test_a_result_that_is_not_finite_on_one_rank_is_told_there_and_no_rank_waits_for_it(
    ranks: RankPool, hook: bool
) -> None:
    other, own = ranks.run(spoilt_on_its_way_back, 2, hook)
    if hook:  # what is cast is written, and looked at
        assert own[0] == (5, "non_finite", (), "4.bias")
        own = own[1:]
    assert own == other
    assert ("replicas", (0, 1)) in [(kind, named) for _, kind, named, _ in other]
    assert {step for step, _, _, _ in other} <= set(range(6, 12))
