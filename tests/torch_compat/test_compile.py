"""torch.compile around the wrapper and inside it, and where it cuts the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from both import gradients
from fastddp.bucket_plan import BucketPlan, PlannedBucket, PlannedParameter
from ranks import RankPool

COMPILING = 240.0  # seconds that inductor may take on a busy machine
WIDTHS = [8, 12, 16, 20, 24]


class Layers(nn.Module):
    """Four linear layers of different shapes, so that a parameter is known by its shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@contextlib.contextmanager
def dynamo(mode: Any = None) -> Iterator[None]:
    """What was compiled is forgotten before and behind. ``mode``: how it treats a DDP."""
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(optimize_ddp=mode) if mode else contextlib.nullcontext():
            yield
    finally:
        torch._dynamo.reset()


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: Any, rank: int, step: int = 0) -> list[Any]:
    model.zero_grad()
    model(batch(rank, step)).square().sum().backward()
    return gradients(model)


def compiled(way: str, backend: Any, options: dict[str, Any]) -> Any:
    if way == "inside":
        return fastddp.DistributedDataParallel(torch.compile(Layers(), backend=backend), **options)  # type: ignore[arg-type]
    model = fastddp.DistributedDataParallel(Layers(), **options)
    if way == "outside":
        return torch.compile(model, backend=backend)
    if way == "in place":
        model.compile(backend=backend)
        return model
    function = nn.Module()  # which calls the model, and is compiled
    function.model = model
    function.forward = torch.compile(lambda x: model(x) * 1.0, backend=backend)  # type: ignore[method-assign]
    return function


WAYS = ["outside", "inside", "in place", "in a function"]


def errors_of_steps(rank: int, way: str, backend: str, options: dict[str, Any], mode: Any) -> list[float]:
    """Each step's largest difference from torch's DDP without a compiler."""
    with dynamo(mode):
        eager, model = TorchDDP(Layers()), compiled(way, backend, options)
        return [
            max(
                float((a - b).abs().max())
                for a, b in zip(backward(eager, rank, s), backward(model, rank, s), strict=True)
            )
            for s in range(4)
        ]


SLOW, NIGHTLY = pytest.mark.tier("slow"), pytest.mark.tier("nightly")
SOME_BUCKETS, ALL_BUCKETS = {"bucket_cap_mb": 0.001}, {"bucket_cap_mb": 0}


@pytest.mark.timeout(COMPILING + 30)
@pytest.mark.parametrize(
    ("way", "backend", "options", "mode"),
    [
        ("inside", "aot_eager", SOME_BUCKETS, None),
        ("in place", "aot_eager", ALL_BUCKETS, None),
        *(
            pytest.param(way, "aot_eager", options, None, marks=SLOW)
            for way in WAYS
            for options in ({}, SOME_BUCKETS, ALL_BUCKETS)
            if (way, options) not in [("inside", SOME_BUCKETS), ("in place", ALL_BUCKETS)]
        ),
        *(
            pytest.param("outside", "aot_eager", SOME_BUCKETS, mode, marks=[SLOW] * (mode != "ddp_optimizer"))
            for mode in torch._dynamo.utils._ddp_optimization_mode
        ),
        *(pytest.param(way, "inductor", SOME_BUCKETS, None, marks=NIGHTLY) for way in ("outside", "inside")),
    ],
)
def test_gradients_of_a_compiled_model_are_those_of_torchs_ddp(
    ranks: RankPool, way: str, backend: str, options: dict[str, Any], mode: Any
) -> None:
    for differences in ranks.run(errors_of_steps, 2, way, backend, options, mode, time_limit=COMPILING):
        assert max(differences) < 1e-5


# --------------------------------------------------------------------------------------- where the graph is cut


def cut(rank: int, way: str, options: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The shapes of parameters in each graph; in each bucket of the first step; in each of the third.

    The last bucket is the first, as graphs come in the order of forward.
    """
    graphs: list[list[torch.Size]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(sorted(value.shape for value in inputs if isinstance(value, nn.Parameter)))
        return lookup_backend("aot_eager")(graph, inputs)

    with dynamo():
        model = compiled(way, record, options)
        wrapper = next(m for m in model.modules() if isinstance(m, fastddp.DistributedDataParallel))

        def shapes() -> list[list[torch.Size]]:
            return [sorted(p.shape for p in bucket.parameters) for bucket in reversed(wrapper.bucket_plan().buckets)]

        before = shapes()
        for step in range(3):
            backward(model, rank, step)
        return [graph for graph in graphs if graph], before, shapes()


def pinned(*layers: list[int]) -> BucketPlan:
    """A plan whose buckets have the layers of these numbers."""

    def parameters(layer: int) -> list[PlannedParameter]:
        inputs, outputs = WIDTHS[layer], WIDTHS[layer + 1]
        named = {"bias": (outputs,), "weight": (outputs, inputs)}
        return [PlannedParameter(f"layers.{layer}.{name}", shape, torch.float32) for name, shape in named.items()]

    buckets = [tuple(parameter for layer in members for parameter in parameters(layer)) for members in layers]
    return BucketPlan(tuple(PlannedBucket(number, bucket, "cpu") for number, bucket in enumerate(buckets)))


# Layers have 432, 832, 1360 and 2016 bytes: the last two reach the cap alone, the first two together.
CAP = {"bucket_cap_mb": 1000 / 2**20}


@pytest.mark.parametrize(
    ("way", "options", "layers"),
    [
        ("outside", CAP, [[0, 1], [2], [3]]),
        *(pytest.param(way, CAP, [[0, 1], [2], [3]], marks=SLOW) for way in WAYS[1:]),
        ("outside", {"bucket_cap_mb_list": [1000 / 2**20, 2500 / 2**20]}, [[0, 1, 2], [3]]),
        ("outside", {"bucket_plan": pinned([3, 2], [1, 0])}, [[0, 1], [2, 3]]),
        pytest.param("outside", {"bucket_plan": pinned([3, 2, 1, 0])}, [[0, 1, 2, 3]], marks=SLOW),
        pytest.param("outside", {"bucket_plan": pinned([3], [2, 1, 0])}, [[0, 1, 2], [3]], marks=SLOW),
        pytest.param("outside", {"bucket_plan": pinned([3], [2], [1, 0])}, [[0, 1], [2], [3]], marks=SLOW),
    ],
)
def test_the_graph_is_cut_where_buckets_end(
    ranks: RankPool, way: str, options: dict[str, Any], layers: list[list[int]]
) -> None:
    expected = [sorted(size for n in of for size in ((WIDTHS[n + 1], WIDTHS[n]), (WIDTHS[n + 1],))) for of in layers]
    for graphs, before, after in ranks.run(cut, 2, way, options):
        assert graphs == before == expected
        # Rebuilt buckets have another order within a graph, but all of them before the next graph's.
        graph_of = {shape: number for number, graph in enumerate(reversed(graphs)) for shape in graph}
        for number, bucket in enumerate(reversed(after)):
            assert max(graph_of[shape] for shape in bucket) <= number
        assert after == before or "bucket_plan" not in options


def torchs_constants(rank: int) -> list[Any]:
    """What torch's variables say around a forward that raises, and inside of it."""

    def seen() -> tuple[bool, int]:
        return TorchDDP._get_active_ddp_module() is model, dist._DEFAULT_FIRST_BUCKET_BYTES

    def look(module: nn.Module, args: Any) -> None:
        inside.append(seen())
        raise ValueError

    model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0)
    inside: list[Any] = []
    before = seen()
    model.module.register_forward_pre_hook(look)
    with pytest.raises(ValueError, match=""):
        model(batch(rank))
    return [before, *inside, seen()]


def test_what_dynamo_is_told_holds_in_forward_only_even_if_it_raises(ranks: RankPool) -> None:
    default = dist._DEFAULT_FIRST_BUCKET_BYTES
    assert ranks.run(torchs_constants, 1) == [[(False, default), (True, 0), (False, default)]]


def graph_breaks(rank: int) -> int:
    with dynamo():
        torch._dynamo.utils.counters.clear()
        backward(compiled("outside", "aot_eager", {}), rank)
        return sum(torch._dynamo.utils.counters["graph_break"].values())


def test_the_wrapper_costs_one_graph_break(ranks: RankPool) -> None:
    assert ranks.run(graph_breaks, 2) == [1, 1]


def under_compiled_autograd(rank: int) -> bool:
    model = fastddp.DistributedDataParallel(Layers())
    loss = model(batch(rank)).square().sum()
    with (
        dynamo(),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match="compiled autograd does not run gradient hooks"),
    ):
        loss.backward()
    return all(map(torch.equal, backward(model, rank), backward(TorchDDP(Layers()), rank)))


def test_compiled_autograd_is_refused_and_the_model_stays_usable(ranks: RankPool) -> None:
    assert ranks.run(under_compiled_autograd, 2) == [True, True]
