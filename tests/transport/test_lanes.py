"""Lanes: how many process groups carry the gradients, and that nobody can tell by the gradients."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp.exchange import lanes as lanes_module
from fastddp.exchange.lanes import lanes_for, lanes_pay
from ranks import RankPool


class ShortAndLong(nn.Module):
    """The long parameter has 60 MiB and a little: two pieces, one longer than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.zeros(3))
        self.long = nn.Parameter(torch.zeros(15 * 2**20 + 7))

    def forward(self, x: float) -> torch.Tensor:
        return (self.short * x).sum() + (self.long * x).sum()


def groups_made(rank: int, make: Callable[[], nn.Module], wrappers: int) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(wrappers):
        model = fastddp.DistributedDataParallel(make(), bucket_cap_mb=0)
        for _ in range(2):  # lanes are made when the second window begins
            model(1.0).backward()
    return len(dist.distributed_c10d._world.pg_map) - before


def test_a_gloo_group_gets_one_more_lane_once(ranks: RankPool) -> None:
    assert ranks.run(groups_made, 2, ShortAndLong, 3) == [1, 1]


def lanes_of_a_mixed_group(rank: int) -> list[int]:
    """How many lanes: gloo is what carries tensors on the CPU here, and nothing carries others."""
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    devices = [torch.device("cpu"), torch.device("meta")]
    return [len(lanes_for(group, device)) for device in devices]


def test_a_group_with_a_backend_for_each_device_is_asked_for_that_device(ranks: RankPool) -> None:
    assert ranks.run(lanes_of_a_mixed_group, 2) == [[2, 1]] * 2


def lanes_over_nccl(rank: int) -> list[int]:
    """How many lanes, where NCCL carries tensors (as far as fastddp knows): by size of buckets, and where measured."""
    with mock.patch.object(lanes_module, "backend_of", side_effect=["nccl", "nccl", "gloo"]):
        lanes = [lanes_for(dist.group.WORLD, torch.device("cpu"), measured=measured) for measured in (False, True)]
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=lanes[1][-1])
    return [*map(len, lanes), int(tensor)]


def test_several_communicators_of_nccl_have_to_be_measured(ranks: RankPool) -> None:
    assert ranks.run(lanes_over_nccl, 2) == [[1, 2, 2]] * 2


def test_a_single_rank_needs_no_lanes(ranks: RankPool) -> None:
    assert ranks.run(groups_made, 1, ShortAndLong, 1) == [0]


class Short(nn.Module):
    """Two small buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: float) -> torch.Tensor:
        return ((self.a + self.b) * x).sum()


def test_a_small_model_gets_no_second_lane(ranks: RankPool) -> None:
    assert ranks.run(groups_made, 2, Short, 1) == [0, 0]


@pytest.mark.parametrize(
    ("mib", "pays"), [([25] * 4, True), ([1] * 100, False), ([20, 20], False), ([170], True), ([1, 1, 98], True)]
)
def test_lanes_pay_for_large_buckets(mib: list[int], pays: bool) -> None:
    assert lanes_pay([size * 2**20 for size in mib]) == pays


def lanes_of_a_subgroup(rank: int) -> list[int]:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return []
    lanes = lanes_for(pair, torch.device("cpu"))
    assert [dist.get_process_group_ranks(lane) for lane in lanes] == [[0, 2], [0, 2]]
    tensor = torch.tensor(rank)
    dist.all_reduce(tensor, group=lanes[1])
    return [lane.rank() for lane in lanes] + [int(tensor)]


def test_lanes_of_a_subgroup_have_its_ranks_and_need_no_others(ranks: RankPool) -> None:
    assert ranks.run(lanes_of_a_subgroup, 3) == [[0, 0, 2], [], [1, 1, 2]]


def a_bucket_in_pieces(rank: int, view: bool) -> list[bool]:
    model = fastddp.DistributedDataParallel(ShortAndLong(), bucket_cap_mb=0, gradient_as_bucket_view=view)
    right = []
    for step in range(3):
        model.zero_grad()
        model(float(rank + step)).backward()
        right.append(all(bool((parameter.grad == step + 0.5).all()) for parameter in model.parameters()))
    return right


@pytest.mark.tier("nightly")
def test_a_long_wire_travels_in_pieces(ranks: RankPool) -> None:
    for view in (False, True):
        assert ranks.run(a_bucket_in_pieces, 2, view) == [[True] * 3] * 2
