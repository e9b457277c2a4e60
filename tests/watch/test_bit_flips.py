"""Bits that flip while ranks train, as `bench.bit_flips` has them: they are found, with rank and parameter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastddp
from fastddp import Corruption, comm_hooks
from on_ranks import of_ranks, on_ranks
from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench.bit_flips import flips
from bench.bit_flips.flipping import Damage, Flipping
from bench.bit_flips.flips import Flip
from bench.bit_flips.judging import Outcome, Runs
from bench.bit_flips.training import PARAMETERS, Net, travel_over

sys.path.pop()


def outcome(rank: int, flip: Flip) -> Outcome:
    """Of a run that was silent without its flip, or this raises."""
    return Runs().outcome(flip)


def selection() -> Iterator[Any]:
    """Of all flips of the bench, so many of each target that there are about fifty."""
    drawn = list(flips.all_flips(flips.TARGETS, (2, 3, 4), PARAMETERS, seed=1))
    for flip in drawn[::11]:
        name = f"{flip.target.name}-{flip.precision.name}-{flip.bit}-{flip.ranks}".replace(", ", "-").replace(" ", "-")
        yield pytest.param(flip, id=name)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("flip", list(selection()))
def test_what_has_to_be_found_is(ranks: RankPool, flip: Flip) -> None:
    found, *_ = ranks.run(outcome, flip.ranks, flip)
    assert found.is_as_promised(), found
    target = flip.target
    if found.found_by == "replicas":
        assert target.makes_ranks_differ
        assert found.parameter_named, found


@pytest.mark.parametrize("casts", [False, True])
@on_ranks(2)
def test_a_result_that_is_not_finite_on_one_rank_is_told_there_and_no_rank_waits_for_it(rank: int, casts: bool) -> None:
    """In the sixth step of twelve an element of the wire is damaged (last bias: 1.25 each)."""
    damage = Damage(0, 0, 14 if casts else 30, 1, torch.float16 if casts else torch.float32)
    torch.manual_seed(0)
    told: list[tuple[int, Corruption]] = []
    step = 0
    watch = fastddp.Watch(audit_every=4, corruption=lambda of: told.append((step, of)))
    model = fastddp.DistributedDataParallel(Net(), watch=watch, bucket_cap_mb=0.004)
    if casts:
        model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wire = Flipping(dist.group.WORLD)
    for step in range(12):
        if step == 3:
            travel_over(wire, model)
        optimizer.zero_grad()
        outputs = model(torch.ones(4, 24))
        wire.begin_step(damage if step == 5 else None)
        outputs.sum().mul(1.25 / 4).backward()
        optimizer.step()
    assert casts or wire.has_flipped == (rank == damage.rank)
    other, own = of_ranks(told)
    if casts:  # what is cast is written, and looked at
        when, of = own.pop(0)
        assert (when, of.kind, of.ranks, of.parameter) == (5, "non_finite", (), "4.bias")
    assert own == other
    assert ("replicas", (0, 1)) in [(of.kind, of.ranks) for _, of in other]
    assert {when for when, _ in other} <= set(range(6, 12))
