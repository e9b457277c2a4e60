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
from fastddp.bucket_plan import BucketPlan, PlannedBucket, PlannedParameter
from ranks import RankPool

COMPILING = 240.0  # seconds that inductor may take on a busy machine
WIDTHS = [8, 12, 16, 20, 24]


class Layers(nn.Module):
    """Four linear layers of different shapes, so that a parameter is known by its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def build() -> Layers:
    torch.manual_seed(4)
    return Layers()


@contextlib.contextmanager
def dynamo() -> Iterator[None]:
    """What was compiled is forgotten before and behind."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Module, rank: int, step: int = 0) -> list[Tensor]:
    model.zero_grad()
    model(batch(rank, step)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


Compiled = Callable[[type[TorchDDP], str | Callable[..., Any], dict[str, Any]], nn.Module]


def outside(wrapper: type[TorchDDP], backend: str | Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    compiled: Any = torch.compile(wrapper(build(), **options), backend=backend)
    return compiled


def inside(wrapper: type[TorchDDP], backend: str | Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    return wrapper(torch.compile(build(), backend=backend), **options)


def in_place(wrapper: type[TorchDDP], backend: str | Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    model = wrapper(build(), **options)
    model.compile(backend=backend)
    return model


def a_step_function(wrapper: type[TorchDDP], backend: str | Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    model = wrapper(build(), **options)
    compiled = torch.compile(lambda x: model(x) * 1.0, backend=backend)

    class Function(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return compiled(x)

    return Function()


WAYS = pytest.mark.parametrize("way", [outside, inside, in_place, a_step_function], ids=lambda way: way.__name__)


def gradients_of_steps(rank: int, way: Compiled, backend: str, options: dict[str, Any]) -> list[float]:
    """Each step's largest difference from torch's DDP without a compiler."""
    with dynamo():
        eager, model = TorchDDP(build()), way(fastddp.DistributedDataParallel, backend, options)
        differences = []
        for step in range(4):
            pairs = zip(backward(eager, rank, step), backward(model, rank, step), strict=True)
            differences.append(max(float((ours - theirs).abs().max()) for theirs, ours in pairs))
        return differences


@pytest.mark.tier("slow", but_one_in=5)
@WAYS
@pytest.mark.parametrize("cap", [None, 0.001, 0], ids=["one bucket", "some buckets", "a bucket a parameter"])
def test_gradients_of_a_compiled_model_are_those_of_torchs_ddp(
    ranks: RankPool, way: Compiled, cap: float | None
) -> None:
    for differences in ranks.run(gradients_of_steps, 2, way, "aot_eager", {"bucket_cap_mb": cap}):
        assert max(differences) < 1e-5


@pytest.mark.tier("nightly")
@pytest.mark.timeout(COMPILING + 30)
@pytest.mark.parametrize("way", [outside, inside], ids=lambda way: way.__name__)
def test_gradients_of_a_model_compiled_by_inductor_are_those_of_torchs_ddp(ranks: RankPool, way: Compiled) -> None:
    options = {"bucket_cap_mb": 0.001}
    for differences in ranks.run(gradients_of_steps, 2, way, "inductor", options, time_limit=COMPILING):
        assert max(differences) < 1e-5


def gradients_in_mode(rank: int, mode: Any) -> list[float]:
    with torch._dynamo.config.patch(optimize_ddp=mode):
        return gradients_of_steps(rank, outside, "aot_eager", {"bucket_cap_mb": 0.001})


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("mode", torch._dynamo.utils._ddp_optimization_mode)
def test_dynamos_modes_for_ddp_change_no_gradient(ranks: RankPool, mode: str) -> None:
    for differences in ranks.run(gradients_in_mode, 2, mode):
        assert max(differences) < 1e-5


# --------------------------------------------------------------------------------------- where the graph is cut


class Recorder:
    """A backend that notes the shapes of the parameters in each graph that it compiles."""

    def __init__(self) -> None:
        self.graphs: list[list[tuple[int, ...]]] = []
        self._compile = lookup_backend("aot_eager")

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append([tuple(value.shape) for value in inputs if isinstance(value, nn.Parameter)])
        return self._compile(graph, inputs)


def shapes(plan: BucketPlan) -> list[list[tuple[int, ...]]]:
    """The last bucket first, as graphs come in the order of forward."""
    return [sorted(parameter.shape for parameter in bucket.parameters) for bucket in reversed(plan.buckets)]


def cut(rank: int, way: Compiled, options: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The shapes of parameters in each graph; in each bucket of the first step; in each of the third."""
    with dynamo():
        recorder = Recorder()
        model = way(fastddp.DistributedDataParallel, recorder, options)
        wrapper = next(m for m in model.modules() if isinstance(m, fastddp.DistributedDataParallel))
        before = shapes(wrapper.bucket_plan())
        for step in range(3):
            backward(model, rank, step)
        return [sorted(graph) for graph in recorder.graphs if graph], before, shapes(wrapper.bucket_plan())


LAYERS = [[(outputs, inputs), (outputs,)] for inputs, outputs in pairwise(WIDTHS)]


@pytest.mark.tier("slow", but_one_in=2)
@WAYS
def test_the_graph_is_cut_where_buckets_end(ranks: RankPool, way: Compiled) -> None:
    """Rebuilt buckets have another order within a graph, but all of them before the next graph's."""
    # Layers have 432, 832, 1360 and 2016 bytes: the last two reach the cap alone, the first two together.
    for graphs, before, after in ranks.run(cut, 2, way, {"bucket_cap_mb": 1000 / 2**20}):
        assert graphs == before == [sorted(LAYERS[0] + LAYERS[1]), sorted(LAYERS[2]), sorted(LAYERS[3])]
        graph_of = {shape: number for number, graph in enumerate(reversed(graphs)) for shape in graph}
        for number, bucket in enumerate(reversed(after)):
            assert max(graph_of[shape] for shape in bucket) <= number


def test_the_first_buckets_size_is_respected_too(ranks: RankPool) -> None:
    for graphs, before, _ in ranks.run(cut, 2, outside, {"bucket_cap_mb_list": [1000 / 2**20, 2500 / 2**20]}):
        assert graphs == before
        assert [len(graph) for graph in graphs] == [6, 2]


def pinned(*layers: list[int]) -> BucketPlan:
    """A plan whose buckets have the layers of these numbers."""

    def parameters(layer: int) -> list[PlannedParameter]:
        inputs, outputs = WIDTHS[layer], WIDTHS[layer + 1]
        named = {"bias": (outputs,), "weight": (outputs, inputs)}
        return [PlannedParameter(f"layers.{layer}.{name}", shape, torch.float32) for name, shape in named.items()]

    buckets = [[parameter for layer in members for parameter in parameters(layer)] for members in layers]
    return BucketPlan(tuple(PlannedBucket(number, tuple(bucket), "cpu") for number, bucket in enumerate(buckets)))


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("layers", [([3, 2, 1, 0],), ([3], [2, 1, 0]), ([3, 2], [1, 0]), ([3], [2], [1, 0])], ids=str)
def test_the_graph_is_cut_at_the_buckets_of_a_pinned_plan(ranks: RankPool, layers: tuple[list[int], ...]) -> None:
    for graphs, before, after in ranks.run(cut, 2, outside, {"bucket_plan": pinned(*layers)}):
        assert graphs == before == after
        assert len(graphs) == len(layers)


def torchs_constants(rank: int) -> list[Any]:
    model = fastddp.DistributedDataParallel(build(), bucket_cap_mb=0)
    before = (TorchDDP._get_active_ddp_module(), dist._DEFAULT_FIRST_BUCKET_BYTES)
    inside_forward: list[Any] = []

    def look(module: nn.Module, args: Any) -> None:
        inside_forward.append((TorchDDP._get_active_ddp_module() is model, dist._DEFAULT_FIRST_BUCKET_BYTES))
        raise ValueError

    handle = model.module.register_forward_pre_hook(look)
    with pytest.raises(ValueError, match=""):
        model(batch(rank))
    handle.remove()
    return [before, *inside_forward, (TorchDDP._get_active_ddp_module(), dist._DEFAULT_FIRST_BUCKET_BYTES)]


def test_what_dynamo_is_told_holds_in_forward_only_even_if_it_raises(ranks: RankPool) -> None:
    default = dist._DEFAULT_FIRST_BUCKET_BYTES
    assert ranks.run(torchs_constants, 1) == [[(None, default), (True, 0), (None, default)]]


# ------------------------------------------------------------------------------------------------------ everything


def graph_breaks(rank: int) -> int:
    with dynamo():
        torch._dynamo.utils.counters.clear()
        backward(outside(fastddp.DistributedDataParallel, "aot_eager", {}), rank)
        return sum(torch._dynamo.utils.counters["graph_break"].values())


def test_the_wrapper_costs_one_graph_break(ranks: RankPool) -> None:
    assert ranks.run(graph_breaks, 2) == [1, 1]


def under_compiled_autograd(rank: int) -> bool:
    model = fastddp.DistributedDataParallel(build())
    loss = model(batch(rank)).square().sum()
    with (
        dynamo(),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match="compiled autograd does not run gradient hooks"),
    ):
        loss.backward()
    return all(map(torch.equal, backward(model, rank), backward(TorchDDP(build()), rank)))


def test_compiled_autograd_is_refused_and_the_model_stays_usable(ranks: RankPool) -> None:
    assert ranks.run(under_compiled_autograd, 2) == [True, True]
