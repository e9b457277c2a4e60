"""Lanes: how many process groups carry the gradients; test_started_collectives.py has what they carry."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastddp.ranks import lanes as lanes_module
from fastddp.ranks.lanes import lanes_for, lanes_pay
from on_ranks import on_ranks
from parts import Parts, wrapped
from ranks import RankPool

LONG = 15 * 2**20 + 7  # 60 MiB and a little: two pieces, one longer than the other


@pytest.mark.parametrize(
    ("world_size", "elements", "wrappers", "groups"), [(2, LONG, 3, 1), (1, LONG, 1, 0), (2, 3, 1, 0)]
)
def test_a_gloo_group_of_ranks_with_large_buckets_gets_one_more_lane_once(
    ranks: RankPool, world_size: int, elements: int, wrappers: int, groups: int
) -> None:
    assert ranks.run(groups_made, world_size, elements, wrappers) == [groups] * world_size


def groups_made(rank: int, elements: int, wrappers: int) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(wrappers):
        model = wrapped(Parts("ab", sizes=[3, elements]))
        for _ in range(2):  # lanes are made when the second window begins
            model(torch.tensor(1.0)).backward()
    return len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.parametrize(
    ("mib", "pays"), [([25] * 4, True), ([1] * 100, False), ([20, 20], False), ([170], True), ([1, 1, 98], True)]
)
def test_lanes_pay_for_large_buckets(mib: list[int], pays: bool) -> None:
    assert lanes_pay([size * 2**20 for size in mib]) == pays


@on_ranks(2)
def test_a_group_with_a_backend_for_each_device_is_asked_for_that_device(rank: int) -> None:
    """Gloo is what carries tensors on the CPU here, and nothing carries others."""
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert [len(lanes_for(group, torch.device(device))) for device in ("cpu", "meta")] == [2, 1]


@on_ranks(2)
def test_several_communicators_of_nccl_have_to_be_measured(rank: int) -> None:
    with mock.patch.object(lanes_module, "backend_of", side_effect=["nccl", "nccl", "gloo"]):
        lanes = [lanes_for(dist.group.WORLD, torch.device("cpu"), measured=measured) for measured in (False, True)]
    assert [*map(len, lanes)] == [1, 2]
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=lanes[1][-1])
    assert tensor.item() == 2


@on_ranks(3)
def test_lanes_of_a_subgroup_have_its_ranks_and_need_no_others(rank: int) -> None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return
    lanes = lanes_for(pair, torch.device("cpu"))
    assert [dist.get_process_group_ranks(lane) for lane in lanes] == [[0, 2], [0, 2]]
    assert [lane.rank() for lane in lanes] == [rank // 2] * 2
    tensor = torch.tensor(rank)
    dist.all_reduce(tensor, group=lanes[1])
    assert tensor.item() == 2
