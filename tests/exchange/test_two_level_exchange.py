"""``hierarchy=``: ranks of a node add up, nodes exchange sums: how exactly, what leaves a node, who is on which."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fastddp
from fastddp import comm_hooks
from fastddp.ranks.hierarchy import find_hierarchy
from hooks_by_name import register
from models import MODELS, inputs
from nodes import Traffic, by_messages, on_machines
from on_ranks import gradients, of_ranks, on_ranks
from ranks import RankPool

PAIRS = [[0, 1], [2, 3]]  # the ranks of each node


def wrap(
    module: nn.Module, hook: str, nodes: list[list[int]] | None = PAIRS, **options: Any
) -> fastddp.DistributedDataParallel:
    mesh = None if nodes is None else DeviceMesh("cpu", nodes)
    model = fastddp.DistributedDataParallel(module, hierarchy=mesh, **options)
    register(model, hook)
    return model


def gradients_of(rank: int, nodes: list[list[int]] | None, dtype: torch.dtype) -> Tensor:
    """Of five steps under PowerSGD, two of which are not compressed, over buckets that hold a parameter or two."""
    torch.manual_seed(0)
    model = wrap(MODELS["batch norm MLP"]().to(dtype), "PowerSGD", nodes, bucket_cap_mb=1e-4)
    seen = []
    for step in range(5):
        model.zero_grad()
        model(inputs("batch norm MLP", rank, step).to(dtype)).square().sum().backward()
        seen += [gradient.double().flatten() for gradient in gradients(model)]
    return torch.cat(seen)


def against_one_level(rank: int, nodes: list[list[int]], dtype: torch.dtype) -> float:
    """How far gradients, the same on all ranks, are from those of one level, in shares of the greatest."""
    one, two = (gradients_of(rank, each, dtype) for each in (None, nodes))
    assert all(torch.equal(two, other) for other in of_ranks(two))
    return float((two - one).abs().max() / one.abs().max())


ROUNDING = {torch.float32: 2e-5, torch.float64: 2e-13, torch.float16: 0.1, torch.bfloat16: 0.8}


@pytest.mark.tier("slow", but_one_in=9)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("nodes", [PAIRS, [[0, 1], [2, 3], [4, 5]], [[3, 1], [0, 2]], [[0, 1, 2], [3, 4, 5]]], ids=str)
def test_gradients_are_those_of_one_level_whoever_shares_a_node(
    ranks: RankPool, nodes: list[list[int]], dtype: torch.dtype
) -> None:
    """Factors of sums are sums of factors, and errors of a node are the mean of its ranks'."""
    for difference in ranks.run(against_one_level, sum(map(len, nodes)), nodes, dtype):
        assert difference < ROUNDING[dtype]


def sent(rank: int, hook: str) -> tuple[list[int], list[int]]:
    module = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))
    with by_messages():
        model = wrap(module, hook, bucket_cap_mb=0)
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.ones(1, 24)).sum()
            with Traffic() as traffic:
                loss.backward()
    return [size for _, size in traffic.messages], traffic.sums


HALF = 4 * 24 * 24 // 2  # of a bucket


@pytest.mark.parametrize(
    ("hook", "messages", "sums"),
    [
        ("none", [], [HALF] * 3),
        ("fp16", [HALF // 4] * 6, []),  # a sharded sum over two nodes
        # Two blocks of 288 numbers need one group of 1,040 bytes, and each of the two nodes owns one.
        ("int8", [1040] * 6, []),
    ],
)
def test_ranks_exchange_their_parts_of_each_bucket(
    ranks: RankPool, hook: str, messages: list[int], sums: list[int]
) -> None:
    inside = [HALF] * 6  # to the other rank of the node: its run, and what became of the own
    for found, added_up in ranks.run(sent, 4, hook):
        assert sorted(found) == sorted(inside + messages)
        assert added_up == sums


def test_powersgd_exchanges_each_matrix_once_a_node(ranks: RankPool) -> None:
    of_ranks = ranks.run(sent, 4, "PowerSGD")
    factors = 4 * 2 * (24 + 24)  # two vectors in P and in Q
    for node in (of_ranks[:2], of_ranks[2:]):
        assert sum(itertools.chain(*(sums for _, sums in node))) == 3 * factors


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
@pytest.mark.parametrize("hook", ["none", "fp16", "int8", "PowerSGD"])
@on_ranks(4)
def test_gradients_live_in_one_wire_and_are_their_keepers(rank: int, hook: str, view: bool) -> None:
    model = wrap(nn.Linear(8, 8), hook, gradient_as_bucket_view=view)
    places = []
    for step in range(7):
        if step == 6:  # the last one is kept
            kept = model.module.weight.grad
            before = kept.clone()
        model.zero_grad()
        model(torch.full((1, 8), step + 1.0)).sum().backward()
        places.append(model.module.weight.grad.data_ptr())
    assert len(set(places[2:6])) == 1
    assert torch.equal(kept, before) == (not view)


OF_PAIRS = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
INTERLEAVED = [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
TWO_AGENTS = ((0, 2), (0, 2), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("machines", "launcher", "expected"),
    [
        ((7, 7, 5, 5), None, OF_PAIRS),
        ((7, 5, 7, 5), None, INTERLEAVED),
        ((7, 7, 7, 7), TWO_AGENTS, OF_PAIRS),  # two agents on one machine are two nodes
        ((7, 7, 7, 7), None, [None] * 4),  # one node, or one rank on each, is one level
        ((7, 5, 3, 1), None, [None] * 4),
        ((7, 7, 7, 5), None, "3 on that of rank 0, 1, 2; 1 on that of rank 3. Start as many processes on each"),
        ((7, 5, 7, 7), TWO_AGENTS, "counts rank 0, 1 to one node .*rank 1 is on another machine than rank 0"),
    ],
)
@on_ranks(4)
def test_ranks_of_one_machine_or_of_one_launcher_share_a_node(
    rank: int, machines: Sequence[int], launcher: Sequence[tuple[int, int]] | None, expected: list[Any] | str
) -> None:
    """``expected``: by rank those of its node and those in its place of each; or an error."""
    told = zip(("GROUP_RANK", "LOCAL_WORLD_SIZE"), map(str, launcher[rank]), strict=True) if launcher else ()
    fails = pytest.raises(ValueError, match=expected) if isinstance(expected, str) else contextlib.nullcontext()
    with (
        warnings.catch_warnings(record=True, action="always") as said,
        mock.patch.dict("os.environ", dict(told)),
        on_machines(rank, machines),
        fails,
    ):
        hierarchy, again = (find_hierarchy("node", dist.group.WORLD, torch.device("cpu")) for _ in range(2))
        assert hierarchy is again  # made once
        groups = None if hierarchy is None else (hierarchy.node, hierarchy.between)
        assert expected[rank] == (groups and tuple(map(dist.get_process_group_ranks, groups)))
    useless = ["hierarchy='node' changes nothing here" in str(one.message) for one in said]
    assert sum(useless) == (2 if expected == [None] * 4 and rank == 0 else 0)


@on_ranks(4)
def test_what_has_no_two_levels_is_refused_with_a_remedy(rank: int) -> None:
    mesh, pairs = DeviceMesh("cpu", PAIRS), [dist.new_group(pair) for pair in PAIRS]
    arguments: dict[str, dict[str, Any]] = {
        "not 'nodes'": {"hierarchy": "nodes"},
        "not 2": {"hierarchy": 2},
        "two dimensions": {"hierarchy": DeviceMesh("cpu", [0, 1, 2, 3])},
        "Give a mesh of the same ranks": {"hierarchy": mesh, "process_group": pairs[rank // 2]},
        "Leave out one or the other": {"hierarchy": mesh, "bucket_cap_mb": "auto"},
    }
    for words, options in arguments.items():
        with pytest.raises((TypeError, ValueError), match=words):
            fastddp.DistributedDataParallel(nn.Linear(2, 2), **options)
    hooks: dict[str, tuple[object, Any]] = {
        "Use a hook of fastddp.comm_hooks": (None, lambda state, bucket: None),
        "Use one or the other": (comm_hooks.PostLocalSGDState(None, None, 2), comm_hooks.post_localSGD_hook),
        "Leave the hook's process group at None": (pairs[rank // 2], comm_hooks.allreduce_hook),
    }
    for words, (state, hook) in hooks.items():
        model = wrap(nn.Linear(2, 2), "none")
        with pytest.raises(ValueError, match=words):
            model.register_comm_hook(state, hook)
        model(torch.ones(1, 2)).sum().backward()  # without the hook


@on_ranks(4)
def test_ranks_that_were_given_other_hierarchies_are_told_who(rank: int) -> None:
    pairs = DeviceMesh("cpu", PAIRS)
    hierarchies = [pairs, DeviceMesh("cpu", [[0, 2], [1, 3]]), "node", None]
    with pytest.raises(RuntimeError) as raised:
        fastddp.DistributedDataParallel(nn.Linear(2, 2), hierarchy=hierarchies[rank])
    for words in (
        "rank 0, and every rank not named here: hierarchy=a mesh of the nodes [[0, 1], [2, 3]]",
        "rank 1: hierarchy=a mesh of the nodes [[0, 2], [1, 3]]",
        "rank 2: hierarchy='node'",
        "rank 3: hierarchy=None",
    ):
        assert words in str(raised.value)
    fastddp.DistributedDataParallel(nn.Linear(2, 2), hierarchy=pairs)  # as all ranks now


@on_ranks(4)
def test_where_nothing_travels_there_are_no_levels(rank: int) -> None:
    model = wrap(nn.Linear(2, 2, bias=False), "none")
    model.register_comm_hook(None, comm_hooks.noop_hook)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.mean().item() == rank
