"""``hierarchy=``: ranks of a node add up, nodes exchange sums: how exactly, what leaves a node, who is on which."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fastddp
from casts import VIEWS, error, train
from fastddp import comm_hooks
from fastddp.exchange import placement
from fastddp.exchange.hierarchy import find_hierarchy
from ranks import RankPool

Grid = tuple[int, int] | list[list[int]]  # nodes and ranks of a node; or the ranks of each node

OTHER_GRIDS: list[Grid] = [(3, 2), (2, 3), [[1, 0], [2, 3]], [[3, 1], [0, 2]], [[0, 2], [3, 1]], [[2, 3], [0, 1]]]
NIGHTLY = pytest.mark.tier("nightly", but_one_in=9)
HOOKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "fp16": comm_hooks.fp16_compress_hook,
    "int8": comm_hooks.int8_compress_hook,
    "PowerSGD": comm_hooks.powerSGD_hook,
}


def count(grid: Grid) -> int:
    return grid[0] * grid[1] if isinstance(grid, tuple) else sum(map(len, grid))


def mesh_of(grid: Grid) -> DeviceMesh:
    return init_device_mesh("cpu", grid) if isinstance(grid, tuple) else DeviceMesh("cpu", grid)


def state_of(hook: str) -> object:
    return comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2) if hook == "PowerSGD" else None


def wrap(module: nn.Module, hook: str, **options: Any) -> fastddp.DistributedDataParallel:
    model = fastddp.DistributedDataParallel(module, hierarchy=mesh_of((2, 2)), **options)
    if HOOKS[hook] is not None:
        model.register_comm_hook(state_of(hook), HOOKS[hook])  # type: ignore[arg-type]
    return model


def against_one_level(rank: int, grid: Grid, hook: str, dtype: torch.dtype, view: bool) -> tuple[float, bool]:
    """How far gradients are from those of one level, in shares of the greatest; and whether ranks agree on them."""
    results = []
    for hierarchy in (None, mesh_of(grid)):
        options: dict[str, Any] = {"hierarchy": hierarchy, "gradient_as_bucket_view": view}
        make = fastddp.DistributedDataParallel
        results.append(train(rank, make, state_of(hook), HOOKS[hook], dtype=dtype, steps=5, **options))
    flat = torch.cat([gradient.flatten() for gradient in results[1]])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    greatest = max(float(gradient.abs().max()) for gradient in results[0])
    return error(results[1], [g.double() for g in results[0]]) / greatest, all(torch.equal(flat, o) for o in everywhere)


ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.tier("slow", but_one_in=11)
@pytest.mark.parametrize("grid", [(2, 2), *(pytest.param(grid, marks=NIGHTLY) for grid in OTHER_GRIDS)], ids=str)
@pytest.mark.parametrize("hook", ["none", "PowerSGD"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@VIEWS
def test_gradients_are_those_of_one_level_whoever_shares_a_node(
    ranks: RankPool, grid: Grid, hook: str, dtype: torch.dtype, view: bool
) -> None:
    """Under PowerSGD too: factors of sums are sums of factors, and errors of a node are the mean of its ranks'."""
    for difference, is_same in ranks.run(against_one_level, count(grid), grid, hook, dtype, view):
        assert difference < ROUNDING[dtype] * (20 if hook == "PowerSGD" else 1)
        assert is_same


STATUS = 86 * 4  # bytes


class Sent(TorchDispatchMode):
    """Bytes of what is sent in messages and, besides statuses, of what is added up by allreduces."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[int] = []
        self.sums: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.messages.append(args[0][0].nbytes)
        elif func is torch.ops.c10d.allreduce_.default and args[0][0].nbytes != STATUS:
            self.sums.append(args[0][0].nbytes)
        return func(*args, **kwargs or {})


def sent(rank: int, hook: str) -> tuple[list[int], list[int]]:
    module = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))
    model = wrap(module, hook, bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.ones(1, 24)).sum()
        with Sent() as seen:
            loss.backward()
    return seen.messages, seen.sums


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


def kept_memory(rank: int, hook: str, view: bool) -> tuple[int, bool]:
    """In how many places a gradient was over some steps, one of which is kept; and whether what was kept stayed."""
    model = wrap(nn.Linear(8, 8), hook, gradient_as_bucket_view=view)
    places = []
    for step in range(6):
        model.zero_grad()
        model(torch.full((1, 8), step + 1.0)).sum().backward()
        places.append(model.module.weight.grad.data_ptr())
    kept = model.module.weight.grad
    before = kept.clone()
    model.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    return len(set(places[2:])), torch.equal(kept, before)


@pytest.mark.tier("slow", but_one_in=3)
@VIEWS
@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_live_in_one_wire_and_are_their_keepers(ranks: RankPool, hook: str, view: bool) -> None:
    assert ranks.run(kept_memory, 4, hook, view) == [(1, not view)] * 4


@contextlib.contextmanager
def on_machine(machine: int, launcher: tuple[int, int] | None) -> Any:
    told = {} if launcher is None else {"GROUP_RANK": str(launcher[0]), "LOCAL_WORLD_SIZE": str(launcher[1])}
    place = mock.patch.object(placement, "_this_machine", return_value=machine.to_bytes(8))
    with mock.patch.dict("os.environ", told), place:
        yield


def found(
    rank: int, machines: Sequence[int], launcher: Sequence[tuple[int, int]] | None
) -> tuple[list[int], list[int]] | str | None:
    """The ranks of the node and those in this rank's place of each; or an error."""
    with on_machine(machines[rank], None if launcher is None else launcher[rank]):
        try:
            hierarchy = find_hierarchy("node", dist.group.WORLD, torch.device("cpu"))
        except ValueError as raised:
            return str(raised)
        if hierarchy is None:
            return None
        assert find_hierarchy("node", dist.group.WORLD, torch.device("cpu")) is hierarchy  # made once
    return dist.get_process_group_ranks(hierarchy.node), dist.get_process_group_ranks(hierarchy.between)


PAIRS = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
INTERLEAVED = [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
TWO_AGENTS = ((0, 2), (0, 2), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("machines", "launcher", "expected"),
    [
        ((7, 7, 5, 5), None, PAIRS),
        ((7, 5, 7, 5), None, INTERLEAVED),
        ((7, 7, 7, 7), TWO_AGENTS, PAIRS),  # two agents on one machine are two nodes
        ((7, 7, 7, 7), None, [None] * 4),  # one node, or one rank on each, is one level
        ((7, 5, 3, 1), None, [None] * 4),
        (
            (7, 7, 7, 5),
            None,
            ["3 on that of rank 0, 1, 2; 1 on that of rank 3", "Start as many processes on each"],
        ),
        ((7, 5, 7, 7), TWO_AGENTS, ["counts rank 0, 1 to one node", "rank 1 is on another machine than rank 0"]),
    ],
)
def test_ranks_of_one_machine_or_of_one_launcher_share_a_node(
    ranks: RankPool, machines: Sequence[int], launcher: Sequence[tuple[int, int]] | None, expected: list[Any]
) -> None:
    of_ranks = ranks.run(found, 4, machines, launcher)
    if isinstance(expected[0], str):
        assert all(words in text for text in of_ranks for words in expected)
    else:
        assert of_ranks == expected


def refused(rank: int) -> dict[str, str]:
    mesh, pairs = mesh_of((2, 2)), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    texts = {}
    arguments: dict[str, dict[str, Any]] = {
        "not 'nodes'": {"hierarchy": "nodes"},
        "not 2": {"hierarchy": 2},
        "two dimensions": {"hierarchy": init_device_mesh("cpu", (4,))},
        "Give a mesh of the same ranks": {"hierarchy": mesh, "process_group": pairs[rank // 2]},
        "Leave out one or the other": {"hierarchy": mesh, "bucket_cap_mb": "auto"},
    }
    for words, options in arguments.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            fastddp.DistributedDataParallel(nn.Linear(2, 2), **options)
        texts[words] = str(raised.value)
    hooks: dict[str, tuple[object, Any]] = {
        "Use a hook of fastddp.comm_hooks": (None, lambda state, bucket: None),
        "Use one or the other": (comm_hooks.PostLocalSGDState(None, None, 2), comm_hooks.post_localSGD_hook),
        "Leave the hook's process group at None": (pairs[rank // 2], comm_hooks.allreduce_hook),
    }
    for words, (state, hook) in hooks.items():
        model = wrap(nn.Linear(2, 2), "none")
        with pytest.raises(ValueError, match=r".") as refusal:
            model.register_comm_hook(state, hook)
        texts[words] = str(refusal.value)
        model(torch.ones(1, 2)).sum().backward()  # without the hook
    return texts


def test_what_has_no_two_levels_is_refused_with_a_remedy(ranks: RankPool) -> None:
    for texts in ranks.run(refused, 4):
        for words, text in texts.items():
            assert words in text


def told(rank: int, what: Sequence[str]) -> str:
    """The error of ranks that were given the hierarchies of these names."""
    hierarchies: dict[str, Any] = {
        "none": None,
        "node": "node",
        "pairs": mesh_of((2, 2)),
        "across": DeviceMesh("cpu", [[0, 2], [1, 3]]),
    }
    with pytest.raises(RuntimeError) as raised:
        fastddp.DistributedDataParallel(nn.Linear(2, 2), hierarchy=hierarchies[what[rank]])
    fastddp.DistributedDataParallel(nn.Linear(2, 2), hierarchy=hierarchies[what[0]])  # as all ranks now
    return str(raised.value)


def test_ranks_that_were_given_other_hierarchies_are_told_who(ranks: RankPool) -> None:
    for text in ranks.run(told, 4, ("pairs", "across", "node", "none")):
        assert "rank 0, and every rank not named here: hierarchy=a mesh of the nodes [[0, 1], [2, 3]]" in text
        assert "rank 1: hierarchy=a mesh of the nodes [[0, 2], [1, 3]]" in text
        assert "rank 2: hierarchy='node'" in text
        assert "rank 3: hierarchy=None" in text


def without_communication(rank: int) -> float:
    model = wrap(nn.Linear(2, 2, bias=False), "none")
    model.register_comm_hook(None, comm_hooks.noop_hook)
    model(torch.full((1, 2), float(rank))).sum().backward()
    return model.module.weight.grad.mean().item()


def test_where_nothing_travels_there_are_no_levels(ranks: RankPool) -> None:
    assert ranks.run(without_communication, 4) == [0.0, 1.0, 2.0, 3.0]
