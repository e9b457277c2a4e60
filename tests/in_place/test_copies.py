"""Copies of a replicated module, by copy, pickle and torch.save."""

from __future__ import annotations

import copy
import io
import pickle
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


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def thrice(module: Any) -> Any:
    return pickled(copy.deepcopy(pickled(module)))


def made_again(state: dict[str, Tensor]) -> Any:
    made = OwnReduce()
    made.load_state_dict(state)
    return made


class OwnReduce(Net):
    def __reduce__(self) -> Any:
        return made_again, (self.state_dict(),)


class OwnState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lines = (line for line in ())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lines"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "lines": ()})


def graph() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved, thrice])
@pytest.mark.parametrize("make", [Net, OwnReduce, OwnState, graph])
@on_ranks(2)
def test_a_copy_trains_as_the_original(rank: int, make: Any, way: Any, is_used: bool) -> None:
    plain, model = make(), fastddp.replicate(make(), gradient_as_bucket_view=True, bucket_cap_mb=0)
    plain.load_state_dict(model.state_dict())
    if is_used:
        model(inputs(rank)).sum().backward()
    twin = way(model)
    assert repr(twin) == repr(way(plain))
    assert differences(list(twin.state_dict().items()), list(model.state_dict().items())) == []
    for each in (twin, model, twin):
        for by in ("__call__", "forward"):
            check_averages(each, lambda one, by=by: getattr(one, by)(inputs(rank)).sum(), plain=plain)
    assert twin.bucket_plan() == model.bucket_plan()


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
@on_ranks(2)
def test_a_copy_has_the_hook_and_the_options(rank: int, way: Any) -> None:
    model = fastddp.replicate(net(), hook="bf16", gradient_average="sum")
    twin = way(model)
    for each in (model, twin):
        each.score(inputs(rank)).backward()
    assert differences(gradients(model), gradients(twin)) == []
    with pytest.raises(RuntimeError, match="FD034"):
        twin.register_comm_hook(None, fastddp.comm_hooks.fp16_compress_hook)


@pytest.mark.xfail(reason="an engine is made for parameters that need no gradients")
@on_ranks(2)
def test_a_frozen_copy_evaluates(rank: int) -> None:
    reference = copy.deepcopy(fastddp.replicate(net())).requires_grad_(False)
    assert torch.equal(reference.score(inputs(rank)), net().score(inputs(rank)))


@on_ranks(2)
def test_an_average_of_weights_has_no_engine(rank: int) -> None:
    model = fastddp.replicate(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(wrappers)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for number in range(2):
        model.score(inputs(rank, number)).backward()
        optimizer.step()
        model.zero_grad()
        ema.update_parameters(model)
        if rank == 0:  # alone
            with torch.no_grad():
                assert torch.equal(ema(inputs(0)), ema.module.of_left(inputs(0)) + ema.module.of_right(inputs(0)))
    assert len(wrappers) == before
    assert are_same(list(ema.state_dict().values()))


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
    assert not any("fastddp" in name for name in vars(shallow))
    check_averages(shallow, lambda one: one(inputs(rank)))  # over parameters of the replicated module
