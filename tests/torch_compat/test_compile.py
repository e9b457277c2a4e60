"""torch.compile around the wrapper and inside it: one graph, whose gradients travel while its backward runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import itertools
import pickle
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.backends.distributed as seam
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import fastddp
from fastddp.in_place.replicated import wrapper_of
from hooks_by_name import averages
from models import Expected, RaisesInBackward
from on_ranks import gradients, on_ranks

COMPILING = 240.0  # seconds that inductor may take on a busy machine
WIDTHS = [8, 12, 16, 20, 24]
BYTE = 1 / 2**20  # in MiB


class Layers(nn.Module):
    """Four linear layers of different shapes, so that a parameter is known by its shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@contextlib.contextmanager
def dynamo(mode: Any = None) -> Iterator[None]:
    """What was compiled is forgotten before and after. ``mode``: how it treats a DDP."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
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


def compiled(way: str, backend: Any, options: dict[str, Any], **of_compile: Any) -> Any:
    if way == "inside":
        inner: Any = torch.compile(Layers(), backend=backend, **of_compile)
        return fastddp.DistributedDataParallel(inner, **options)
    model = fastddp.DistributedDataParallel(Layers(), **options)
    if way == "outside":
        return torch.compile(model, backend=backend, **of_compile)
    if way == "in place":
        model.compile(backend=backend, **of_compile)
        return model
    function: Any = nn.Module()  # which calls the model, and is compiled
    function.model = model
    function.forward = torch.compile(lambda x: model(x) * 1.0, backend=backend, **of_compile)  # type: ignore[misc]
    return function


def wrapper_in(model: nn.Module) -> fastddp.DistributedDataParallel:
    return next(module for module in model.modules() if isinstance(module, fastddp.DistributedDataParallel))


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
        pytest.param("outside", "eager", SOME_BUCKETS, None, marks=SLOW),
        pytest.param("outside", "inductor", SOME_BUCKETS, None, marks=NIGHTLY),
    ],
)
@on_ranks(2, time_limit=COMPILING)
def test_gradients_are_torchs(rank: int, way: str, backend: str, options: dict[str, Any], mode: Any) -> None:
    with dynamo(mode):
        eager, model = TorchDDP(Layers()), compiled(way, backend, options)
        for step in range(4):
            torch.testing.assert_close(backward(model, rank, step), backward(eager, rank, step), rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------- one graph, and what overlaps


@pytest.mark.timeout(COMPILING + 30)
@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("outside", "aot_eager"),
        *(pytest.param(way, "aot_eager", marks=SLOW) for way in ("inside", "in place")),
        *(pytest.param(way, "inductor", marks=SLOW) for way in ("outside", "inside", "in place")),
    ],
)
@on_ranks(2, time_limit=COMPILING)
def test_it_is_one_graph_without_breaks_and_buckets_travel_while_its_backward_runs(
    rank: int, way: str, backend: str
) -> None:
    events: list[Any] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append(bucket.index())
        return averages(state, bucket)

    with dynamo():
        model = compiled(way, backend, ALL_BUCKETS, fullgraph=True)
        wrapper_in(model).register_comm_hook(None, hook)
        for step in range(3):
            events.clear()
            # Autograd reaches the input when the graph's backward has ended.
            x = batch(rank, step).requires_grad_()
            x.register_hook(lambda gradient: events.append("graph ends"))
            model(x).square().sum().backward()
        counters = torch._dynamo.utils.counters
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
    assert events == [*range(8), "graph ends"]


class Wide(nn.Module):
    """Whose weights take more memory than its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


@pytest.mark.timeout(COMPILING + 30)
@pytest.mark.tier("slow")
@on_ranks(1, time_limit=COMPILING)
def test_inductor_computes_gradients_in_the_order_of_backward_though_it_costs_memory(rank: int) -> None:
    with dynamo():
        model = fastddp.DistributedDataParallel(nn.Sequential(*(Wide() for _ in range(3))))
        model.compile()
        for _ in range(2):
            model(torch.randn(32, 256)).square().sum().backward()
    layers = [index // 6 for index in model.reducer.arrival_order()]
    assert layers == sorted(layers, reverse=True)


@on_ranks(1)
def test_a_module_of_torchs_own_is_one_graph_too(rank: int) -> None:
    """Alone, dynamo leaves the frames of such modules as they are."""
    with dynamo():
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        model: Any = torch.compile(fastddp.DistributedDataParallel(module), backend="aot_eager")
        backward(model, rank)
        counters = torch._dynamo.utils.counters
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
    assert model._orig_mod.reducer.handed_over() == [0, 1, 2, 3]


@on_ranks(1)
def test_no_sync_compiles_nothing_anew_and_without_gradients_nothing_is_put_into_the_graph(rank: int) -> None:
    graphs: list[Any] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes if "fastddp" in str(node.target)])
        return lookup_backend("aot_eager")(graph, inputs)

    with dynamo():
        model = compiled("outside", record, {})
        for step in range(4):
            with model._orig_mod.no_sync() if step % 2 else contextlib.nullcontext():
                backward(model, rank, step)
        with torch.no_grad():
            model(batch(rank))
    assert graphs == [["fastddp.identities.default"] + ["fastddp.passes.default"] * 8, []]


# ------------------------------------------------------------- what programs do, with gradients handed over and without


class Models:
    """Makes compiled wrappers, and knows them."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.wrappers: list[fastddp.DistributedDataParallel] = []

    def wrap(self, module: nn.Module, **options: Any) -> fastddp.DistributedDataParallel:
        model = fastddp.DistributedDataParallel(module, **(SOME_BUCKETS | options))
        self.wrappers.append(model)
        return model

    def compile(self, module: nn.Module, **options: Any) -> fastddp.DistributedDataParallel:
        model = self.wrap(module, **options)
        model.compile(backend=self.backend)
        return model


Program = Callable[[Models, int], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def steps(model: nn.Module, rank: int, inputs: Callable[[int, int], Tensor] = batch, count: int = 3) -> list[Any]:
    """The gradients of each step."""
    found = []
    for step in range(count):
        model.zero_grad()
        model(inputs(rank, step)).square().sum().backward()
        found.append(gradients(model))
    return found


def with_hook(name: str, state: Callable[[], object] = lambda: None, **options: Any) -> None:
    def run(models: Models, rank: int) -> Any:
        model = models.compile(Layers(), **options)
        model.register_comm_hook(state(), getattr(fastddp.comm_hooks, name, averages))
        return steps(model, rank, count=5)

    PROGRAMS[f"hook {name} {options or ''}".strip()] = run


for name in ("fp16_compress_hook", "bf16_compress_hook", "python"):
    with_hook(name)
with_hook("fp16_compress_hook", find_unused_parameters=True)
with_hook("int8_compress_hook", fastddp.comm_hooks.BlockState)
with_hook("powerSGD_hook", lambda: fastddp.comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2))


def with_options(title: str, make: Callable[[], nn.Module] = Layers, **options: Any) -> None:
    PROGRAMS[title] = lambda models, rank: steps(models.compile(make(), **options), rank)


class Routed(nn.Module):
    """Each of two branches is used in some steps, not in the same on all ranks; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.end = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        way = 0 if x.shape[0] % 2 else 1
        return self.end(self.branches[way](x).tanh())


class Tied(nn.Module):
    """A weight at both ends, with a break of the graph in between; another one is used twice in a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ends = nn.Parameter(torch.randn(8, 8))
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x @ self.ends).relu())
        torch._dynamo.graph_break()
        return self.twice(x) @ self.ends.t()


class SameGradient(nn.Module):
    """Two parameters and the layer before get one and the same tensor as a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 24)
        self.a, self.b = (nn.Parameter(torch.randn(5, 24)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return x + self.a + self.b


class Checkpointed(Layers):
    """Parts of the forward run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(lambda x, layer=layer: layer(x).relu(), x, use_reentrant=False)
        return x


class InBf16(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


class Autocast(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class FirstWithoutGradient(Layers):
    """Looks at a weight before it uses it, and writes to another one; a third goes through a transform."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layers[0].weight.abs().max() + 1
            self.layers[1].bias.clamp_(-0.1, 0.1)
        x = super().forward(x / scale)
        with torch.no_grad():
            return x + self.layers[2].bias.sum() * 0 if scale is None else x


class Transformed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.vmap(lambda row: row * self.layers[3].bias)(x)


with_options("a parameter that is first used without gradients", FirstWithoutGradient)
with_options("views", gradient_as_bucket_view=True)
with_options("a static graph", Routed, static_graph=True)
with_options("tied over a break", Tied)
with_options("tied over a break, in views", Tied, gradient_as_bucket_view=True)
with_options("the same gradient for several", SameGradient)
with_options("main gradients", InBf16, main_grads="main_grad")
with_options("wide gradients", InBf16, main_grads="grad")
with_options("checkpoints", Checkpointed)
with_options("autocast", Autocast)
with_options("a sum over ranks", gradient_average="sum")


@program
def the_same_gradient_for_several_in_16_bits(models: Models, rank: int) -> Any:
    model = models.compile(SameGradient())
    model.register_comm_hook(None, fastddp.comm_hooks.fp16_compress_hook)
    found = steps(model, rank)
    memory = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len({*memory}) == len(memory)
    return found


@program
def unused_parameters_that_differ_by_rank(models: Models, rank: int) -> Any:
    model = models.compile(Routed(), find_unused_parameters=True)
    return steps(model, rank, lambda rank, step: torch.randn(4 + (rank + step // 2) % 2, 8), count=6)


@program
def accumulation(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    found = []
    for step in range(6):
        with model.no_sync() if step % 3 else contextlib.nullcontext():
            model(batch(rank, step)).square().sum().backward()
        found.append(gradients(model))
    return found


@program
def two_forwards_before_a_backward(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    found = []
    for step in range(3):
        model.zero_grad()
        (model(batch(rank, step)) * model(batch(rank, step + 7))).sum().backward()
        found.append(gradients(model))
    return found


@program
def a_parameter_used_outside_of_the_graph(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    weight = model.module.layers[2].weight
    found = []
    for step in range(3):
        model.zero_grad()
        (model(batch(rank, step)).square().sum() + weight.square().sum()).backward()
        found.append(gradients(model))
    return found


@program
def hooks_of_users_see_what_they_would(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    seen: list[Any] = []
    first, second = model.module.layers[1].weight, model.module.layers[2].weight
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    second.register_hook(lambda gradient: gradient * 2)
    return [steps(model, rank), seen]


@program
def a_transform_in_the_graph(models: Models, rank: int) -> Any:
    model = models.compile(Transformed())
    models.wrappers.clear()  # parameters are other tensors inside of it
    return steps(model, rank)


@program
def chosen_gradients(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    found = []
    for step in range(3):
        loss = model(batch(rank, step)).square().sum()
        found += [torch.autograd.grad(loss, [*model.parameters()]), gradients(model)]
        found += steps(model, rank, count=1)
        model(batch(rank, step)).square().sum().backward(inputs=[*model.parameters()])
        found.append(gradients(model))
    return found


@program
def a_backward_that_raises(models: Models, rank: int) -> Any:
    class Broken(Layers):
        breaks = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](x).relu()).relu()
            torch._dynamo.graph_break()
            x = RaisesInBackward.apply(x) if self.breaks else x  # type: ignore[no-untyped-call]
            torch._dynamo.graph_break()
            return self.layers[3](self.layers[2](x).relu()).relu()

    model = models.compile(Broken())
    found = steps(model, rank, count=2)
    model.module.breaks = True
    with pytest.raises(Expected):
        steps(model, rank, count=1)
    model.module.breaks = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return found + steps(model, rank)


@program
def other_shapes_in_the_middle_of_training(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    return steps(model, rank, lambda rank, step: torch.randn(3 + step // 2, 8) + rank, count=6)


@program
def block_by_block(models: Models, rank: int) -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).relu() + x

    torch.manual_seed(3)
    model = models.wrap(nn.Sequential(*(Block() for _ in range(4))))
    for block in model.module:
        block.compile(backend=models.backend)
    return steps(model, rank)


@program
def two_wrappers_of_which_one_is_compiled(models: Models, rank: int) -> Any:
    first, second = models.compile(Layers()), fastddp.DistributedDataParallel(nn.Linear(24, 3))
    found = []
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        second(first(batch(rank, step))).square().sum().backward()
        found.append([gradients(first), gradients(second)])
    return found


@program
def reentrant_checkpoints_of_compiled_blocks(models: Models, rank: int) -> Any:
    class Outer(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).relu()
            return x

    model = models.wrap(Outer(), static_graph=True)
    for layer in model.module.layers:
        layer.forward = torch.compile(layer.forward, backend=models.backend)
    models.wrappers.clear()  # what backward runs again is compiled there, outside of the forward
    return steps(model, rank, lambda rank, step: batch(rank, step).requires_grad_())


@program
def gradients_zeroed_in_place(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    found = []
    for step in range(4):
        model.zero_grad(set_to_none=False)
        model(batch(rank, step)).square().sum().backward()
        found.append(gradients(model))
    return found


@program
def a_forward_past_the_wrapper(models: Models, rank: int) -> Any:
    model = models.compile(Layers(), watch=fastddp.Watch(local_steps=None))
    found = steps(model, rank)
    model.module.compile(backend=models.backend)
    model.zero_grad()
    model.module(batch(rank)).square().sum().backward()
    return [*found, gradients(model), *steps(model, rank)]


@program
def two_losses_over_one_forward(models: Models, rank: int) -> Any:
    model = models.compile(Layers(), find_unused_parameters=True)
    found = []
    for step in range(3):
        model.zero_grad()
        output = model(batch(rank, step))
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        found.append(gradients(model))
    return found


def a_sharded_optimizer(hook: Any, models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


PROGRAMS["a sharded optimizer"] = partial(a_sharded_optimizer, None)
PROGRAMS["a sharded optimizer of 16 bits"] = partial(a_sharded_optimizer, fastddp.comm_hooks.bf16_compress_hook)


@program
def an_optimizer_inside_backward(models: Models, rank: int) -> Any:
    model = models.wrap(Layers())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model.compile(backend=models.backend)
    models.wrappers.clear()  # graphs are cut
    for step in range(4):
        model(batch(rank, step)).square().sum().backward()
    return [parameter.detach().clone() for parameter in model.parameters()]


@program
def a_copy(models: Models, rank: int) -> Any:
    model = models.compile(Layers())
    found = steps(model, rank)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    models.wrappers += copies
    for one in copies:
        one.compile(backend=models.backend)
    outside = torch.compile(models.wrap(Layers()), backend=models.backend)
    found.append(steps(outside, rank))
    copies.append(copy.deepcopy(outside))
    models.wrappers.append(copies[-1]._orig_mod)
    return found + [steps(one, rank) for one in copies]


def with_nodes(models: Models, rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    model = models.compile(Layers(), hierarchy=mesh)
    model.register_comm_hook(None, fastddp.comm_hooks.fp16_compress_hook)
    return steps(model, rank)


@pytest.mark.tier("slow")
@pytest.mark.timeout(COMPILING + 30)
@on_ranks(4, time_limit=COMPILING)
def test_gradients_that_are_handed_over_travel_in_two_levels(rank: int) -> None:
    check_program(rank, with_nodes, "aot_eager")


@pytest.mark.tier("slow", but_one_in=8)
@pytest.mark.timeout(COMPILING + 30)
@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2, time_limit=COMPILING)
def test_a_program_gets_the_same_with_gradients_handed_over_as_when_they_come_at_the_end(rank: int, name: str) -> None:
    check_program(rank, PROGRAMS[name], "aot_eager")


@pytest.mark.tier("nightly")
@pytest.mark.timeout(COMPILING + 30)
# Inductor's backward runs once over a graph: it writes to what was saved for it.
@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {"two losses over one forward"}))
@on_ranks(2, time_limit=COMPILING)
def test_so_it_does_with_inductor(rank: int, name: str) -> None:
    check_program(rank, PROGRAMS[name], "inductor")


def check_program(rank: int, program: Program, backend: str) -> None:
    found = []
    for mode in ("ddp_optimizer", "no_optimization"):
        with dynamo(mode), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fastddp: the gradient of .* comes when")
            torch.manual_seed(5)
            models = Models(backend)
            found.append(program(models, rank))
            assert all(bool(one.reducer.handed_over()) == (mode == "ddp_optimizer") for one in models.wrappers)
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


def assign_row(parameter: Tensor) -> None:
    parameter[0] = 0.5


WRITES: list[Callable[[Tensor], Any]] = [
    lambda p: p.mul_(0.9),
    lambda p: p.copy_(p * 0.9),
    lambda p: p.clamp_(-0.1, 0.1),
    lambda p: p.lerp_(torch.ones_like(p), 0.1),
    lambda p: p.detach().mul_(0.9),
    lambda p: p.data.mul_(0.9),
    lambda p: p.view(-1)[1:].add_(0.1),
    lambda p: p.t()[0].zero_(),
    lambda p: torch.mul(p, 0.9, out=p),
    lambda p: torch._foreach_mul_([p], 0.9),
    lambda p: torch.ops.aten.mul_.Scalar(p, 0.9),
    lambda p: p.masked_fill_(p > 0, 0.1),
    assign_row,
    nn.init.ones_,
]


class Writes(nn.Module):
    """Changes parameters in place after it has used them, each in another way, and two layers not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.changed = nn.ParameterList(torch.randn(5, 8) for _ in WRITES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for parameter in self.changed:
            x = x.relu() + parameter
        with torch.no_grad():
            for write, parameter in zip(WRITES, self.changed, strict=True):
                write(parameter)
        for parameter in self.changed:
            x = x + parameter
        return self.last(x)


@pytest.mark.tier("slow")
@pytest.mark.timeout(COMPILING + 30)
@on_ranks(2, time_limit=COMPILING)
def test_a_graph_that_writes_to_parameters_does_what_torchs_does(rank: int) -> None:
    found = []
    for wrap in (TorchDDP, fastddp.DistributedDataParallel):
        with dynamo():
            model = wrap(Writes())
            model.compile(backend="aot_eager")
            found.append([steps(model, rank), [parameter.detach() for parameter in model.parameters()]])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    reducer: Any = model.reducer
    names = {model._recipe.parameters.names[index] for index in reducer.handed_over()}
    assert names >= {"first.weight", "first.bias", "last.weight", "last.bias"}


class AddsTwice(nn.Module):
    """Adds a parameter, and changes it after a graph break; or its caller does, if it does not break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last, self.added = nn.Linear(8, 8), nn.Linear(8, 3), nn.Parameter(torch.randn(8))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu() + self.added
        if self.breaks:
            torch._dynamo.graph_break()
            self.change()
        return self.last(x)

    @torch.no_grad()
    def change(self) -> None:
        self.added.mul_(0.9)


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.timeout(COMPILING + 30)
@on_ranks(2, time_limit=COMPILING)
def test_a_parameter_may_be_changed_between_its_graph_and_backward(rank: int, breaks: bool) -> None:
    found = []
    for wrap in (TorchDDP, fastddp.DistributedDataParallel):
        with dynamo():
            model = wrap(AddsTwice(breaks))
            model.compile(backend="aot_eager")
            for step in range(3):
                loss = model(batch(rank, step)).square().mean()
                if not breaks:
                    model.module.change()
                loss.backward()
            found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    reducer: Any = model.reducer
    assert len(reducer.handed_over()) == 5


# ----------------------------------------------------------------- where gradients are not handed over, and who says so


def said(rank: int, model: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            backward(model, rank, step)
    return [str(one.message) for one in caught if "FD051" in str(one.message)]


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
def test_where_cuda_graphs_are_replayed_graphs_end_with_buckets(
    rank: int, way: str, options: Any, layers: list[list[int]]
) -> None:
    graphs: list[list[Any]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(sorted(value.shape for value in inputs if isinstance(value, nn.Parameter)))
        return lookup_backend("aot_eager")(graph, inputs)

    def shapes() -> list[list[Any]]:
        """Of the parameters in each bucket, the last one first, as graphs come in the order of forward."""
        return [sorted(p.shape for p in bucket.parameters) for bucket in reversed(wrapper.bucket_plan().buckets)]

    with dynamo(), torch._inductor.config.patch({"triton.cudagraphs": True}):
        model = compiled(way, record, options)
        wrapper = wrapper_in(model)
        before = shapes()
        texts = said(rank, model)
        after = shapes()
    assert len(texts) == (rank == 0)
    assert all("cut where buckets end" in text and "CUDA graphs" in text for text in texts)
    graphs = [graph for graph in graphs if graph]
    assert graphs == before == [sorted(p.shape for n in of for p in Layers().layers[n].parameters()) for of in layers]
    # Rebuilt buckets have another order within a graph, but all of them before the next graph's.
    graph_of = {shape: number for number, graph in enumerate(reversed(graphs)) for shape in graph}
    for number, bucket in enumerate(reversed(after)):
        assert max(graph_of[shape] for shape in bucket) <= number


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("why", ["other tensors stand in the places", "an optimizer steps inside backward"])
@on_ranks(1)
def test_where_gradients_cannot_be_handed_over_one_line_says_why(rank: int, why: str) -> None:
    with dynamo():
        low = {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)} if why.startswith("other") else {}
        model = fastddp.DistributedDataParallel(Layers(), **low)
        if not low:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.0})
        model.compile(backend="aot_eager")
        (text,) = said(rank, model)
    assert f"are cut where buckets end, as for torch's DDP: {why}" in text
    assert model.reducer.handed_over() == []


@on_ranks(2)
def test_code_that_was_compiled_before_is_used_as_it_is_and_one_line_says_so(rank: int) -> None:
    with dynamo():
        module = Layers()
        module.compile(backend="aot_eager")
        module(batch(rank)).square().sum().backward()
        model = fastddp.DistributedDataParallel(module)
        texts = said(rank, model)
    assert len(texts) == (rank == 0)
    assert all("layers.0.weight and 7 more comes when its compiled graph ends" in text for text in texts)


@on_ranks(1)
def test_parameters_that_share_a_memory_hand_their_gradients_over(rank: int) -> None:
    with dynamo():
        module = Layers()
        flat = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.nn.utils.vector_to_parameters(flat, module.parameters())
        model: Any = fastddp.DistributedDataParallel(module)
        model.compile(backend="aot_eager")
        assert said(rank, model) == []
    assert model.reducer.handed_over() == [*range(8)]


@on_ranks(2)
def test_a_model_whose_gradients_are_handed_over_says_nothing_and_neither_does_one_that_is_not_compiled(
    rank: int,
) -> None:
    with dynamo():
        assert said(rank, compiled("outside", "aot_eager", {})) == []
        assert said(rank, fastddp.DistributedDataParallel(Layers())) == []


@on_ranks(2)
def test_an_optimizer_that_steps_inside_a_compiled_backward_is_refused(rank: int) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        optimizer.step()
        return averages(state, bucket)

    with dynamo():
        model = fastddp.DistributedDataParallel(Layers(), **ALL_BUCKETS)
        model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.register_comm_hook(None, hook)
        with pytest.raises(RuntimeError, match=r"steps inside the backward of a compiled graph.*FD050"):
            backward(model, rank)
        dist.barrier()


@on_ranks(1)
def test_what_dynamo_is_told_holds_in_forward_only_even_if_it_raises(rank: int) -> None:
    def told() -> tuple[Any, ...]:
        return TorchDDP._get_active_ddp_module(), dist._DEFAULT_FIRST_BUCKET_BYTES, type(dynamos_optimizer())

    def look(module: nn.Module, args: Any) -> None:
        assert told()[:2] == (model, before[1])
        assert told()[2] is not before[2]
        raise ValueError("after the look")

    model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0)
    before = told()
    model.module.register_forward_pre_hook(look)
    with pytest.raises(ValueError, match="after the look"):
        model(batch(rank))
    assert told() == before == (None, dist._DEFAULT_FIRST_BUCKET_BYTES, seam.DDPOptimizer)


def dynamos_optimizer() -> Any:
    return seam.DDPOptimizer(2**20, lookup_backend("aot_eager"))


FORWARDS = ["of fastddp's", "of torch's", "of a replicated module"]


@pytest.mark.parametrize("other", FORWARDS)
@pytest.mark.parametrize("first_to_end", [0, 1])
@on_ranks(1)
def test_forwards_of_two_threads_do_not_meet(rank: int, other: str, first_to_end: int) -> None:
    """Each sees its own model from its beginning to its end, whichever ends first; afterwards nobody's is left."""
    makers = {"of torch's": TorchDDP, "of a replicated module": fastddp.replicate}
    models = [fastddp.DistributedDataParallel(Layers()), makers.get(other, fastddp.DistributedDataParallel)(Layers())]
    at_once, one_is_over = threading.Barrier(2, timeout=60), threading.Event()
    seen: list[Any] = [[], []]

    def forward(number: int) -> None:
        def look(*_: Any) -> None:
            seen[number].append((TorchDDP._get_active_ddp_module(), type(dynamos_optimizer())))

        def wait(*_: Any) -> None:
            look()
            at_once.wait()
            look()
            at_once.wait()
            if number != first_to_end:
                assert one_is_over.wait(60)
            look()

        layers = getattr(models[number], "module", models[number]).layers
        layers[0].register_forward_pre_hook(wait)
        models[number](batch(rank))
        one_is_over.set()

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert [*threads.map(forward, range(2))] == [None, None]
    ours = (models[0], types.SimpleNamespace)
    assert seen[0][0] == ours
    if other != "of torch's":  # whose forward writes over what others see
        assert seen[0] == [ours] * 3
        assert seen[1] == [(seen[1][0][0], types.SimpleNamespace)] * 3
        assert seen[1][0][0] in (models[1], wrapper_of(models[1]))
    assert (TorchDDP._active_ddp_module, type(dynamos_optimizer())) == (None, seam.DDPOptimizer)


@on_ranks(1)
def test_a_forward_around_another_one_is_the_active_one_again(rank: int) -> None:
    seen: list[Any] = []

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.layer = inner, nn.Linear(24, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            seen.append((TorchDDP._active_ddp_module, type(dynamos_optimizer())))
            return self.layer(x)

    kinds = {TorchDDP: seam.DDPOptimizer, fastddp.DistributedDataParallel: types.SimpleNamespace}
    for outer, inner in itertools.product(kinds, kinds):
        model = outer(Around(inner(Layers())))
        model(batch(rank))
        assert seen.pop() == (model, kinds[outer])
        assert (TorchDDP._active_ddp_module, type(dynamos_optimizer())) == (None, seam.DDPOptimizer)


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
