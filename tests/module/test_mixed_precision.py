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
from typing import Any

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
from on_ranks import Wrap, on_ranks, same_under_both

BF16 = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def wrapped(module: nn.Module, config: _MixedPrecision = BF16, **options: Any) -> Any:
    return fastddp.DistributedDataParallel(module, mixed_precision=config, **options)


class Reference(nn.Module):
    """What mixed precision means, in plain torch; ``synchronise`` stands for what DDP does in backward."""

    def __init__(self, module: nn.Module, config: _MixedPrecision = BF16, **options: Any) -> None:
        super().__init__()
        self.module, self.config = module, config
        for buffer in module.buffers():
            buffer.data = cast(buffer, config.buffer_dtype)

    def forward(self, x: Tensor) -> Any:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)
        dtype = self.config.param_dtype
        parameters = {name: cast(parameter, dtype) for name, parameter in self.module.named_parameters()}
        return torch.func.functional_call(self.module, parameters, (cast(x, dtype),))

    no_sync = contextlib.nullcontext

    def synchronise(self) -> None:
        wire = self.config.reduce_dtype or self.config.param_dtype
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = mean(parameter.grad, wire or parameter.dtype)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def mean(gradient: Tensor, wire: torch.dtype) -> Tensor:
    """Over the ranks, in fp32 sums of what travels in ``wire``."""
    mine = (gradient.float() / dist.get_world_size()).to(wire).contiguous()
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return sum(one.float() for one in everyones).to(wire).to(gradient.dtype)  # type: ignore[union-attr]


AS_REFERENCE = same_under_both(both=(Reference, wrapped))


# -------------------------------------------------------------------------------------------------- as in plain torch


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def backward(model: Any, output: Tensor) -> list[Tensor]:
    """The gradients after one that synchronises; each is of its parameter's dtype."""
    output.float().square().mean().backward()
    if isinstance(model, Reference):
        model.synchronise()
    return gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("batch norm MLP", BF16),
        ("batch norm MLP", _MixedPrecision(None, torch.bfloat16)),
        ("shared parameters", _MixedPrecision(torch.bfloat16)),
        ("shared parameters", _MixedPrecision(torch.float64, torch.float16)),
        ("shared parameters", _MixedPrecision()),
    ],
    ids=str,
)
@AS_REFERENCE
def test_training(wrap: Wrap, rank: int, name: str, config: _MixedPrecision, view: bool) -> Any:
    model = wrap(MODELS[name](), config, gradient_as_bucket_view=view, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    found = []
    for step in range(3):
        output = model(inputs(name, rank, step))
        found += [output, *backward(model, output)]
        optimizer.step()
        optimizer.zero_grad()
        found += [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]
    return found


@AS_REFERENCE
def test_accumulation_in_the_parameters_precision_and_then_over_several_forwards(wrap: Wrap, rank: int) -> Any:
    model = wrap(two_layers())
    with model.no_sync():
        for step in range(2):
            model(batch(rank, step)).float().sum().backward()
    return gradients(model) + backward(model, sum(model(batch(rank, step)) for step in range(2, 5)))  # type: ignore[arg-type]


class Checkpointed(nn.Module):
    """Runs ``body`` and a product with a parameter of its own again in backward, unless ``reentrant`` is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(4, 4), two_layers()
        self.scale = nn.Parameter(torch.full((4,), 1.01))
        self.reentrant: bool | None = False
        self.fail_in_backward = False

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        again = self.reentrant is not None
        return {"result": [checkpoint(self.part, x, use_reentrant=self.reentrant) if again else self.part(x)]}

    def part(self, x: Tensor) -> Tensor:
        if self.fail_in_backward and torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return self.body(x * self.scale) + x


@pytest.mark.parametrize(("reentrant", "backwards"), [(False, 1), (True, 1), (False, 2)])
@AS_REFERENCE
def test_what_checkpointing_runs_again_in_backward(wrap: Wrap, rank: int, reentrant: bool, backwards: int) -> Any:
    model = wrap(Checkpointed())
    model.module.reentrant = reentrant if wrap is wrapped else None
    with model.no_sync():
        loss = model(batch(rank))["result"][0].float().square().sum()
        for number in range(backwards):
            loss.backward(retain_graph=number < backwards - 1)
    return gradients(model) + backward(model, model(batch(rank, 1))["result"][0])


@AS_REFERENCE
def test_the_wrapper_itself_may_be_checkpointed(wrap: Wrap, rank: int) -> Any:
    model, x = wrap(two_layers()), batch(rank).requires_grad_()
    return backward(model, checkpoint(model, x, use_reentrant=True) if wrap is wrapped else model(x))


@pytest.mark.parametrize("native", [True, False])
@AS_REFERENCE
def test_a_hook_gets_gradients_in_the_parameters_precision(wrap: Wrap, rank: int, native: bool) -> Any:
    seen = set()

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.add(bucket.buffer().dtype)
        return allreduce_hook(None, bucket)

    model = wrap(two_layers())
    if wrap is wrapped:
        model.register_comm_hook(None, fastddp.comm_hooks.allreduce_hook if native else hook)
    else:
        model.config = dataclasses.replace(BF16, reduce_dtype=torch.float32)
    found = backward(model, model(batch(rank)))
    assert seen == ({torch.float32} if wrap is wrapped and not native else set())
    return found


@pytest.mark.parametrize("recurrent", [True, False])
@AS_REFERENCE
def test_modules_that_keep_references_to_their_parameters_and_copies(wrap: Wrap, rank: int, recurrent: bool) -> Any:
    """The copy of a module alone computes in full precision."""
    model = wrap(nn.LSTM(4, 4, 2) if recurrent else nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    models = [model, copy.deepcopy(model), model.module, copy.deepcopy(model.module)]
    outputs = [each(batch(rank)) for each in models]
    outputs = [output[0] if recurrent else output for output in outputs]
    return [*outputs, *backward(model, outputs[0])]


# ------------------------------------------------------------------------------------ what is where, during and outside


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_after_an_exception_the_parameters_are_in_their_places(rank: int, where: str) -> None:
    model = wrapped(Checkpointed())
    parameters = [id(parameter) for parameter in model.parameters()]
    model.module.fail_in_backward = where == "backward"
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        model(batch(rank) if where == "backward" else torch.ones(3, 5))["result"][0].float().sum().backward()
    model.module.fail_in_backward = False
    assert [id(parameter) for parameter in model.parameters()] == parameters
    model.zero_grad()
    model(batch(rank))["result"][0].float().sum().backward()
    assert len(gradients(model)) == 7


class Inspected(nn.Module):
    """Two places with one parameter, ignored ones and buffers; notes what it sees, also when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.ignored = (nn.Linear(4, 4) for _ in range(3))
        self.second.weight = self.first.weight
        self.first.weight.mark = "a parameter's mark"  # type: ignore[attr-defined]
        self.norm = nn.BatchNorm1d(4)
        self.copies: list[Any] = []
        TorchDDP._set_params_and_buffers_to_ignore_for_model(self, ["ignored.weight", "ignored.bias", "offset"])
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(checkpoint(self.part, x, use_reentrant=False))

    def part(self, x: Tensor) -> Tensor:
        self.copies += [self.first.weight, self.second.weight]
        assert x.dtype == self.first.weight.dtype == torch.bfloat16
        assert self.ignored.weight.dtype == self.offset.dtype == torch.float32
        return self.second(self.first(x).tanh())


@on_ranks(2)
def test_parameters_are_cast_inside_the_module_once_and_outside_what_they_were(rank: int) -> None:
    module = Inspected()
    before, keys = list(module.parameters()), [f"module.{key}" for key in module.state_dict()]
    model = wrapped(module, find_unused_parameters=True)
    with torch.no_grad():
        output = model.eval()(batch(rank))
    assert (output.requires_grad, output.dtype) == (False, torch.bfloat16)
    module.copies.clear()
    model.train()(batch(rank)).float().sum().backward()
    copied = module.copies[0]
    assert [id(one) for one in module.copies] == [id(copied)] * 4  # in two places, in forward and in backward
    assert copied is not before[0]
    assert copied.mark == "a parameter's mark"
    assert all(mine is one for mine, one in zip(model.parameters(), before, strict=True))
    assert [model.state_dict()[key].dtype for key in keys[:2]] == [torch.float32, torch.float32]
    assert module.norm.num_batches_tracked.dtype == torch.int64
    assert module.norm.running_mean.dtype == torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    more: Any
    label: str = dataclasses.field(init=False, default="label")


@on_ranks(1)
def test_floating_point_inputs_are_cast_wherever_they_are(rank: int) -> None:
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int64)
    packed = pack_sequence([torch.ones(2, 4), torch.ones(1, 4)])
    echo: Any = nn.Linear(1, 1)
    echo.forward = lambda *args, **kwargs: (args, kwargs)
    with torch.no_grad():
        (seen, seen_packed), kwargs = wrapped(echo)(Batch(floats, {"some": [floats, integers]}), packed, mask=floats)
    (seen_floats, seen_integers), more = seen.more["some"], (seen_packed.data, kwargs["mask"])
    assert all(tensor.dtype == torch.bfloat16 for tensor in (seen.x, seen_floats, *more))
    assert (type(seen), type(seen_packed), seen.label) == (Batch, PackedSequence, "label")
    assert seen_integers is integers


@on_ranks(1)
def test_copies_are_freed_when_the_backward_ends_and_the_wrapper_while_the_loss_is_alive(rank: int) -> None:
    model = wrapped(two_layers())
    alive: list[weakref.ref] = [weakref.ref(model)]
    model.module[0].register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(module.weight)))
    gc.disable()
    loss = model(batch(rank)).float().sum()
    assert alive[1]() is not None
    loss.backward()
    del model
    assert [one() for one in alive] == [None, None]
    gc.enable()
