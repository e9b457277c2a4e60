"""mixed_precision: low precision while the module runs, and the parameters' own precision everywhere else.

Torch's DDP cannot do it on the CPU (its copies need a device's events), so what is compared with is plain torch: the
module called with cast parameters and inputs, and the mean over the ranks as the wire rounds it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import fastddp
from models import MODELS, inputs
from ranks import RankPool

BF16 = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def mean(gradient: Tensor, wire: torch.dtype) -> Tensor:
    """Over the ranks, in fp32 sums of what travels in ``wire``."""
    mine = (gradient.float() / dist.get_world_size()).to(wire).contiguous()
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return sum(one.float() for one in everyones).to(wire).to(gradient.dtype)  # type: ignore[union-attr]


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


class Reference(nn.Module):
    """What mixed precision means, in plain torch; ``synchronise`` stands for what DDP does in backward."""

    def __init__(self, module: nn.Module, config: _MixedPrecision) -> None:
        super().__init__()
        self.module = module
        self.config = config
        for buffer in module.buffers():
            buffer.data = cast(buffer, config.buffer_dtype)

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)
        dtype = self.config.param_dtype
        parameters = {name: cast(parameter, dtype) for name, parameter in self.module.named_parameters()}
        return torch.func.functional_call(self.module, parameters, (cast(x, dtype),))

    def synchronise(self) -> None:
        wire = self.config.reduce_dtype or self.config.param_dtype
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = mean(parameter.grad, wire or parameter.dtype)


def train(rank: int, name: str, config: _MixedPrecision, options: dict[str, Any]) -> list[str]:
    """Names of what differs after each of three steps."""
    model = fastddp.DistributedDataParallel(MODELS[name](), mixed_precision=config, **options)
    expected = Reference(copy.deepcopy(model.module), config)
    optimizers = [torch.optim.SGD(trained.parameters(), 0.01, momentum=0.9) for trained in (model, expected)]
    differences = []
    for step in range(3):
        x = inputs(name, rank, step)
        outputs = [trained(x) for trained in (model, expected)]
        for output in outputs:
            output.float().square().mean().backward()
        expected.synchronise()
        theirs = {**dict(expected.module.named_parameters()), **dict(expected.module.named_buffers())}
        if not torch.equal(*outputs) or outputs[0].dtype != outputs[1].dtype:
            differences.append("output")
        for key, mine in [*model.module.named_parameters(), *model.module.named_buffers()]:
            same_gradient = (mine.grad is None) == (theirs[key].grad is None)
            if mine.grad is not None and same_gradient:
                same_gradient = mine.grad.dtype == mine.dtype and torch.equal(mine.grad, theirs[key].grad)
            if not same_gradient or mine.dtype != theirs[key].dtype or not torch.equal(mine, theirs[key]):
                differences.append(key)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differences


@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("batch norm MLP", BF16),
        ("batch norm MLP", _MixedPrecision(None, torch.bfloat16)),
        ("shared parameters", BF16),
        ("shared parameters", _MixedPrecision(torch.bfloat16)),
        ("shared parameters", _MixedPrecision(torch.float64, torch.float16)),
        ("shared parameters", _MixedPrecision()),
    ],
    ids=str,
)
def test_training_is_that_of_a_module_called_with_cast_parameters(
    ranks: RankPool, name: str, config: _MixedPrecision, view: bool
) -> None:
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0}
    assert ranks.run(train, 2, name, config, options) == [[], []]


def two_layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def wrapped(module: nn.Module, config: _MixedPrecision = BF16, **options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(module, mixed_precision=config, **options)


class Branches(nn.Module):
    """Uses one of its layers, another one on each rank and in each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.forwards = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.layers[0](self.layers[1 + self.forwards % 2](x))


def accumulate(model: Any, rank: int) -> list[Tensor]:
    with contextlib.nullcontext() if isinstance(model, Reference) else model.no_sync():
        for step in range(2):
            model(batch(rank, step)).float().sum().backward()
    local = gradients(model)
    assert all(gradient.dtype == torch.float32 for gradient in local)
    model(batch(rank, 2)).float().sum().backward()
    return local


def several_forwards(model: Any, rank: int) -> list[Tensor]:
    sum(model(batch(rank, step)).float().square().sum() for step in range(3)).backward()  # type: ignore[union-attr]
    return []


def unused(model: Any, rank: int) -> list[Tensor]:
    model(batch(rank)).float().square().sum().backward()
    if isinstance(model, Reference):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return []


def as_the_reference(rank: int, program: Any, make: Callable[[], nn.Module], options: dict[str, Any]) -> bool:
    found = []
    for model in (wrapped(make(), **options), Reference(make(), BF16)):
        seen = program(model, rank)
        if isinstance(model, Reference):
            model.synchronise()
        found.append(seen + gradients(model))
    return same(*found)


@pytest.mark.parametrize(
    ("program", "make", "options"),
    [
        (accumulate, two_layers, {}),  # in the parameters' precision
        (several_forwards, two_layers, {}),
        (unused, Branches, {"find_unused_parameters": True}),
    ],
)
def test_windows_are_those_of_a_module_called_with_cast_parameters(
    ranks: RankPool, program: Any, make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    assert ranks.run(as_the_reference, 2, program, make, options) == [True, True]


class Checkpointed(nn.Module):
    """Runs ``body`` and a product with a parameter of its own again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = two_layers()
        self.scale = nn.Parameter(torch.full((4,), 1.01))
        self.reentrant = reentrant
        self.fail_in_backward = False

    def forward(self, x: Tensor) -> Any:
        return {"result": [checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)]}

    def part(self, x: Tensor) -> Tensor:
        if self.fail_in_backward and torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return self.body(x * self.scale) + x


class Plain(Checkpointed):
    def forward(self, x: Tensor) -> Any:
        return {"result": [self.part(self.first(x))]}


def recompute(rank: int, reentrant: bool, backwards: int) -> tuple[bool, bool, bool]:
    torch.manual_seed(1)
    model = wrapped(Checkpointed(reentrant))
    plain = wrapped(Plain(reentrant))
    plain.load_state_dict(model.state_dict())
    for trained in (model, plain):
        with trained.no_sync():
            loss = trained(batch(rank))["result"][0].float().square().sum()
            for backward in range(backwards):
                loss.backward(retain_graph=backward < backwards - 1)
        trained(batch(rank, 1))["result"][0].float().square().sum().backward()
    as_before = all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    return same(gradients(model), gradients(plain)), len(gradients(model)) == 7, as_before


@pytest.mark.parametrize(("reentrant", "backwards"), [(False, 1), (True, 1), (False, 2)])
def test_what_checkpointing_runs_again_in_backward_runs_in_low_precision_too(
    ranks: RankPool, reentrant: bool, backwards: int
) -> None:
    assert ranks.run(recompute, 2, reentrant, backwards) == [(True, True, True)] * 2


def whole_model_again(rank: int) -> bool:
    model, plain = wrapped(two_layers()), wrapped(two_layers())
    x = batch(rank).requires_grad_()
    checkpoint(model, x, use_reentrant=True).float().square().sum().backward()
    plain(x).float().square().sum().backward()
    as_before = all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    return as_before and same(gradients(model), gradients(plain))


def test_the_wrapper_itself_may_be_checkpointed(ranks: RankPool) -> None:
    assert ranks.run(whole_model_again, 2) == [True, True]


def survive(rank: int, where: str) -> tuple[bool, bool]:
    torch.manual_seed(1)
    model = wrapped(Checkpointed(reentrant=False))
    parameters = list(model.parameters())
    if where == "backward":
        model.module.fail_in_backward = True
        with pytest.raises(ZeroDivisionError):
            model(batch(rank))["result"][0].float().sum().backward()
        model.module.fail_in_backward = False
    else:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
    as_before = all(map(Tensor.is_set_to, model.parameters(), parameters))
    as_before &= [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    model.zero_grad()
    model(batch(rank))["result"][0].float().sum().backward()
    return as_before, len(gradients(model)) == 7


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_parameters_are_in_their_places(ranks: RankPool, where: str) -> None:
    assert ranks.run(survive, 2, where) == [(True, True)] * 2


def inspect(rank: int) -> dict[str, bool]:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    seen = {"during": False}

    def look(module: nn.Module, args: Any) -> None:
        seen["during"] = module.weight.dtype == torch.bfloat16 and args[0].dtype == torch.bfloat16

    model.module[0].register_forward_pre_hook(look)
    model.eval()
    with torch.no_grad():
        output = model(batch(rank))
    model.train()
    seen["no graph"] = not output.requires_grad and output.dtype == torch.bfloat16
    model(batch(rank)).float().sum().backward()
    seen["same objects"] = all(mine is before for mine, before in zip(model.parameters(), parameters, strict=True))
    seen["full precision"] = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    seen["state dict"] = (
        list(model.state_dict()) == keys and model.state_dict()["module.0.weight"].dtype == torch.float32
    )
    seen["counter"] = model.module[1].num_batches_tracked.dtype == torch.int64
    seen["statistics"] = model.module[1].running_mean.dtype == torch.bfloat16
    return seen


def test_outside_the_module_parameters_are_what_they_were(ranks: RankPool) -> None:
    for seen in ranks.run(inspect, 2):
        assert all(seen.values()), seen


def ignored(rank: int) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Linear(4, 4)
            self.kept.register_buffer("offset", torch.zeros(4))
            self.cast = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.kept.weight.dtype, self.kept.offset.dtype, self.cast.weight.dtype
            return self.kept(self.cast(x).float()) + self.kept.offset

    net = Net()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(net, ["kept.weight", "kept.bias", "kept.offset"])
    wrapped(net)(batch(rank)).sum().backward()
    return net.seen


def test_ignored_parameters_and_buffers_keep_their_dtype(ranks: RankPool) -> None:
    assert ranks.run(ignored, 1) == [(torch.float32, torch.float32, torch.bfloat16)]


class Tied(nn.Module):
    """Two places with one parameter; runs again in backward, and notes what stood there each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.weight.mark = "a parameter's mark"  # type: ignore[attr-defined]
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)

    def part(self, x: Tensor) -> Tensor:
        self.seen += [self.first.weight, self.second.weight]
        return self.second(self.first(x).tanh())


def shared_and_marked(rank: int) -> list[bool]:
    model = wrapped(Tied())
    model(batch(rank)).float().sum().backward()
    seen = model.module.seen
    return [
        len(seen) == 4 and all(one is seen[0] for one in seen),
        seen[0] is not model.module.first.weight and model.module.second.weight is model.module.first.weight,
        seen[0].mark == "a parameter's mark",
    ]


def test_a_parameter_has_one_copy_in_all_its_places_with_its_marks_for_forward_and_backward(ranks: RankPool) -> None:
    assert ranks.run(shared_and_marked, 1) == [[True] * 3]


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    more: Any
    label: str = dataclasses.field(init=False, default="label")


class Echo(nn.Module):
    """Returns what it got, so that a test sees what the module saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs, self.weight.sum()


def nested_inputs(rank: int) -> list[bool]:
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int64)
    given = Batch(floats, {"pair": Pair([floats], integers), "text": "as it is"})
    packed = pack_sequence([torch.ones(2, 4), torch.ones(1, 4)])
    with torch.no_grad():
        (seen, seen_packed), kwargs, _ = wrapped(Echo())(given, packed, mask=torch.ones(2), flag=True)
    return [
        seen.x.dtype == torch.bfloat16,
        isinstance(seen, Batch) and seen.label == "label",
        isinstance(seen.more["pair"], Pair) and seen.more["pair"].left[0].dtype == torch.bfloat16,
        seen.more["pair"].right is integers and seen.more["text"] == "as it is",
        isinstance(seen_packed, PackedSequence) and seen_packed.data.dtype == torch.bfloat16,
        kwargs["mask"].dtype == torch.bfloat16 and kwargs["flag"] is True,
        given.x is floats and floats.dtype == torch.float32,
    ]


def test_floating_point_inputs_are_cast_wherever_they_are(ranks: RankPool) -> None:
    assert ranks.run(nested_inputs, 1) == [[True] * 7]


def cast_order(rank: int) -> list[bool]:
    """Whether the last layer's gradient came before the first layer's backward ran."""
    model = wrapped(two_layers())
    events: list[str] = []
    model.module[2].weight.register_post_accumulate_grad_hook(lambda _: events.append("last layer's gradient"))
    output = model(batch(rank))
    first = output.grad_fn
    while first is not None and "Tanh" not in first.name():
        first = first.next_functions[1][0]
    first.register_hook(lambda *_: events.append("backward before it"))
    output.sum().backward()
    return [events == ["last layer's gradient", "backward before it"]]


def test_gradients_are_cast_as_soon_as_they_come_so_that_they_can_travel_meanwhile(ranks: RankPool) -> None:
    assert ranks.run(cast_order, 1) == [[True]]


def with_hook(rank: int, native: bool) -> tuple[torch.dtype | None, bool]:
    seen: list[torch.dtype] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().dtype)
        return allreduce_hook(None, bucket)

    model = wrapped(two_layers())
    expected = Reference(two_layers(), dataclasses.replace(BF16, reduce_dtype=torch.float32))
    model.register_comm_hook(None, fastddp.comm_hooks.allreduce_hook if native else hook)
    for trained in (model, expected):
        trained(batch(rank)).float().square().sum().backward()
    expected.synchronise()
    return (seen[0] if seen else None), same(gradients(model), gradients(expected))


@pytest.mark.parametrize(("native", "dtype"), [(True, None), (False, torch.float32)])
def test_a_communication_hook_decides_what_travels_and_gets_gradients_in_the_parameters_precision(
    ranks: RankPool, native: bool, dtype: torch.dtype | None
) -> None:
    assert ranks.run(with_hook, 2, native) == [(dtype, True)] * 2


class Referring(nn.Module):
    """Its parts keep references to their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lstm(x)[0])


def copied(rank: int) -> list[bool]:
    torch.manual_seed(0)
    model = wrapped(Referring())
    expected = Reference(copy.deepcopy(model.module), BF16)
    x = batch(rank)
    for trained in (model, expected):
        trained(x).float().square().sum().backward()
    expected.synchronise()
    twin, alone = copy.deepcopy(model), copy.deepcopy(model.module)
    return [
        same(gradients(model), gradients(expected)),
        torch.equal(twin(x), model(x)),
        torch.equal(alone(x), model.module(x)) and alone(x).dtype == torch.float32,
    ]


def test_modules_that_keep_references_to_their_parameters_work_and_can_be_copied(ranks: RankPool) -> None:
    assert ranks.run(copied, 2) == [[True] * 3] * 2


def compiled(rank: int, what: str) -> bool:
    plain = wrapped(two_layers())
    module = two_layers()
    if what == "module":
        model: Any = wrapped(torch.compile(module, backend="aot_eager"))  # type: ignore[arg-type]
    else:
        model = torch.compile(wrapped(module), backend="aot_eager")
    for _ in range(2):
        for trained in (model, plain):
            trained.zero_grad()
            trained(batch(rank)).float().square().sum().backward()
    return same(gradients(module), gradients(plain))


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("what", ["module", "wrapper"])
def test_compiled_modules_compute_in_low_precision_too(ranks: RankPool, what: str) -> None:
    assert ranks.run(compiled, 2, what) == [True, True]


def memory(rank: int) -> tuple[bool, bool]:
    """Whether a copy outlives the backward, and the wrapper its last reference, while the loss is alive."""
    model = wrapped(two_layers())
    copies: list[weakref.ref] = []
    model.module[0].register_forward_pre_hook(lambda module, args: copies.append(weakref.ref(module.weight)))
    gc.disable()
    try:
        loss = model(batch(rank)).float().sum()
        held = copies[0]() is not None
        loss.backward()
        freed = copies[0]() is None
        wrapper = weakref.ref(model)
        del model
        return held and freed, wrapper() is None and loss is not None
    finally:
        gc.enable()


def test_copies_are_freed_when_the_backward_ends(ranks: RankPool) -> None:
    assert ranks.run(memory, 1) == [(True, True)]


def refuse(rank: int, make: Callable[[], nn.Module], config: Any) -> None:
    wrapped(make(), config)


def script() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("make", "config", "type_name", "text"),
    [
        (two_layers, "bf16", "TypeError", "_MixedPrecision or None, got builtins.str"),
        (two_layers, _MixedPrecision(torch.int32), "ValueError", "param_dtype must be a floating-point dtype"),
        (two_layers, _MixedPrecision(None, torch.float8_e4m3fn), "ValueError", "Set reduce_dtype to one of"),
        (script, BF16, "ValueError", "TorchScript, and 1 is one"),
    ],
)
def test_mixed_precision_refuses(
    ranks: RankPool, make: Callable[[], nn.Module], config: Any, type_name: str, text: str
) -> None:
    (error,) = ranks.errors(refuse, 1, make, config)
    assert error.type_name == type_name
    assert text in error.message


def refused_at_the_end(rank: int) -> torch.dtype:
    module = nn.BatchNorm1d(2)
    with (
        patch("fastddp.exchange.descriptions.load_kernels", side_effect=RuntimeError("no kernels")),
        pytest.raises(RuntimeError, match="no kernels"),
    ):
        wrapped(module, _MixedPrecision(buffer_dtype=torch.float64))
    return module.running_mean.dtype


def test_a_module_that_is_refused_keeps_its_buffers(ranks: RankPool) -> None:
    assert ranks.run(refused_at_the_end, 1) == [torch.float32]
