"""What a replicated module still is, and what replicate() refuses."""

from __future__ import annotations

import gc
import weakref
from abc import ABCMeta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastddp
from by_hand import Net, check_averages, inputs, net
from on_ranks import differences, gradients, on_ranks


class Special(Net, metaclass=ABCMeta):
    __slots__ = ("kept",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = 7

    def __getattr__(self, name: str) -> Any:
        return 5 if name == "any_name" else super().__getattr__(name)


class WithCall(Net):
    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().__call__(x)


class Recursive(Net):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(x) if depth == 0 else 2 * self(x, depth - 1)


def shown(module: Any) -> list[Any]:
    kind = type(module)
    names = [*module.state_dict(), *dict(module.named_modules()), *(name for name in vars(module) if name[0] != "_")]
    return [repr(module), module.kept, getattr(module, "any_name", None), kind.__name__, kind.__module__, names]


@pytest.mark.parametrize("kind", [Special, WithCall, Recursive])
@on_ranks(2)
def test_the_module_stays_what_it_was(rank: int, kind: type[Any]) -> None:
    module, plain = kind(), kind()
    module.kept = plain.kept = 5
    model = fastddp.replicate(module)
    assert model is module
    assert isinstance(model, kind)
    assert shown(model) == shown(plain)
    assert type(model) is type(fastddp.replicate(kind()))
    assert type(kind()) is kind
    plain.load_state_dict(model.state_dict())
    check_averages(model, lambda one: one(inputs(rank)), plain=plain)


@on_ranks(1)
def test_modules_that_a_module_makes_of_its_own_class_are_plain(rank: int) -> None:
    layers = fastddp.replicate(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    assert type(layers[1:]) is nn.ModuleList


@on_ranks(2)
def test_a_forward_of_the_instance_and_hooks_run_once(rank: int) -> None:
    model, calls = fastddp.replicate(net()), []
    model.forward = lambda x: calls.append("forward") or model.score(x)
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    model(inputs(rank).requires_grad_()).backward()
    assert calls == ["before", "forward", "after", "backward"]
    found = gradients(model)
    check_averages(model, lambda one: one.score(inputs(rank)))
    assert differences(gradients(model), found) == []


# ----------------------------------------------------------------------------------------------------- other programs


def program(module: Any, how: str) -> Any:
    if how == "traced":
        traced = torch.jit.trace_module(module, {"forward": inputs(0), "score": inputs(0)})
        return traced.code, traced.score.code
    exported = torch.export.export(module, (inputs(0),), strict=how == "exported strictly")
    return exported.graph_module.print_readable(print_output=False), list(exported.state_dict)


@pytest.mark.parametrize("how", ["exported", "exported strictly", "traced"])
@on_ranks(2)
def test_a_program_is_the_plain_modules(rank: int, how: str) -> None:
    model = fastddp.replicate(net())
    assert program(model, how) == program(net(), how)
    check_averages(model, lambda one: one(inputs(rank)))


@on_ranks(2)
def test_a_functional_call_has_the_callers_parameters(rank: int) -> None:
    model, other = fastddp.replicate(net()), Net()
    given = {name: parameter.detach().requires_grad_() for name, parameter in other.named_parameters()}
    torch.func.functional_call(model, given, (inputs(rank),)).backward()
    other(inputs(rank)).backward()
    assert differences(gradients(other), [tensor.grad for tensor in given.values()]) == []
    assert gradients(model) == [None] * 6


@on_ranks(2)
def test_a_module_that_is_dropped_is_freed_at_once(rank: int) -> None:
    model = fastddp.replicate(net())
    gc.collect()
    gc.disable()
    for run in (model, model.score):
        model.zero_grad()
        run(inputs(rank)).backward()
    found = [weakref.ref(one) for one in (model, model.trunk, model.trunk.weight)]
    del model, run
    assert [one() for one in found] == [None] * 3
    gc.enable()


# ------------------------------------------------------------------------------------------------------------- refused


WAYS: list[Any] = [fastddp.DistributedDataParallel, fastddp.replicate]
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a wrapper": (lambda: WAYS[0](net()), {}, ValueError, r"model\.module"),
    "torch's wrapper": (lambda: nn.DataParallel(net()), {}, ValueError, "DataParallel wraps"),
    "again": (lambda: WAYS[1](net()), {}, ValueError, r"The module \(Net\) is replicated in place already"),
    "a replicated part": (lambda: nn.Sequential(WAYS[1](net())), {}, ValueError, r"0 \(Net\) is replicated in place"),
    "a wrapped part": (lambda: nn.Sequential(WAYS[0](net())), {}, ValueError, "0 is a DistributedDataParallel"),
    "TorchScript": (lambda: torch.jit.script(nn.Linear(1, 1)), {}, ValueError, "TorchScript"),
    "compiled": (lambda: torch.compile(net()), {}, ValueError, "_orig_mod"),
    "a method of our name": (lambda: type("Joined", (Net,), {"join": 1})(), {}, ValueError, "Joined has join,"),
    "a submodule of our name": (lambda: nn.ModuleDict({"audit": net()}), {}, ValueError, "ModuleDict has audit,"),
    "mixed_precision": (net, {"mixed_precision": object()}, ValueError, "mixed_precision is for"),
    "an unknown option": (net, {"bucket_cap": 1}, TypeError, "bucket_cap_mb"),
    "an option of another value": (net, {"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb"),
    "an unknown hook": (net, {"hook": "int9"}, ValueError, "int8"),
    "a hook that is none": (net, {"hook": (None, 5)}, TypeError, "callable"),
    "nothing to train": (lambda: net().requires_grad_(False), {}, RuntimeError, "gradient"),
    "no module": (lambda: [nn.Linear(1, 1)], {}, TypeError, r"must be a torch\.nn\.Module"),
}


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("what", REFUSED)
@on_ranks(1)
def test_what_is_refused_is_refused_by_name_and_left_as_it_was(rank: int, what: str) -> None:
    make, options, error, text = REFUSED[what]
    module = make()
    kind, kept = type(module), dict(getattr(module, "__dict__", {}))
    with pytest.raises(error, match=text):
        fastddp.replicate(module, **options)
    assert type(module) is kind
    assert dict(getattr(module, "__dict__", {})) == kept
    if make is net:
        check_averages(fastddp.replicate(module), lambda one: one.score(inputs(rank)))


@pytest.mark.parametrize(("first", "second"), [WAYS, WAYS[::-1], WAYS[1:] * 2])
@on_ranks(2)
def test_parameters_are_averaged_once(rank: int, first: Any, second: Any) -> None:
    shared = nn.Linear(2, 2)
    model = first(nn.Sequential(shared, nn.Linear(2, 1)))
    with pytest.raises(ValueError, match=r"0\.weight"):
        second(nn.Sequential(shared, nn.Linear(2, 3)))
    if first is fastddp.replicate:
        with pytest.raises(ValueError, match="is replicated in place already"):
            second(nn.Sequential(model))
