"""What a replicated module and its copies are, and what replicate() refuses."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from abc import ABC, ABCMeta
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastddp
from by_hand import Net, are_same, check_averages, inputs, net
from fastddp.torch_compat.refusals import REPLICATED
from fastddp.torch_compat.surface import wrappers
from on_ranks import differences, gradients, on_ranks


class Special(Net, metaclass=ABCMeta):
    __slots__ = ("kept",)

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


T = TypeVar("T")
made: list[str] = []  # names of classes, as their own code hears of them


class AbstractFirst(ABC, Net):
    pass


class GenericFirst(Generic[T], Net):
    pass


class Final(Net):
    def __init_subclass__(cls) -> None:
        raise TypeError("it is final")


class Asks(Net):
    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()
        made.append(name)


class Answers(Asks, name="Answers"):
    pass


class Registers(ABCMeta):
    def __new__(cls, name: str, bases: Any, namespace: Any) -> Any:
        if name in made:
            raise TypeError("there is one of that name")
        made.append(name)
        return super().__new__(cls, name, bases, namespace)


class Registered(Net, metaclass=Registers):
    pass


class Guarded(Net):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("it stays")
        super().__setattr__(name, value)


class Slots(ABC, Net):
    __slots__ = ("kept",)

    def __getstate__(self) -> Any:
        return {**self.__dict__, "kept": self.kept}

    def __setstate__(self, state: Any) -> None:
        self.kept = state.pop("kept")
        super().__setstate__(state)


@pytest.mark.parametrize("kind", [AbstractFirst, GenericFirst, Final, Answers, Registered, Guarded, Slots])
@on_ranks(1)
def test_a_class_of_any_kind_is_subclassed_and_hears_nothing_of_it(rank: int, kind: Any) -> None:
    known = list(made)
    model = kind()
    model.kept = 5
    assert fastddp.replicate(model) is model
    assert made == known
    assert (isinstance(model, kind), model.__class__, type(model).__name__) == (True, kind, kind.__name__)
    assert isinstance(kind(), type(model)) is False
    assert inspect.getsource(type(model)) == inspect.getsource(kind)
    check_averages(model, lambda one: one(inputs(rank)))
    twin = copy.deepcopy(model)
    assert (type(twin), twin.kept) == (kind, 5)
    assert type(fastddp.replicate(twin)) is type(model)


class Doubled:
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[misc, no-any-return]


def mixed_in(model: Any, base: type) -> None:
    class Mixed(Doubled, base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0

    model.__class__ = Mixed


CLASSES: dict[str, Any] = {
    "parametrized": lambda model: parametrize.register_parametrization(model, "weight", nn.Softplus()),
    "mixed in": lambda model: mixed_in(model, type(model)),
    "mixed in by __class__": lambda model: mixed_in(model, model.__class__),
    "by type()": lambda model: setattr(model, "__class__", type("Mixed", (Doubled, type(model)), {})),
}


@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("change", CLASSES)
@on_ranks(2)
def test_a_copy_has_the_class_that_the_module_has_got_meanwhile(rank: int, change: str, comes: str) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    if comes == "after":
        fastddp.replicate(model)
    CLASSES[change](model)
    CLASSES[change](plain)
    if comes == "before" or change == "parametrized":  # then parameters are others
        fastddp.replicate(model)
    check_averages(model, lambda one: one(inputs(rank)).sum(), plain=plain)
    twin = copy.deepcopy(model)
    assert not hasattr(twin, "no_sync")
    assert [kind.__name__ for kind in type(twin).__mro__] == [kind.__name__ for kind in type(plain).__mro__]
    assert torch.equal(twin(inputs(rank)), plain(inputs(rank)))
    if change == "parametrized":
        parametrize.remove_parametrizations(model, "weight")
        assert (model.__class__, type(copy.copy(model))) == (nn.Linear, nn.Linear)
        assert torch.equal(fastddp.replicate(model)(inputs(rank)), plain(inputs(rank)))


@on_ranks(1)
def test_a_class_is_freed(rank: int) -> None:
    def use() -> Any:
        class Own(Net):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        model = fastddp.replicate(Own())
        check_averages(model, lambda one: one(inputs(rank)))
        return weakref.ref(Own)

    kind = use()
    gc.collect()
    assert kind() is None


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


class OwnDeepcopy(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


class WithinItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(self.count)
        self.these = [self]
        self.calls = 0

    def count(self, *_: object) -> None:
        self.calls += 1


def cloned(module: Any) -> Any:
    """As libraries for meta-learning do it."""
    made = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    for name in ("_parameters", "_modules"):
        made.__dict__[name] = {key: copy.deepcopy(value) for key, value in getattr(module, name).items()}
    return made


KINDS: list[Any] = [Net, OwnReduce, OwnDeepcopy, WithinItself, graph]
COPIES = [(make, way) for make in KINDS for way in (copy.deepcopy, saved, cloned) if (make, way) != (graph, cloned)]


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize(("make", "way"), COPIES)
@on_ranks(2)
def test_a_copy_is_plain_and_each_ranks_own(rank: int, make: Any, way: Any) -> None:
    plain, model = make(), fastddp.replicate(make(), gradient_average="sum")
    plain.load_state_dict(model.state_dict())
    model.require_backward_grad_sync = False
    twin = way(model)
    assert repr(twin) == repr(way(plain))
    assert type(twin) is make or (make is graph and type(twin).__name__ == type(way(plain)).__name__)
    assert differences(list(twin.state_dict().items()), list(model.state_dict().items())) == []
    assert not hasattr(twin, "require_backward_grad_sync")
    if make is WithinItself and way is not cloned:
        assert (twin.these[0], twin.count.__self__) == (twin, twin)
    for number in range(1 + rank):  # it waits for nobody
        for each in (twin, plain):
            each.zero_grad()
            each(inputs(rank, number)).sum().backward()
        assert differences(gradients(plain), gradients(twin)) == []
    model.require_backward_grad_sync = True
    around = fastddp.replicate(nn.Sequential(way(model)))
    check_averages(around, lambda one: one(inputs(rank)).sum(), plain=plain)
    fastddp.replicate(twin)
    for number in (0, 1):
        for each in (model, twin):
            each.zero_grad()
            each(inputs(rank, number)).sum().backward()
        assert differences(gradients(model), [2 * gradient for gradient in gradients(twin)]) == []


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, saved])
@on_ranks(1)
def test_nothing_is_left_in_a_copy(rank: int, way: Any) -> None:
    model = fastddp.replicate(net())
    waiting = fastddp.replicate(net().to("meta"))
    assert vars(way(model)).keys() == vars(net()).keys()
    assert way([waiting, waiting.trunk])[0] is not None
    if way is not copy.copy:
        assert not any(part._forward_pre_hooks for part in way(waiting).modules())
    alone = way(waiting.trunk).to_empty(device="cpu")
    alone(inputs(rank)).sum().backward()
    assert waiting.__dict__[REPLICATED].wrapper is None


class Waits:
    """An attribute whose copy takes as long as the test wants."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return int, ()


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
@on_ranks(2)
def test_another_thread_may_copy_while_the_module_trains(rank: int, way: Any) -> None:
    model, attribute = fastddp.replicate(net()), Waits()
    model.attribute = attribute
    thread = threading.Thread(target=way, args=(model,))
    thread.start()
    assert attribute.has_begun.wait(60)
    del model.attribute
    check_averages(model, lambda one: one(inputs(rank)))
    attribute.may_end.set()
    thread.join()
    check_averages(model, lambda one: one(inputs(rank)))


@on_ranks(2)
def test_two_threads_first_forwards_make_one_wrapper(rank: int) -> None:
    model = fastddp.replicate(net().to("meta")).to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    replication, made = model.__dict__[REPLICATED], []
    threads = [threading.Thread(target=lambda: made.append(replication.ready())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [replication.wrapper] * 4
    check_averages(model, lambda one: one(inputs(rank)))


@on_ranks(2)
def test_a_copy_of_a_part_of_dtensors_has_dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    spread = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = fastddp.replicate(spread, device_mesh=mesh["dp"])
    x = torch.ones(1, 4)
    twin = copy.deepcopy(model)
    assert (type(twin[0].weight), type(model[0].weight)) == (DTensor, nn.Parameter)
    for each in (twin, plain):
        each(x).sum().backward()
    torch.testing.assert_close(twin(x), plain(x))
    torch.testing.assert_close(twin[0].weight.grad.full_tensor(), plain[0].weight.grad)


@on_ranks(2)
def test_an_average_of_weights_has_no_engine(rank: int) -> None:
    model = fastddp.replicate(net())
    before = len(wrappers)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    ema.update_parameters(model)
    for _ in range(1 - rank):  # rank 0 alone
        assert torch.equal(ema(inputs(0)), ema.module.of_left(inputs(0)) + ema.module.of_right(inputs(0)))
    assert len(wrappers) == before


@pytest.mark.tier("slow")
@on_ranks(1)
def test_a_file_loads_where_there_is_no_process_group(rank: int) -> None:
    file = pickle.dumps(fastddp.replicate(net()))
    assert b"fastddp" not in file
    dist.destroy_process_group()
    assert torch.equal(pickle.loads(file)(inputs(rank)), net()(inputs(rank)))


@on_ranks(2)
def test_a_shallow_copy_is_plain(rank: int) -> None:
    model = fastddp.replicate(net())
    shallow = copy.copy(model)
    assert type(shallow) is Net
    check_averages(shallow, lambda one: one(inputs(rank)))  # over parameters of the replicated module
    with pytest.raises(ValueError, match="in another model"):
        fastddp.replicate(shallow)
    assert type(shallow) is Net
