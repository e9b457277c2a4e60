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
from on_ranks import gradients, on_ranks

COMPILING = 240.0  # seconds that inductor may take on a busy machine
WIDTHS = [8, 12, 16, 20, 24]
BYTE = 1 / 2**20  # in MiB


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
    """What was compiled is forgotten before and after. ``mode``: how it treats a DDP."""
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
    function: Any = nn.Module()  # which calls the model, and is compiled
    function.model = model
    function.forward = torch.compile(lambda x: model(x) * 1.0, backend=backend)  # type: ignore[misc]
    return function


WAYS = ["outside", "inside", "in place", "in a function"]


OTHER_MODES = sorted({*torch._dynamo.utils._ddp_optimization_mode} - {"ddp_optimizer"})
SLOW, NIGHTLY = pytest.mark.tier("slow"), pytest.mark.tier("nightly")
SOME_BUCKETS, ALL_BUCKETS = {"bucket_cap_mb": 0.001}, {"bucket_cap_mb": 0}


@pytest.mark.timeout(COMPILING + 30)
@pytest.mark.parametrize(
    ("way", "backend", "options", "mode"),
    [
        ("inside", "aot_eager", SOME_BUCKETS, None),
        ("in place", "aot_eager", ALL_BUCKETS, None),
        ("outside", "aot_eager", SOME_BUCKETS, "ddp_optimizer"),
        *(pytest.param(way, "aot_eager", {}, None, marks=SLOW) for way in WAYS),
        *(pytest.param("outside", "aot_eager", SOME_BUCKETS, mode, marks=SLOW) for mode in OTHER_MODES),
        pytest.param("outside", "inductor", SOME_BUCKETS, None, marks=NIGHTLY),
    ],
)
@on_ranks(2, time_limit=COMPILING)
def test_gradients_are_torchs(rank: int, way: str, backend: str, options: dict[str, Any], mode: Any) -> None:
    with dynamo(mode):
        eager, model = TorchDDP(Layers()), compiled(way, backend, options)
        for step in range(4):
            torch.testing.assert_close(backward(model, rank, step), backward(eager, rank, step), rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------- where the graph is cut


def wrapper_in(model: nn.Module) -> fastddp.DistributedDataParallel:
    return next(module for module in model.modules() if isinstance(module, fastddp.DistributedDataParallel))


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize(
    ("way", "options", "layers"),
    [
        # Layers have 432, 832, 1360 and 2016 bytes: the last two reach the cap alone, the first two together.
        *((way, {"bucket_cap_mb": 1000 * BYTE}, [[0, 1], [2], [3]]) for way in WAYS),
        ("outside", {"bucket_cap_mb_list": [1000 * BYTE, 2500 * BYTE]}, [[0, 1, 2], [3]]),
    ],
)
@on_ranks(2)
def test_graphs_end_with_buckets(rank: int, way: str, options: Any, layers: list[list[int]]) -> None:
    graphs: list[list[Any]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(sorted(value.shape for value in inputs if isinstance(value, nn.Parameter)))
        return lookup_backend("aot_eager")(graph, inputs)

    def shapes() -> list[list[Any]]:
        """Of the parameters in each bucket, the last one first, as graphs come in the order of forward."""
        return [sorted(p.shape for p in bucket.parameters) for bucket in reversed(wrapper.bucket_plan().buckets)]

    with dynamo():
        model = compiled(way, record, options)
        wrapper = wrapper_in(model)
        before = shapes()
        for step in range(3):
            backward(model, rank, step)
        after = shapes()
    graphs = [graph for graph in graphs if graph]
    assert graphs == before == [sorted(p.shape for n in of for p in Layers().layers[n].parameters()) for of in layers]
    # Rebuilt buckets have another order within a graph, but all of them before the next graph's.
    graph_of = {shape: number for number, graph in enumerate(reversed(graphs)) for shape in graph}
    for number, bucket in enumerate(reversed(after)):
        assert max(graph_of[shape] for shape in bucket) <= number


@on_ranks(1)
def test_what_dynamo_is_told_holds_in_forward_only_even_if_it_raises(rank: int) -> None:
    def told() -> tuple[bool, int]:
        return TorchDDP._get_active_ddp_module() is model, dist._DEFAULT_FIRST_BUCKET_BYTES

    def look(module: nn.Module, args: Any) -> None:
        assert told() == (True, 0)
        raise ValueError("after the look")

    model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0)
    before = told()
    model.module.register_forward_pre_hook(look)
    with pytest.raises(ValueError, match="after the look"):
        model(batch(rank))
    assert told() == before == (False, dist._DEFAULT_FIRST_BUCKET_BYTES)


@on_ranks(1)
def test_the_wrapper_costs_one_graph_break(rank: int) -> None:
    with dynamo():
        torch._dynamo.utils.counters.clear()
        backward(compiled("outside", "aot_eager", {}), rank)
        assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 1


@on_ranks(2)
def test_compiled_autograd_is_refused_and_the_model_stays_usable(rank: int) -> None:
    model = fastddp.DistributedDataParallel(Layers())
    loss = model(batch(rank)).square().sum()
    with (
        dynamo(),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match="compiled autograd does not run gradient hooks"),
    ):
        loss.backward()
    assert all(map(torch.equal, backward(model, rank), backward(TorchDDP(Layers()), rank)))
