"""``hierarchy=``: ranks of a node add up, nodes exchange sums, by whatever hook; what leaves a node, and failures."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fastddp
from casts import CASTS, VIEWS, error, gradients_of, train
from fastddp import comm_hooks
from fastddp.exchange import placement
from fastddp.exchange.hierarchy import find_hierarchy
from ranks import RankPool

Grid = tuple[int, int]  # nodes, ranks of a node
Rows = list[list[int]]

GRIDS = pytest.mark.parametrize(
    "grid", [(2, 2), *(pytest.param(grid, marks=pytest.mark.tier("nightly")) for grid in [(3, 2), (2, 3)])], ids=str
)
HOOKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "fp16": comm_hooks.fp16_compress_hook,
    "bf16": comm_hooks.bf16_compress_hook,
    "int8": comm_hooks.int8_compress_hook,
    "fp8": comm_hooks.fp8_compress_hook,
    "PowerSGD": comm_hooks.powerSGD_hook,
    "PowerSGD, batched": comm_hooks.batched_powerSGD_hook,
    "PowerSGD in fp16": comm_hooks.fp16_compress_wrapper(comm_hooks.powerSGD_hook),
}


def count(grid: Grid) -> int:
    return grid[0] * grid[1]


def mesh_of(grid: Grid | Rows) -> DeviceMesh:
    return DeviceMesh("cpu", grid) if isinstance(grid, list) else init_device_mesh("cpu", grid)


def state_of(hook: str) -> object:
    return comm_hooks.PowerSGDState(None, 2, start_powerSGD_iter=2) if "PowerSGD" in hook else None


def wrap(module: nn.Module, hook: str, hierarchy: object, **options: Any) -> fastddp.DistributedDataParallel:
    model = fastddp.DistributedDataParallel(module, hierarchy=hierarchy, **options)  # type: ignore[arg-type]
    if HOOKS[hook] is not None:
        model.register_comm_hook(state_of(hook), HOOKS[hook])  # type: ignore[arg-type]
    return model


# ------------------------------------------------------------------------------------------------------------ gradients


class Numbers(nn.Module):
    """The gradient of each parameter is the input times 1, 2, 3, ..., 8, 1, ..., in shapes that no shard ends with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [(17, 5), (3,), (), (1,), (40,), (9, 4), (0, 3), (64,)]
        self.own = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
        self.own.append(torch.zeros(6, 8, dtype=dtype).t())
        self.own.append(torch.zeros(10, 4, dtype=dtype)[:, ::2])

    def forward(self, x: float) -> Tensor:
        return sum((x * numbers(parameter) * parameter).sum().real for parameter in self.own)  # type: ignore[return-value]


def numbers(like: Tensor) -> Tensor:
    return (torch.arange(like.numel()) % 8 + 1).to(like.dtype).view(like.shape)


def exact_sums(rank: int, grid: Grid | Rows, dtype: torch.dtype, view: bool, cap: float) -> list[bool]:
    model = fastddp.DistributedDataParallel(
        Numbers(dtype), hierarchy=mesh_of(grid), gradient_average="sum", gradient_as_bucket_view=view, bucket_cap_mb=cap
    )
    right = []
    for step in range(3):
        model.zero_grad()
        model(float(rank + step)).backward()
        total = sum(other + step for other in range(dist.get_world_size()))
        right.append(all(torch.equal(p.grad, total * numbers(p)) for p in model.module.own))
    return right


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("cap", [0.0, 0.0003, 25])
@VIEWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@GRIDS
def test_sums_that_are_exact_are_exact(ranks: RankPool, grid: Grid, dtype: torch.dtype, view: bool, cap: float) -> None:
    assert ranks.run(exact_sums, count(grid), grid, dtype, view, cap) == [[True] * 3] * count(grid)


def against_one_level(rank: int, grid: Grid | Rows, dtype: torch.dtype, hook: str, view: bool) -> tuple[float, bool]:
    """How far gradients are from those of one level, in shares of the greatest; and whether ranks agree on them."""
    results = []
    for hierarchy in (None, mesh_of(grid)):
        results.append(
            train(
                rank,
                fastddp.DistributedDataParallel,
                state_of(hook),
                HOOKS[hook],
                dtype=dtype,
                hierarchy=hierarchy,
                gradient_as_bucket_view=view,
                steps=5,
            )
        )
    flat = torch.cat([gradient.flatten() for gradient in results[1]])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    greatest = max(float(gradient.abs().max()) for gradient in results[0])
    return error(results[1], [g.double() for g in results[0]]) / greatest, all(torch.equal(flat, o) for o in everywhere)


@pytest.mark.parametrize("rows", [[[1, 0], [2, 3]], [[3, 1], [0, 2]], [[0, 2], [3, 1]], [[2, 3], [0, 1]]], ids=str)
def test_a_mesh_says_who_shares_a_node_in_whatever_order(ranks: RankPool, rows: Rows) -> None:
    assert ranks.run(exact_sums, 4, rows, torch.float32, False, 0.0003) == [[True] * 3] * 4
    for difference, is_same in ranks.run(against_one_level, 4, rows, torch.float64, "PowerSGD", False):
        assert difference < 20 * ROUNDING[torch.float64]
        assert is_same


ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}


@pytest.mark.tier("slow", but_one_in=3)
@VIEWS
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=["fp32", "fp64"])
@pytest.mark.parametrize("hook", ["none", "PowerSGD"])
@GRIDS
def test_gradients_are_those_of_one_level_to_rounding(
    ranks: RankPool, grid: Grid, hook: str, dtype: torch.dtype, view: bool
) -> None:
    """Under PowerSGD too: factors of sums are sums of factors, and errors of a node are the mean of its ranks'."""
    for difference, is_same in ranks.run(against_one_level, count(grid), grid, dtype, hook, view):
        assert difference < ROUNDING[dtype] * (20 if hook == "PowerSGD" else 1)
        assert is_same


@pytest.mark.tier("slow")
def test_what_a_node_remembers_is_of_the_average_over_nodes(ranks: RankPool) -> None:
    """However many ranks are on each: here nodes and ranks of a node are not as many."""
    for difference, is_same in ranks.run(against_one_level, 6, (3, 2), torch.float64, "PowerSGD", False):
        assert difference < 20 * ROUNDING[torch.float64]
        assert is_same


def cast_errors(rank: int, grid: Grid, wire: torch.dtype) -> tuple[float, float]:
    exact = train(rank, fastddp.DistributedDataParallel, None, None, dtype=torch.float64)
    errors = [
        error(train(rank, fastddp.DistributedDataParallel, None, CASTS[wire], hierarchy=hierarchy), exact)
        for hierarchy in (mesh_of(grid), None)
    ]
    return errors[0], errors[1]


@pytest.mark.parametrize("wire", list(CASTS), ids=["fp16", "bf16"])
@GRIDS
def test_casts_are_about_as_exact_as_in_one_level(ranks: RankPool, grid: Grid, wire: torch.dtype) -> None:
    for ours, flat in ranks.run(cast_errors, count(grid), grid, wire):
        assert 0 < ours <= 2 * flat


# --------------------------------------------------------------------------------------------------- what leaves a node


class Sent(TorchDispatchMode):
    """What is sent in messages (bytes), and what is added up by allreduces (elements, dtype)."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[int] = []
        self.sums: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.messages.append(args[0][0].nbytes)
        elif func is torch.ops.c10d.allreduce_.default:
            self.sums.append((args[0][0].numel(), args[0][0].dtype))
        return func(*args, **kwargs or {})


def sent(rank: int, grid: Grid, hook: str) -> tuple[list[int], list[tuple[int, torch.dtype]]]:
    module = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))
    model = wrap(module, hook, mesh_of(grid), bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.ones(1, 24)).sum()
        with Sent() as seen:
            loss.backward()
    return seen.messages, [(elements, dtype) for elements, dtype in seen.sums if dtype.is_floating_point]


def test_without_compression_a_rank_exchanges_its_part_of_each_bucket(ranks: RankPool) -> None:
    for messages, sums in ranks.run(sent, 4, (2, 2), "none"):
        assert messages == [4 * 24 * 24 // 2] * 6  # to the other rank of the node: its run, and what became of the own
        assert sums == [(24 * 24 // 2, torch.float32)] * 3


def test_casts_exchange_half_of_the_bytes(ranks: RankPool) -> None:
    for messages, sums in ranks.run(sent, 4, (2, 2), "fp16"):
        inside = [4 * 24 * 24 // 2] * 6
        between = [2 * 24 * 24 // 4] * 6  # a sharded sum over two nodes
        assert sorted(messages) == sorted(inside + between)
        assert sums == []


def test_8_bits_exchange_a_quarter_and_the_scales(ranks: RankPool) -> None:
    for messages, sums in ranks.run(sent, 4, (2, 2), "int8"):
        inside = [4 * 24 * 24 // 2] * 6
        # Two blocks of 288 numbers need one group of 1,040 bytes, and each of the two nodes owns one.
        assert sorted(messages) == sorted(inside + [1040] * 6)
        assert sums == []


def test_powersgd_exchanges_each_matrix_once_a_node(ranks: RankPool) -> None:
    of_ranks = ranks.run(sent, 4, (2, 2), "PowerSGD")
    factors = 2 * (24 + 24)  # two vectors in P and in Q
    for node in (of_ranks[:2], of_ranks[2:]):
        assert sum(elements for _, sums in node for elements, _ in sums) == 3 * factors


def kept_memory(rank: int, hook: str, view: bool) -> tuple[int, bool]:
    """In how many places a gradient was over some steps, one of which is kept; and whether what was kept stayed."""
    model = wrap(nn.Linear(8, 8), hook, mesh_of((2, 2)), gradient_as_bucket_view=view)
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


@pytest.mark.parametrize("view", [False, True], ids=["default", "view"])
@pytest.mark.parametrize("hook", ["none", "bf16", "int8", "PowerSGD"])
def test_gradients_live_in_one_wire_and_are_their_keepers(ranks: RankPool, hook: str, view: bool) -> None:
    for places, stayed in ranks.run(kept_memory, 4, hook, view):
        assert places == 1
        assert stayed != view


class Halves(nn.Module):
    """Two vectors, of which a forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.linspace(1.0, 2.0, 3000)) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        loss = (self.first * x).sum()
        return loss + (self.second.square() * x).sum() if both else loss


def errors_around_a_window_without(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is remembered of the second vector, before and behind a window in which no rank uses it."""
    state = comm_hooks.BlockState()
    model = fastddp.DistributedDataParallel(Halves(), find_unused_parameters=True, hierarchy=mesh_of((2, 2)))
    model.register_comm_hook(state, comm_hooks.int8_compress_hook)
    seen = []
    for both in (True, True, False):
        model.zero_grad()
        model(torch.tensor(1.0 + rank), both).backward()
        seen.append({name: error.clone() for name, error in state.errors.items() if name.startswith("second")})
    return seen[1], seen[2]


def test_what_was_left_out_of_a_gradient_waits_while_no_rank_uses_it(ranks: RankPool) -> None:
    elements = 0
    for before, after in ranks.run(errors_around_a_window_without, 4):
        for name, kept in before.items():
            elements += kept.numel()
            left_out = float(kept.abs().max())
            assert left_out > 1e-3
            # The sum of what travelled was rounded by half of 1/127 of its largest at most, and that stays.
            torch.testing.assert_close(after[name], kept, rtol=0, atol=2 * left_out / 254)
    assert elements == 2 * 3000  # once a node


# ------------------------------------------------------------------------------------------------------- failed windows


# ---------------------------------------------------------------------------------------------------------------- nodes


@contextlib.contextmanager
def on_machine(machine: int, launcher: tuple[int, int] | None = None) -> Any:
    told = {} if launcher is None else {"GROUP_RANK": str(launcher[0]), "LOCAL_WORLD_SIZE": str(launcher[1])}
    with (
        mock.patch.dict("os.environ", told),
        mock.patch.object(placement, "_this_machine", return_value=machine.to_bytes(8)),
    ):
        yield


def found(
    rank: int, machines: Sequence[int], launcher: Sequence[tuple[int, int]] | None = None
) -> tuple[list[int], list[int]] | str | None:
    """The ranks of the node and those in this rank's place of each; or an error."""
    with on_machine(machines[rank], None if launcher is None else launcher[rank]):
        try:
            hierarchy = find_hierarchy("node", dist.group.WORLD, torch.device("cpu"))
        except ValueError as raised:
            return str(raised)
    if hierarchy is None:
        return None
    again = find_hierarchy("node", dist.group.WORLD, torch.device("cpu"))
    assert again is hierarchy  # made once
    return dist.get_process_group_ranks(hierarchy.node), dist.get_process_group_ranks(hierarchy.between)


def test_ranks_of_one_machine_share_a_node(ranks: RankPool) -> None:
    pairs = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert ranks.run(found, 4, (7, 7, 5, 5)) == pairs
    interleaved = [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
    assert ranks.run(found, 4, (7, 5, 7, 5)) == interleaved


def test_what_the_launcher_says_counts(ranks: RankPool) -> None:
    """Two agents on one machine are two nodes."""
    pairs = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert ranks.run(found, 4, (7, 7, 7, 7), ((0, 2), (0, 2), (1, 2), (1, 2))) == pairs


def test_one_node_or_one_rank_on_each_is_one_level(ranks: RankPool) -> None:
    assert ranks.run(found, 4, (7, 7, 7, 7)) == [None] * 4
    assert ranks.run(found, 4, (7, 5, 3, 1)) == [None] * 4


def test_unequal_nodes_are_refused_on_all_ranks(ranks: RankPool) -> None:
    for text in ranks.run(found, 4, (7, 7, 7, 5)):
        assert "3 on that of rank 0, 1, 2; 1 on that of rank 3" in text
        assert "Start as many processes on each node" in text


def test_a_launcher_that_contradicts_the_machines_is_refused(ranks: RankPool) -> None:
    for text in ranks.run(found, 4, (7, 5, 7, 7), ((0, 2), (0, 2), (1, 2), (1, 2))):
        assert "counts rank 0, 1 to one node (GROUP_RANK is 0), and rank 1 is on another machine than rank 0" in text


def trains_on_nodes(rank: int) -> float:
    with on_machine(rank // 2):
        model = fastddp.DistributedDataParallel(nn.Linear(4, 4, bias=False), hierarchy="node")
    assert model._setting.hierarchy is not None
    model(torch.full((1, 4), float(rank))).sum().backward()
    return model.module.weight.grad.mean().item()


def test_nodes_that_were_found_are_used(ranks: RankPool) -> None:
    assert ranks.run(trains_on_nodes, 4) == [1.5] * 4


def refused(rank: int) -> dict[str, str]:
    def message(error: type[Exception], **options: Any) -> str:
        with pytest.raises(error) as raised:
            fastddp.DistributedDataParallel(nn.Linear(2, 2), **options)
        return str(raised.value)

    mesh = mesh_of((2, 2))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    texts = {
        "word": message(ValueError, hierarchy="nodes"),
        "type": message(TypeError, hierarchy=2),
        "one dimension": message(ValueError, hierarchy=init_device_mesh("cpu", (4,))),
        "other ranks": message(ValueError, hierarchy=mesh, process_group=pairs[rank // 2]),
        "auto": message(ValueError, hierarchy=mesh, bucket_cap_mb="auto"),
    }
    hooks: dict[str, tuple[object, Any]] = {
        "Python": (None, lambda state, bucket: None),
        "local SGD": (comm_hooks.PostLocalSGDState(None, None, 2), comm_hooks.post_localSGD_hook),
        "another group": (pairs[rank // 2], comm_hooks.allreduce_hook),
    }
    for name, (state, hook) in hooks.items():
        model = fastddp.DistributedDataParallel(nn.Linear(2, 2), hierarchy=mesh)
        with pytest.raises(ValueError, match=r".") as raised:
            model.register_comm_hook(state, hook)
        texts[name] = str(raised.value)
        model(torch.ones(1, 2)).sum().backward()  # without the hook
    return texts


def test_what_has_no_two_levels_is_refused_with_a_remedy(ranks: RankPool) -> None:
    for texts in ranks.run(refused, 4):
        assert "not 'nodes'" in texts["word"]
        assert "not 2" in texts["type"]
        assert "two dimensions" in texts["one dimension"]
        assert "Give a mesh of the same ranks" in texts["other ranks"]
        assert "Leave out one or the other" in texts["auto"]
        assert "Use a hook of fastddp.comm_hooks" in texts["Python"]
        assert "Use one or the other" in texts["local SGD"]
        assert "Leave the hook's process group at None" in texts["another group"]


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


@pytest.mark.parametrize(
    ("what", "lines"),
    [
        (
            ("none", "none", "node", "none"),
            ["rank 0, and every rank not named here: hierarchy=None", "rank 2: hierarchy='node'"],
        ),
        (
            ("pairs", "across", "node", "across"),
            [
                "rank 0, and every rank not named here: hierarchy=a mesh of the nodes [[0, 1], [2, 3]]",
                "rank 1, 3: hierarchy=a mesh of the nodes [[0, 2], [1, 3]]",
                "rank 2: hierarchy='node'",
            ],
        ),
    ],
    ids=["one rank", "meshes"],
)
def test_ranks_that_were_given_other_hierarchies_are_told_who(
    ranks: RankPool, what: Sequence[str], lines: list[str]
) -> None:
    for text in ranks.run(told, 4, what):
        first, *found, last = text.splitlines()
        assert first == "The ranks were not given the same argument:"
        assert [line.strip() for line in found] == lines
        assert last == "Give DistributedDataParallel the same on all ranks."


def without_communication(rank: int) -> float:
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2, bias=False), hierarchy=mesh_of((2, 2)))
    model.register_comm_hook(None, comm_hooks.noop_hook)
    model(torch.full((1, 2), float(rank))).sum().backward()
    return model.module.weight.grad.mean().item()


def test_where_nothing_travels_there_are_no_levels(ranks: RankPool) -> None:
    assert ranks.run(without_communication, 4) == [0.0, 1.0, 2.0, 3.0]


# ------------------------------------------------------------------------------------------------- PowerSGD's memory


def goes_on(rank: int, hook: str) -> tuple[list[bool], set[str]]:
    """Whether training that is saved and loaded has the gradients of training that is not."""

    def backwards(model: fastddp.DistributedDataParallel, steps: range) -> list[Tensor]:
        gradients = []
        for step in steps:
            model.zero_grad()
            x = torch.randn(3, 12, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().sum().backward()
            gradients += gradients_of(model)
        return gradients

    def make() -> tuple[fastddp.DistributedDataParallel, comm_hooks.PowerSGDState]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 16))
        model = fastddp.DistributedDataParallel(module, hierarchy=mesh, bucket_cap_mb=0.001)
        state = comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, HOOKS[hook])  # type: ignore[arg-type]
        return model, state

    mesh = mesh_of((2, 2))
    model, state = make()
    backwards(model, range(4))
    saved = copy.deepcopy(state.state_dict())
    expected = backwards(model, range(4, 7))
    again, loaded = make()
    backwards(again, range(2))  # buckets are rebuilt
    loaded.load_state_dict(saved)
    found = backwards(again, range(4, 7))
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)], set(saved["qs"])


@pytest.mark.parametrize("hook", ["PowerSGD", "PowerSGD, batched"])
def test_a_saved_state_goes_on(ranks: RankPool, hook: str) -> None:
    results = ranks.run(goes_on, 4, hook)
    assert all(all(same) for same, _ in results)
    assert results[0][1] == results[2][1]
    assert not results[0][1] & results[1][1]  # a matrix is remembered by one rank of each node
