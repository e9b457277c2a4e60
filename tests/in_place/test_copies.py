"""Copies of a replicated module: by copy, pickle, torch.save and state_dict()."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fastddp
from by_hand import Net, average, averaged, inputs, net
from fastddp.torch_compat.surface import wrappers
from on_ranks import differences, gradients, of_ranks, on_ranks


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def twice(module: Any) -> Any:
    return copy.deepcopy(pickled(module))


WAYS: list[Callable[[Any], Any]] = [copy.deepcopy, pickled, saved, twice]


def check_trains(model: Any, plain: Any, rank: int) -> None:
    """Losses by forward and by method are averaged."""
    for by in ("score", "forward") if type(plain).score is Net.score else ("forward",):
        model.zero_grad()
        (model if by == "forward" else getattr(model, by))(inputs(rank)).backward()
        assert (
            differences(averaged(plain, lambda alone, by=by: getattr(alone, by)(inputs(rank))), gradients(model)) == []
        )


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_copy_trains_as_the_original(rank: int, way: Callable[[Any], Any], is_used: bool) -> None:
    model = fastddp.replicate(net(), gradient_as_bucket_view=True, bucket_cap_mb=0)
    if is_used:
        model(inputs(rank)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    plain = net()
    plain.load_state_dict(model.state_dict())
    twin = way(model)
    assert type(twin) is type(model)
    assert repr(twin) == repr(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert twin.trunk.weight is not model.trunk.weight
    for each in (twin, model, twin):
        check_trains(each, plain, rank)
    with twin.no_sync():
        twin.score(inputs(rank)).backward()
    assert twin.bucket_plan() == model.bucket_plan()


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
@on_ranks(2)
def test_a_copy_has_the_hook_and_the_options(rank: int, way: Callable[[Any], Any]) -> None:
    model = fastddp.replicate(net(), hook="bf16", gradient_average="sum")
    model.score(inputs(rank)).backward()
    twin = way(model)
    twin.zero_grad()
    twin.score(inputs(rank)).backward()
    assert differences(gradients(model), gradients(twin)) == []
    with pytest.raises(RuntimeError, match="FD034"):
        twin.register_comm_hook(None, fastddp.comm_hooks.fp16_compress_hook)


FROZEN = pytest.mark.xfail(strict=True, reason="an engine is made for parameters that need no gradients")


@pytest.mark.parametrize("is_no_grad", [True, pytest.param(False, marks=FROZEN)])
@pytest.mark.parametrize("by", ["score", "__call__"])
@on_ranks(2)
def test_a_frozen_copy_evaluates(rank: int, by: str, is_no_grad: bool) -> None:
    """As the reference of DPO."""
    policy = fastddp.replicate(net())
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.set_grad_enabled(not is_no_grad):
        aim = getattr(reference, by)(inputs(rank)).detach()
    (policy.score(inputs(rank)) * aim).backward()
    expected = averaged(net(), lambda alone: alone.score(inputs(rank)) * getattr(net(), by)(inputs(rank)).detach())
    assert differences(expected, gradients(policy)) == []


@on_ranks(2)
def test_an_average_of_weights_has_no_engine(rank: int) -> None:
    model = fastddp.replicate(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(wrappers)
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for number in range(3):
        model.score(inputs(rank, number)).backward()
        optimizer.step()
        model.zero_grad()
        ema.update_parameters(model)
        if rank == 0:  # alone
            with torch.no_grad():
                assert torch.equal(ema(inputs(0)), ema.module.forward(inputs(0)))
                ema.module.score(inputs(0))
    assert len(wrappers) == before
    here, there = of_ranks([value.tolist() for value in ema.state_dict().values()])
    assert here == there


@on_ranks(3)
def test_a_copy_over_a_given_group(rank: int) -> None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return
    model = fastddp.replicate(nn.Linear(1, 1, bias=False), process_group=pair)
    twin = copy.deepcopy(model)
    for each in (twin, model):
        each(torch.full((1, 1), float(rank))).sum().backward()
        assert each.weight.grad.item() == 1.0
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        pickle.dumps(model)
    model.zero_grad()
    model(torch.full((1, 1), float(rank))).sum().backward()
    assert model.weight.grad.item() == 1.0


@on_ranks(1)
def test_a_file_loads_where_there_is_no_process_group(rank: int) -> None:
    model = fastddp.replicate(net())
    model(inputs(rank)).backward()
    file, expected = pickle.dumps(model), model.score(inputs(rank)).item()
    dist.destroy_process_group()
    loaded = pickle.loads(file)
    with torch.no_grad():
        assert loaded.score(inputs(rank)).item() == expected
        assert loaded(inputs(rank)).item() == net()(inputs(rank)).item()
    with pytest.raises((RuntimeError, ValueError), match="group"):
        loaded(inputs(rank))


@pytest.mark.xfail(strict=True, reason="the hooks of what waits for its first call are pickled, too")
@pytest.mark.parametrize("way", [pickled, saved])
@on_ranks(2)
def test_a_copy_that_was_not_used_is_pickled(rank: int, way: Callable[[Any], Any]) -> None:
    check_trains(way(copy.deepcopy(fastddp.replicate(net()))), net(), rank)


@on_ranks(2)
def test_a_shallow_copy_is_plain(rank: int) -> None:
    model = fastddp.replicate(net())
    shallow = copy.copy(model)
    assert type(shallow) is Net
    assert shallow.trunk is model.trunk
    assert not any("fastddp" in name for name in vars(shallow))
    loss = shallow(inputs(rank))  # over parameters of the replicated module
    loss.backward()
    assert differences(averaged(net(), lambda alone: alone(inputs(rank))), gradients(model)) == []


@pytest.mark.xfail(strict=True, reason="the engine of a copy has the parameters that it was copied with")
@pytest.mark.parametrize("by", ["forward", "score"])
@on_ranks(2)
def test_a_copy_gets_other_parameters_before_it_is_used(rank: int, by: str) -> None:
    twin, plain = copy.deepcopy(fastddp.replicate(net())), net()
    twin.load_state_dict(plain.state_dict(), assign=True)
    for parameter in twin.parameters():
        parameter.requires_grad_()
    (twin if by == "forward" else twin.score)(inputs(rank)).backward()
    assert differences(averaged(plain, lambda alone: getattr(alone, by)(inputs(rank))), gradients(twin)) == []


@pytest.mark.xfail(strict=True, reason="the engine of a copy has the parameters that it was copied with")
@on_ranks(2)
def test_a_part_of_a_copy_is_frozen_before_it_is_used(rank: int) -> None:
    twin, plain = copy.deepcopy(fastddp.replicate(net())), net()
    for each in (twin, plain):
        each.trunk.requires_grad_(False)
    check_trains(twin, plain, rank)


WAITS = pytest.mark.xfail(strict=True, reason="dynamo looks into the hooks of what waits for its first call")


@WAITS
@pytest.mark.parametrize("method", ["__call__", "score"])
@on_ranks(2)
def test_a_copy_that_was_not_used_is_compiled(rank: int, method: str) -> None:
    twin = copy.deepcopy(fastddp.replicate(net()))
    run = torch.compile(twin if method == "__call__" else twin.score, backend="aot_eager")
    run(inputs(rank)).backward()
    expected = averaged(net(), lambda alone: getattr(alone, method)(inputs(rank)))
    torch.testing.assert_close(gradients(twin), expected)


@WAITS
@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_a_copy_that_was_not_used_is_exported(rank: int, strict: bool) -> None:
    twin = copy.deepcopy(fastddp.replicate(net()))
    torch.export.export(twin, (inputs(0),), strict=strict)
    check_trains(twin, net(), rank)


@on_ranks(2)
def test_a_state_dict_fits_a_plain_module_and_back(rank: int) -> None:
    model, plain = fastddp.replicate(net()), net()
    nn.init.ones_(plain.trunk.weight)
    model.load_state_dict(plain.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = Net()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert differences(list(plain.state_dict().values()), list(loaded.state_dict().values())) == []
    check_trains(model, plain, rank)


@pytest.mark.parametrize("by", ["train", "no_grad"])
@on_ranks(2)
def test_a_copy_that_was_not_used_may_be_replicated_anew(rank: int, by: str) -> None:
    twin = copy.deepcopy(fastddp.replicate(net(), gradient_average="sum"))
    if by == "no_grad":
        with torch.no_grad():
            twin(inputs(rank))
    assert fastddp.replicate(twin) is twin
    check_trains(twin, net(), rank)
    with pytest.raises(ValueError, match="already"):
        fastddp.replicate(twin)


# -------------------------------------------------------------------------------------------- classes with own methods


class OwnDeepcopy(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepcopy:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        made.is_own = True
        return made


def made_again(state: dict[str, Tensor]) -> OwnReduce:
    made = OwnReduce()
    made.load_state_dict(state)
    return made


class OwnReduce(Net):
    def __reduce__(self) -> Any:
        return made_again, (self.state_dict(),)


class OwnState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = open
        self.lines = (line for line in ())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lines"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lines = (line for line in ())


SILENT = pytest.mark.xfail(strict=True, reason="the engine has other parameters than the copy: it trains alone")
OWN = [
    *((OwnDeepcopy, way, way in (copy.deepcopy, twice)) for way in WAYS),
    *((OwnReduce, way, True) for way in WAYS),
    *((OwnState, way, False) for way in WAYS),
]


@pytest.mark.parametrize(
    ("kind", "way"), [pytest.param(kind, way, marks=SILENT if fails else ()) for kind, way, fails in OWN]
)
@on_ranks(2)
def test_classes_that_copy_themselves(rank: int, kind: type[Net], way: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = fastddp.replicate(kind())
    twin = way(model)
    assert type(twin) is type(model)
    for each in (twin, model):
        check_trains(each, net(), rank)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_graph_module(rank: int, way: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    plain = copy.deepcopy(graph)
    model = fastddp.replicate(graph)
    for each in (way(model), model):
        each(inputs(rank)).sum().backward()
        alone = copy.deepcopy(plain)
        alone(inputs(rank)).sum().backward()
        average(alone)
        assert differences(gradients(alone), gradients(each)) == []
