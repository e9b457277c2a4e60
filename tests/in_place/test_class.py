"""What a replicated module still is, and what replicate() refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastddp
from by_hand import Net, averaged, inputs, net
from on_ranks import differences, gradients, on_ranks


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def score(self, x: Tensor) -> Tensor:
        return self(x).square().sum()


class WithMetaclass(Layer, metaclass=ABCMeta):
    pass


class WithSlots(Layer):
    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.kept = 5


class WithGetattr(Layer):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("any_"):
                return name
            raise


class WithCall(Layer):
    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().__call__(x)


class WithSubclasses(Layer):
    known: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.known.append(cls.__name__)


class Recursive(Layer):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(x) if depth == 0 else 2 * self(x, depth - 1)


CLASSES = [Layer, WithMetaclass, WithSlots, WithGetattr, WithCall, WithSubclasses, Recursive]


@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(2)
def test_the_module_stays_what_it_was(rank: int, kind: type[Layer]) -> None:
    torch.manual_seed(0)
    module = kind()
    before = (repr(module), list(module.state_dict()), type(module).__name__, type(module).__module__, kind.__doc__)
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    names = [name for name, _ in module.named_modules()]
    plain = copy.deepcopy(module)
    model = fastddp.replicate(module)
    assert model is module
    assert isinstance(model, kind)
    after = (repr(model), list(model.state_dict()), type(model).__name__, type(model).__module__, type(model).__doc__)
    assert after == before
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == attributes
    assert [name for name, _ in model.named_modules()] == names
    assert type(model) is type(fastddp.replicate(kind()))
    for loss in (lambda one: one(inputs(rank)).sum(), lambda one: one.score(inputs(rank))):
        model.zero_grad()
        loss(model).backward()
        assert differences(averaged(plain, loss), gradients(model)) == []
    assert kind is not WithSubclasses or "WithSubclasses" in WithSubclasses.known
    assert (kind is not WithGetattr) or model.any_name == "any_name"
    assert (kind is not WithSlots) or model.kept == 5
    assert type(kind()) is kind


@on_ranks(1)
def test_modules_that_a_module_makes_of_its_own_class_are_plain(rank: int) -> None:
    layers = fastddp.replicate(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    sequence = fastddp.replicate(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert [type(part) for part in (layers[1:], sequence[:2], type(sequence)(nn.ReLU()))] == [
        *(nn.ModuleList, nn.Sequential, nn.Sequential)
    ]
    assert isinstance(sequence, nn.Sequential)
    assert isinstance(sequence[:2](torch.ones(1, 2)), Tensor)


@on_ranks(2)
def test_another_forward_on_the_instance(rank: int) -> None:
    model = fastddp.replicate(net())
    model.forward = model.score
    model(inputs(rank)).backward()
    assert differences(averaged(net(), lambda alone: alone.score(inputs(rank))), gradients(model)) == []


@on_ranks(2)
def test_hooks_of_the_module_run_once(rank: int) -> None:
    model = fastddp.replicate(net())
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    model(inputs(rank).requires_grad_()).backward()
    assert calls == ["before", "after", "backward"]


# ----------------------------------------------------------------------------------------------------- other programs


@pytest.mark.parametrize("strict", [False, True])
@on_ranks(1)
def test_an_exported_program_is_the_plain_modules(rank: int, strict: bool) -> None:
    plain, model = net(), fastddp.replicate(net())
    programs = [torch.export.export(module, (inputs(0),), strict=strict) for module in (plain, model)]
    codes = [program.graph_module.print_readable(print_output=False) for program in programs]
    assert codes[0] == codes[1]
    assert list(programs[0].state_dict) == list(programs[1].state_dict)
    model(inputs(0)).backward()
    assert model.left.weight.grad is not None


@pytest.mark.parametrize("method", ["forward", "score"])
@on_ranks(1)
def test_a_traced_program_is_the_plain_modules(rank: int, method: str) -> None:
    plain, model = net(), fastddp.replicate(net())
    traced = [torch.jit.trace_module(module, {method: inputs(0)}) for module in (plain, model)]
    assert getattr(traced[0], method).code == getattr(traced[1], method).code
    assert torch.equal(getattr(traced[1], method)(inputs(1)), getattr(plain, method)(inputs(1)))
    model(inputs(0)).backward()
    assert model.left.weight.grad is not None


@on_ranks(2)
def test_a_functional_call_has_the_callers_parameters(rank: int) -> None:
    model, other = fastddp.replicate(net()), net()
    nn.init.ones_(other.trunk.weight)
    given = {name: parameter.detach().requires_grad_() for name, parameter in other.named_parameters()}
    loss = torch.func.functional_call(model, given, (inputs(rank),))
    assert torch.equal(loss, other(inputs(rank)))
    loss.backward()
    other(inputs(rank)).backward()
    assert differences(gradients(other), [tensor.grad for tensor in given.values()]) == []
    assert gradients(model) == [None] * 6


@pytest.mark.parametrize("is_used", [False, True])
@on_ranks(2)
def test_a_module_that_is_dropped_is_freed_at_once(rank: int, is_used: bool) -> None:
    model = fastddp.replicate(net())
    gc.collect()
    gc.disable()
    if is_used:
        model(inputs(rank)).backward()
        model.zero_grad()
        model.score(inputs(rank)).backward()
    found = [weakref.ref(one) for one in (model, model.trunk, model.trunk.weight)]
    del model
    assert [one() for one in found] == [None] * 3
    gc.enable()


# ------------------------------------------------------------------------------------------------------------- refused


class WithJoin(Net):
    def join(self) -> None:
        """As :meth:`replicate` adds one."""


class WithAudit(Net):
    def __init__(self) -> None:
        super().__init__()
        self.audit = nn.Linear(1, 1)


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), fastddp.replicate(nn.Linear(1, 1)))


def holds_a_wrapper() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), fastddp.DistributedDataParallel(nn.Linear(1, 1)))


KEPT: list[nn.Module] = []


def overlaps(other: Callable[[nn.Module], nn.Module]) -> nn.Module:
    shared = nn.Linear(2, 2)
    KEPT[:] = [other(nn.Sequential(shared, nn.Linear(2, 1)))]
    return nn.Sequential(shared, nn.Linear(2, 3))


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "a wrapper": (lambda: fastddp.DistributedDataParallel(net()), {}, ValueError, r"model\.module"),
    "torch's wrapper": (lambda: nn.DataParallel(net()), {}, ValueError, "DataParallel wraps"),
    "again": (lambda: fastddp.replicate(net()), {}, ValueError, r"The module \(Net\) is replicated in place already"),
    "a replicated part": (nested, {}, ValueError, r"1 \(Linear\) is replicated in place already"),
    "a wrapped part": (holds_a_wrapper, {}, ValueError, "1 is a DistributedDataParallel"),
    "parameters of a replicated module": (lambda: overlaps(fastddp.replicate), {}, ValueError, r"0\.weight"),
    "TorchScript": (lambda: torch.jit.script(nn.Linear(1, 1)), {}, ValueError, "TorchScript"),
    "compiled": (lambda: torch.compile(net()), {}, ValueError, "_orig_mod"),
    "a method of our name": (WithJoin, {}, ValueError, "WithJoin has join,"),
    "a submodule of our name": (WithAudit, {}, ValueError, "WithAudit has audit,"),
    "mixed_precision": (net, {"mixed_precision": object()}, ValueError, "mixed_precision is for"),
    "an unknown option": (net, {"bucket_cap": 1}, TypeError, "bucket_cap_mb"),
    "an option of another type": (net, {"watch": 1}, TypeError, r"fastddp\.Watch"),
    "an option of another value": (net, {"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb"),
    "an unknown hook": (net, {"hook": "int9"}, ValueError, "int8"),
    "a hook that is none": (net, {"hook": (None, 5)}, TypeError, "callable"),
    "nothing to train": (lambda: net().requires_grad_(False), {}, RuntimeError, "gradient"),
    "no module": (lambda: [nn.Linear(1, 1)], {}, TypeError, r"must be a torch\.nn\.Module"),
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_what_is_refused_is_refused_by_name_and_left_as_it_was(rank: int, what: str) -> None:
    make, options, error, text = REFUSED[what]
    module = make()
    kind, kept = type(module), dict(getattr(module, "__dict__", {}))
    with pytest.raises(error, match=text):
        fastddp.replicate(module, **options)
    assert type(module) is kind
    assert dict(getattr(module, "__dict__", {})) == kept
    if make is net:
        fastddp.replicate(module).score(inputs(rank)).backward()
        assert differences(averaged(net(), lambda alone: alone.score(inputs(rank))), gradients(module)) == []


@on_ranks(2)
def test_no_wrapper_over_a_replicated_module_or_its_parameters(rank: int) -> None:
    model = fastddp.replicate(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    for module in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match="is replicated in place already"):
            fastddp.DistributedDataParallel(module)
    model(inputs(rank)).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("first", ["wrapper", "replicated"])
@on_ranks(2)
def test_a_wrapper_and_a_replicated_module_share_no_parameters(rank: int, first: str) -> None:
    both: list[Callable[[nn.Module], nn.Module]] = [fastddp.DistributedDataParallel, fastddp.replicate]
    if first == "replicated":
        both.reverse()
    other = overlaps(both[0])
    with pytest.raises(ValueError, match=r"0\.weight"):
        both[1](other)
