"""What a replicated module and its copies are, and what replicate() refuses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from abc import ABCMeta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastddp
from by_hand import Net, are_same, check_averages, inputs, net
from fastddp.torch_compat.surface import wrappers
from on_ranks import differences, gradients, on_ranks


class Special(Net, metaclass=ABCMeta):
    __slots__ = ("kept",)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()

    def __getattr__(self, name: str) -> Any:
        return 5 if name == "any_name" else super().__getattr__(name)

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().__call__(x)


class Recursive(Net):
    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        depth = dist.get_rank() if depth is None else depth
        return super().forward(x) if depth == 0 else 2 * self(x, depth - 1)


def shown(module: Any) -> list[Any]:
    kind = type(module)
    names = [*module.state_dict(), *dict(module.named_modules()), *(name for name in vars(module) if name[0] != "_")]
    return [repr(module), module.kept, getattr(module, "any_name", None), kind.__name__, kind.__module__, names]


@pytest.mark.parametrize("kind", [Special, Recursive])
@on_ranks(2)
def test_the_module_stays_what_it_was(rank: int, kind: type[Any]) -> None:
    module, plain = kind(), kind()
    for each in (module, plain):
        each.register_buffer("mean", torch.zeros(()))
        each.kept = 5
    model = fastddp.replicate(module)
    assert model is module
    assert shown(model) == shown(plain)
    assert type(model) is type(fastddp.replicate(kind()))
    assert issubclass(type(model), kind)
    assert type(kind()) is type(type(model)()) is kind  # of its own class a module makes a plain one, as slices are
    plain.load_state_dict(model.state_dict())
    check_averages(model, lambda one: one(inputs(rank)), plain=plain)


@on_ranks(2)
def test_a_forward_of_the_instance_runs_and_hooks_once(rank: int) -> None:
    model, calls = fastddp.replicate(net(), find_unused_parameters=True), []
    model.forward = model.of_left
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    model(inputs(rank).requires_grad_()).backward()
    assert (calls, model.right.bias.grad) == (["before", "after", "backward"], None)
    assert are_same(gradients(model))


def program(module: Any, how: str) -> Any:
    if how == "traced":
        traced = torch.jit.trace_module(module, {"forward": inputs(0), "score": inputs(0)})
        return traced.code, traced.score.code
    exported = torch.export.export(module, (inputs(0),), strict=how == "exported strictly")
    return exported.graph_module.print_readable(print_output=False), list(exported.state_dict)


@pytest.mark.parametrize("how", ["exported", "exported strictly", "traced"])
@on_ranks(2, time_limit=60)
def test_a_program_is_the_plain_modules(rank: int, how: str) -> None:
    plain = net()
    plain.register_buffer("mean", torch.zeros(()))
    model = fastddp.replicate(copy.deepcopy(plain))
    assert rank == 1 or program(model, how) == program(plain, how)  # one rank alone
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
    gc.disable()
    (model(inputs(rank)) + model.score(inputs(rank))).backward()
    found = weakref.ref(model), weakref.ref(model.trunk.weight)
    del model
    assert [one() for one in found] == [None, None]
    gc.enable()


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


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def made_again(state: dict[str, Tensor]) -> Any:
    made = OwnReduce()
    made.load_state_dict(state)
    return made


class OwnReduce(Net):
    def __reduce__(self) -> Any:
        return made_again, (self.state_dict(),)


def graph() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))


@pytest.mark.tier("slow", but_one_in=2)
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, saved])
@pytest.mark.parametrize("make", [Net, OwnReduce, graph])
@on_ranks(2)
def test_a_copy_trains_as_the_original(rank: int, make: Any, way: Any, is_used: bool) -> None:
    plain, model = make(), fastddp.replicate(make(), gradient_as_bucket_view=True, bucket_cap_mb=0)
    plain.load_state_dict(model.state_dict())
    if is_used:
        model(inputs(rank)).sum().backward()
    twin = way(way(model))
    assert repr(twin) == repr(way(plain))
    assert differences(list(twin.state_dict().items()), list(model.state_dict().items())) == []
    for each in (twin, model, twin):
        for by in ("__call__", "forward"):
            check_averages(each, lambda one, by=by: getattr(one, by)(inputs(rank)).sum(), plain=plain)  # type: ignore[misc]
    assert twin.bucket_plan() == model.bucket_plan()


@pytest.mark.parametrize("way", [copy.deepcopy, saved])
@on_ranks(2)
def test_a_copy_has_the_hook_and_the_options(rank: int, way: Any) -> None:
    model = fastddp.replicate(net(), hook="bf16", gradient_average="sum")
    twin = way(model)
    for each in (model, twin):
        each.score(inputs(rank)).backward()
    assert differences(gradients(model), gradients(twin)) == []
    with pytest.raises(RuntimeError, match="FD034"):
        twin.register_comm_hook(None, fastddp.comm_hooks.fp16_compress_hook)


@on_ranks(2)
def test_a_frozen_copy_evaluates(rank: int) -> None:
    reference = copy.deepcopy(fastddp.replicate(net())).requires_grad_(False)
    assert torch.equal(reference.score(inputs(rank)), net().score(inputs(rank)))


@on_ranks(2)
def test_an_average_of_weights_has_no_engine(rank: int) -> None:
    model = fastddp.replicate(net())
    before = len(wrappers)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    ema.update_parameters(model)
    for _ in range(1 - rank):  # rank 0 alone
        with torch.no_grad():
            assert torch.equal(ema(inputs(0)), ema.module.of_left(inputs(0)) + ema.module.of_right(inputs(0)))
    assert len(wrappers) == before


@on_ranks(3)
def test_a_copy_over_a_given_group(rank: int) -> None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return
    model = fastddp.replicate(nn.Linear(1, 1, bias=False), process_group=pair)
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        pickle.dumps(model)
    for each in (copy.deepcopy(model), model):
        each(torch.full((1, 1), float(rank))).sum().backward()
        assert each.weight.grad.item() == 1.0


@pytest.mark.tier("slow")
@on_ranks(1)
def test_a_file_loads_where_there_is_no_process_group(rank: int) -> None:
    file = pickle.dumps(fastddp.replicate(net()))
    dist.destroy_process_group()
    loaded = pickle.loads(file)
    with torch.no_grad():
        assert torch.equal(loaded(inputs(rank)), net()(inputs(rank)))
    with pytest.raises((RuntimeError, ValueError), match="group"):
        loaded(inputs(rank))


@on_ranks(2)
def test_a_shallow_copy_is_plain(rank: int) -> None:
    model = fastddp.replicate(net())
    shallow = copy.copy(model)
    assert type(shallow) is Net
    check_averages(shallow, lambda one: one(inputs(rank)))  # over parameters of the replicated module
