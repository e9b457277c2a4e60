"""16-bit sums over gloo among several nodes: what leaves a node, how exact it is, and what a failed rank does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

import fastddp
from casts import CASTS, VIEWS, WIRES, error, train, under_torch
from fastddp import comm_hooks
from fastddp.exchange import placement
from ranks import RankPool
from test_lanes import ShortAndLong

Nodes = Sequence[int]

PAIRS, MIXED, UNEQUAL = (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1)
LOPSIDED, ONE, EACH_ALONE = (0, 0, 0, 1), (0, 0, 0, 0), (0, 1, 2, 3)
TWO_LEVELS = pytest.mark.parametrize("nodes", [PAIRS, MIXED, UNEQUAL], ids=["2 + 2", "interleaved", "1 + 2"])


def pretend(rank: int, nodes: Nodes) -> None:
    """The rank is on that machine; what it found out about its process group before is forgotten."""
    placement._this_machine = lambda: nodes[rank].to_bytes(8)
    placement._known.clear()


@pytest.fixture(autouse=True)
def _real_machines_afterwards(ranks: RankPool) -> Any:
    yield
    ranks.run(stop_pretending, 4)


def stop_pretending(rank: int, real: Callable[[], bytes] = placement._this_machine) -> None:
    placement._this_machine = real


# ----------------------------------------------------------------------------------------------------------- placement


def found(rank: int, nodes: Nodes, members: list[int]) -> tuple[tuple[int, ...], int]:
    """What ranks find out, and how often they ask each other for it."""
    group = dist.new_group(members)
    if rank not in members:
        return (), 0
    pretend(rank, nodes)
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        first = placement.nodes_of(group)
        assert placement.nodes_of(group) == first
    return first, all_gather.call_count


def test_ranks_ask_each_other_once_where_they_are(ranks: RankPool) -> None:
    assert ranks.run(found, 4, (7, 3, 7, 5), [0, 1, 2, 3]) == [((0, 1, 0, 2), 1)] * 4
    assert ranks.run(found, 4, (7, 3, 7, 3), [1, 2, 3]) == [((), 0), *[((0, 1, 0), 1)] * 3]
    assert ranks.run(found, 4, (7, 3, 7, 3), [0, 2]) == [((0, 1), 0), ((), 0)] * 2


def really_found(rank: int) -> tuple[int, ...]:
    placement._known.clear()
    return placement.nodes_of(dist.group.WORLD)


def test_the_ranks_of_one_machine_are_on_one_node(ranks: RankPool) -> None:
    assert ranks.run(really_found, 3) == [(0, 0, 0)] * 3


# ------------------------------------------------------------------------------------------------ bytes that leave


class Messages(TorchDispatchMode):
    """Bytes that this rank sends, by the rank that it sends them to."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.sent = [0] * ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            (tensor,), _, target, _ = args
            self.sent[target] += tensor.nbytes
        return func(*args, **kwargs or {})


def sent(rank: int, nodes: Nodes) -> list[int]:
    pretend(rank, nodes)
    model = fastddp.DistributedDataParallel(nn.Linear(24, 24, bias=False))
    model.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    loss = model(torch.ones(1, 24)).sum()
    with Messages(len(nodes)) as messages:
        loss.backward()
    return messages.sent


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
def test_few_bytes_leave_a_node(ranks: RankPool, nodes: Nodes, leaves: list[float]) -> None:
    wire = 2 * 24 * 24
    all_sent = ranks.run(sent, len(nodes), nodes)
    for node, expected in enumerate(leaves):
        left = 0
        for source, bytes_to in zip(nodes, all_sent, strict=True):
            left += sum(size for size, target in zip(bytes_to, nodes, strict=True) if source == node != target)
        assert left == expected * wire


@pytest.mark.parametrize("nodes", [PAIRS, ONE])
def test_a_rank_sends_as_much_in_two_levels_as_in_one(ranks: RankPool, nodes: Nodes) -> None:
    assert [sum(bytes_to) for bytes_to in ranks.run(sent, 4, nodes)] == [2 * 2 * 24 * 24 * 3 // 4] * 4


# ------------------------------------------------------------------------------------------------------------ gradients


def rounding(rank: int, nodes: Nodes) -> list[float]:
    """256 + 1 + 1 + 1 over four ranks, another one having the 256 in each element: bf16 holds 256 and 258, not 257."""
    pretend(rank, nodes)
    model = fastddp.DistributedDataParallel(nn.Linear(4, 1, bias=False))
    model.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    model(4 * (1 + 255 * torch.eye(4)[rank : rank + 1])).sum().backward()
    return model.module.weight.grad[0].tolist()


def test_a_sum_is_rounded_once_a_level(ranks: RankPool) -> None:
    # 257 is halfway, and rounds to 256 in its node; the other node has 2. In one level it would be 259, and so 260.
    assert ranks.run(rounding, 4, PAIRS) == [[258.0] * 4] * 4
    assert ranks.run(rounding, 4, ONE) == [[260.0] * 4] * 4


def cast_errors(rank: int, nodes: Nodes, wire: torch.dtype, view: bool) -> tuple[float, float]:
    """Of ours and of torch's own hook, against fp64."""
    pretend(rank, nodes)
    exact = train(rank, TorchDDP, None, None, dtype=torch.float64)
    ours = train(rank, fastddp.DistributedDataParallel, None, CASTS[wire], gradient_as_bucket_view=view)
    theirs = train(rank, TorchDDP, None, under_torch(CASTS[wire]))
    return error(ours, exact), error(theirs, exact)


@pytest.mark.tier("slow", but_one_in=5)
@VIEWS
@WIRES
@TWO_LEVELS
def test_casts_are_as_exact_as_torchs(ranks: RankPool, nodes: Nodes, wire: torch.dtype, view: bool) -> None:
    for ours, theirs in ranks.run(cast_errors, len(nodes), nodes, wire, view):
        assert 0 < ours <= 2 * theirs


def in_pieces(rank: int, nodes: Nodes) -> list[bool]:
    """Two lanes, and a wire of two pieces of which one is longer."""
    pretend(rank, nodes)
    model = fastddp.DistributedDataParallel(ShortAndLong(), bucket_cap_mb=0)
    model.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    right = []
    for step in range(3):
        model.zero_grad()
        model(float(rank + step)).backward()
        mean = (len(nodes) - 1) / 2 + step
        right.append(all(bool((parameter.grad - mean).abs().max() < 0.02) for parameter in model.parameters()))
    return right


@pytest.mark.tier("slow", but_one_in=3)
@TWO_LEVELS
def test_a_long_wire_travels_in_pieces(ranks: RankPool, nodes: Nodes) -> None:
    assert ranks.run(in_pieces, len(nodes), nodes) == [[True] * 3] * len(nodes)


# ------------------------------------------------------------------------------------------------------- failed windows


def layers() -> nn.Sequential:
    result = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    for layer in result:
        nn.init.eye_(layer.weight)
    return result


def joined(rank: int, nodes: Nodes) -> list[Tensor]:
    """Rank 0 runs out of inputs first: from then on it takes part with zeros, and with sums of its shards."""
    pretend(rank, nodes)
    model = fastddp.DistributedDataParallel(layers(), bucket_cap_mb=0)
    model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    last = torch.zeros(())
    with model.join(divide_by_initial_world_size=True):
        for _ in range(2 if rank == 0 else 4):
            model.zero_grad()
            model(torch.full((1, 4), float(rank))).sum().backward()
            last = model.module[0].weight.grad.sum().clone()
    return [last]


@pytest.mark.parametrize("nodes", [PAIRS, MIXED, UNEQUAL, ONE], ids=["2 + 2", "interleaved", "1 + 2", "4"])
def test_ranks_that_have_joined_add_up_what_others_send(ranks: RankPool, nodes: Nodes) -> None:
    count = len(nodes)
    mean = 16 * sum(range(count)) / count
    for (last,) in ranks.run(joined, count, nodes):
        assert float(last) == pytest.approx(mean, rel=0.02)  # rank 0's share is zero either way
