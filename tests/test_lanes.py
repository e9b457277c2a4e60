"""Lanes: how many process groups carry the gradients, and that nobody can tell by the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp.lanes import lanes_for
from ranks import RankPool


def groups_after_three_wrappers(rank: int) -> tuple[int, int, list[int]]:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        model = fastddp.DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0)
        for _ in range(2):  # lanes are made when the second window begins
            model(torch.ones(1, 2)).sum().backward()
    lanes = lanes_for(dist.group.WORLD)
    return len(dist.distributed_c10d._world.pg_map) - before, len(lanes), [lane.size() for lane in lanes]


def test_a_gloo_group_gets_one_more_lane_once(ranks: RankPool) -> None:
    assert ranks.run(groups_after_three_wrappers, 2) == [(1, 2, [2, 2])] * 2
    assert ranks.run(groups_after_three_wrappers, 1) == [(0, 1, [1])]


def groups_of_one_bucket(rank: int) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return len(dist.distributed_c10d._world.pg_map) - before


def test_a_model_of_one_bucket_needs_no_second_lane(ranks: RankPool) -> None:
    assert ranks.run(groups_of_one_bucket, 2) == [0, 0]


def lanes_of_a_subgroup(rank: int) -> list[int]:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return []
    lanes = lanes_for(pair)
    assert [dist.get_process_group_ranks(lane) for lane in lanes] == [[0, 2], [0, 2]]
    tensor = torch.tensor(rank)
    dist.all_reduce(tensor, group=lanes[1])
    return [lane.rank() for lane in lanes] + [int(tensor)]


def test_lanes_of_a_subgroup_have_its_ranks_and_need_no_others(ranks: RankPool) -> None:
    assert ranks.run(lanes_of_a_subgroup, 3) == [[0, 0, 2], [], [1, 1, 2]]


class ShortAndLong(nn.Module):
    """The long parameter has 60 MiB and a little: two pieces, one longer than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.zeros(3))
        self.long = nn.Parameter(torch.zeros(15 * 2**20 + 7))

    def forward(self, x: float) -> torch.Tensor:
        return (self.short * x).sum() + (self.long * x).sum()


def a_bucket_in_pieces(rank: int, view: bool) -> list[bool]:
    model = fastddp.DistributedDataParallel(ShortAndLong(), bucket_cap_mb=0, gradient_as_bucket_view=view)
    right = []
    for step in range(3):
        model.zero_grad()
        model(float(rank + step)).backward()
        right.append(all(bool((parameter.grad == step + 0.5).all()) for parameter in model.parameters()))
    return right


def test_a_long_wire_travels_in_pieces(ranks: RankPool) -> None:
    for view in (False, True):
        assert ranks.run(a_bucket_in_pieces, 2, view) == [[True] * 3] * 2
