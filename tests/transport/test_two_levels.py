"""16-bit sums over gloo among several nodes: what leaves a node, and long wires. How exact: test_native_hooks.py."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastddp
from fastddp import comm_hooks
from fastddp.ranks import placement
from nodes import Traffic, by_messages, on_machines
from on_ranks import on_ranks
from parts import Parts, wrapped
from ranks import RankPool
from test_lanes import LONG

Nodes = Sequence[int]  # the machine of each rank

PAIRS, MIXED, UNEQUAL = (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1)
LOPSIDED, ONE, EACH_ALONE = (0, 0, 0, 1), (0, 0, 0, 0), (0, 1, 2, 3)


@on_ranks(4)
def test_ranks_ask_each_other_once_where_they_are(rank: int) -> None:
    for nodes, members, expected, questions in [
        ((7, 3, 7, 5), [0, 1, 2, 3], (0, 1, 0, 2), 1),
        ((7, 3, 7, 3), [1, 2, 3], (0, 1, 0), 1),
        ((7, 3, 7, 3), [0, 2], (0, 1), 0),
        (None, [0, 1, 2], (0, 0, 0), 1),  # on this machine
    ]:
        group = dist.new_group(members)
        if rank not in members:
            continue
        here = on_machines(rank, nodes) if nodes else contextlib.nullcontext()
        with here, mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
            assert placement.nodes_of(group) == placement.nodes_of(group) == expected
        assert all_gather.call_count == questions


def sent(rank: int, nodes: Nodes) -> list[tuple[int, int]]:
    with on_machines(rank, nodes), by_messages():
        model = fastddp.DistributedDataParallel(nn.Linear(24, 24, bias=False))
        model.register_comm_hook(None, comm_hooks.bf16_compress_hook)
        loss = model(torch.ones(1, 24)).sum()
        with Traffic() as traffic:
            loss.backward()
    return traffic.messages


@pytest.mark.parametrize(
    ("nodes", "leaves"),
    [
        # Of each node, in wires. For two levels as if each node had one rank: 2 (nodes - 1) / nodes.
        (PAIRS, [1, 1]),
        (MIXED, [1, 1]),
        (UNEQUAL, [1, 1]),
        # One level: 2 m (n - m) / n for m of n ranks.
        (LOPSIDED, [1.5, 1.5]),
        (ONE, [0]),
        (EACH_ALONE, [1.5] * 4),
    ],
    ids=str,
)
def test_few_bytes_leave_a_node_and_a_rank_sends_no_more_than_in_one_level(
    ranks: RankPool, nodes: Nodes, leaves: list[float]
) -> None:
    wire = 2 * 24 * 24
    all_sent = ranks.run(sent, len(nodes), nodes)
    left = [0] * len(leaves)
    for node, messages in zip(nodes, all_sent, strict=True):
        left[node] += sum(size for target, size in messages if nodes[target] != node)
    assert left == [expected * wire for expected in leaves]
    if nodes in (PAIRS, ONE):
        assert [sum(size for _, size in messages) for messages in all_sent] == [2 * wire * 3 // 4] * 4


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("nodes", [PAIRS, MIXED, UNEQUAL], ids=["2 + 2", "interleaved", "1 + 2"])
def test_a_long_wire_travels_in_pieces(ranks: RankPool, nodes: Nodes) -> None:
    ranks.run(in_pieces, len(nodes), nodes)


def in_pieces(rank: int, nodes: Nodes) -> None:
    """Two lanes, and a wire of two pieces of which one is longer."""
    with on_machines(rank, nodes):
        model = wrapped(Parts("ab", sizes=[3, LONG]))
        model.register_comm_hook(None, comm_hooks.bf16_compress_hook)
        for step in range(3):
            model.zero_grad()
            model(torch.tensor(float(rank + step))).backward()
            mean = (len(nodes) - 1) / 2 + step
            assert all(bool((parameter.grad - mean).abs().max() < 0.02) for parameter in model.parameters())
