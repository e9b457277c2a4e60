"""Bits that flip while ranks train, as `bench.bit_flips` has them: they are found, with rank and parameter."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

import fastddp
from fastddp import Corruption, comm_hooks
from on_ranks import of_ranks, on_ranks
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench.bit_flips.flipping import Damage, Flipping
from bench.bit_flips.training import Net, travel_over

sys.path.pop()


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
