"""Which optimizers treat each element by itself, which each parameter, and which neither."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fastddp
import optimizers as small
from fastddp.sharding.probe import find_way
from on_ranks import differences, on_ranks
from test_sharded import Layers, Training, both, of


def way(kind: Any, *shapes: tuple[int, ...], groups: Any = None, **settings: Any) -> str:
    held = [nn.Parameter(torch.empty(shape)) for shape in shapes or ((700, 300), (300,))]
    return find_way(partial(kind, **settings), {}, groups or [{"params": held, **settings}]).shard


WAYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "torch's AdamW": ("elements", torch.optim.AdamW, {}),
    "torch's Adam, which cannot run here": ("elements", torch.optim.Adam, {"capturable": True}),
    "torch's Muon": ("parameters", torch.optim.Muon, {}),
    "torch's Adafactor": ("parameters", torch.optim.Adafactor, {}),
    "Lion": ("elements", small.Lion, {}),
    "schedule-free": ("elements", small.ScheduleFree, {}),
    "LARS": ("parameters", small.LARS, {}),
    "LAMB": ("parameters", small.LAMB, {}),
    "factors of large matrices": ("parameters", small.FactoredFrom128, {}),
    "Shampoo": ("parameters", small.Shampoo, {}),
    "a class derived from AdamW, at a small rate": ("parameters", small.AdamWClipped, {"lr": 1e-7}),
    "an object": ("parameters", small.KeepsAnObject, {}),
    "a tensor of another shape": ("parameters", small.KeepsTwo, {}),
    "noise": ("unknown", small.Noise, {}),
    "no fp64": ("unknown", small.Half, {}),
    "no steps yet": ("unknown", small.Lion, {"lr": 0.0}),
}


@pytest.mark.parametrize("kind", WAYS)
def test_what_an_optimizer_treats_by_itself_is_known_or_tried(kind: str) -> None:
    expected, make, settings = WAYS[kind]
    shapes = [(700, 300)] if "Muon" in kind else []
    assert way(make, *shapes, **settings) == expected


@pytest.mark.parametrize("group", [0, 1])
def test_settings_of_each_group_count(group: int) -> None:
    held = [{"params": [nn.Parameter(torch.empty(9, 9))], "lr": 0.1} for _ in range(2)]
    held[group]["lr"] = 0.0
    assert way(small.Lion, groups=held) == "unknown"
    assert find_way(small.Lion, {group: partial(torch.optim.SGD, lr=0.1)}, held).shard == "elements"
    assert find_way(small.Lion, {group: small.LARS}, held[::-1] if group else held).shard in ("unknown", "parameters")


def test_a_class_that_asks_for_settings_of_groups_is_tried_with_them() -> None:
    matrix, other = ({"params": [nn.Parameter(torch.empty(9, 9))], "lr": 0.1, "matrices": is_} for is_ in (True, False))
    assert [way(small.ByGroup, groups=groups) for groups in ([other], [other, matrix])] == ["elements", "parameters"]


NEITHER: dict[str, tuple[Any, str]] = {
    "one distance": (small.Prodigy, "Prodigy steps parameters in another way together than apart"),
    "momentum that is in no state": (small.KeepsElsewhere, "KeepsElsewhere keeps outside of its state"),
    "torch's LBFGS": (torch.optim.LBFGS, "LBFGS takes a closure"),
}


@pytest.mark.parametrize("shard", [None, "parameters"])
@pytest.mark.parametrize("kind", NEITHER)
@on_ranks(2)
def test_what_takes_all_parameters_at_once_is_refused(rank: int, kind: str, shard: Any) -> None:
    make, text = NEITHER[kind]
    with pytest.raises(ValueError, match=rf"{text}(.|\n)*without ShardedOptimizer(.|\n)*FD046"):
        fastddp.ShardedOptimizer(fastddp.DistributedDataParallel(Layers()), make, shard=shard)


@on_ranks(2)
def test_elements_are_refused_where_a_part_is_stepped_otherwise(rank: int) -> None:
    training = Training(rank, Layers())
    with pytest.raises(ValueError, match=r'LARS steps a parameter in two parts(.|\n)*shard="parameters"(.|\n)*FD046'):
        of(training.model, partial(small.LARS), shard="elements")
    optimizer = of(training.model, partial(small.Half), shard="elements")  # it cannot be tried, and a user may know
    assert not optimizer.parts.whole
    with pytest.raises(ValueError, match=r"LARS steps a parameter in two parts(.|\n)*FD046"):
        optimizer.add_param_group({"params": [], "optimizer_class": small.LARS})
    optimizer = of(training.model, partial(small.Lion))
    with pytest.raises(ValueError, match=r"Half could not be tried(.|\n)*FD046"):
        optimizer.add_param_group({"params": [], "optimizer_class": small.Half})


@on_ranks(2)
def test_a_line_says_what_could_not_be_tried(rank: int) -> None:
    with pytest.warns(UserWarning, match="Half could not be tried.*no kernel for Double.*whole parameters") as said:
        optimizer = of(Training(rank, Layers()).model, partial(small.Half))
    assert optimizer.parts.whole
    assert said[0].filename == __file__.replace("test_optimizers", "test_sharded")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of(Training(rank, Layers()).model, partial(small.LARS)).parts.whole


def test_a_trial_leaves_random_numbers_as_they_are() -> None:
    torch.manual_seed(3)
    random.seed(3)
    way(small.Noise)
    found = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    assert found == (torch.rand(1), random.random())


# ------------------------------------------------------------------------------------------- as a replicated optimizer


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("kind", [small.LAMB, small.Shampoo, small.KeepsAnObject, small.AdamWClipped])
@on_ranks(2)
def test_parameters_are_those_of_the_replicated_optimizer(rank: int, kind: Any) -> None:
    replicated, sharded = both(rank, Layers, partial(kind, lr=0.01), {}, steps=5)
    torch.testing.assert_close(sharded, replicated)


@on_ranks(2)
def test_a_rank_without_parts_has_an_empty_parameter(rank: int) -> None:
    """In the first bucket, which has one bias."""
    training = Training(rank, Layers(), cap=0)
    optimizer = of(training.model, partial(small.LAMB, lr=0.01))
    training.train(optimizer)
    assert [group["count"] for group in optimizer.param_groups] == [4]
    replicated = Training(rank, Layers(), cap=0)
    replicated.train(small.LAMB(replicated.model.parameters(), lr=0.01))
    torch.testing.assert_close(training.parameters(), replicated.parameters())


@pytest.mark.parametrize("gather", ["step", "forward"])
@on_ranks(2)
def test_a_schedule_free_optimizer_trains_and_evaluates(rank: int, gather: Any) -> None:
    found = []
    for is_sharded in (False, True):
        training, make = Training(rank, Layers()), partial(small.ScheduleFree, lr=0.01)
        optimizer: Any = of(training.model, make, gather=gather) if is_sharded else make(training.model.parameters())
        for _ in range(2):
            optimizer.train()
            training.train(optimizer, steps=3)
            optimizer.eval()
            found.append(training.parameters())
    assert optimizer.param_groups[0]["count"] == 6
    assert not optimizer.parts.whole
    torch.testing.assert_close(found[:2], found[2:])


@on_ranks(2)
def test_other_methods_are_refused_by_name(rank: int) -> None:
    optimizer = of(Training(rank, Layers()).model, partial(small.ScheduleFree))
    with pytest.raises(AttributeError, match=r"does not pass on restart of ScheduleFree(.|\n)*FD047"):
        optimizer.restart()
    plain = of(Training(rank, Layers()).model, partial(torch.optim.SGD, lr=0.1))
    assert not hasattr(plain, "train")
    with pytest.raises(AttributeError, match=r"'ShardedOptimizer' object has no attribute 'restart'$"):
        plain.restart()


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize("kind", [small.Shampoo, small.KeepsAnObject, small.LAMB, small.ScheduleFree])
@on_ranks(2)
def test_lists_objects_and_tensors_of_other_shapes_are_saved_and_loaded(rank: int, kind: Any) -> None:
    found, model, whole = [], {}, {}
    for loads in (False, True):
        training = Training(rank, Layers())
        optimizer: Any = of(training.model, partial(kind, lr=0.01))
        if loads:
            training.model.module.load_state_dict(model)
            optimizer.load_state_dict(whole)
        else:
            getattr(optimizer, "train", lambda: None)()
            training.train(optimizer, steps=3)
            model, whole = training.model.module.state_dict(), optimizer.full_state_dict()
            model = {name: value.clone() for name, value in model.items()}
        training._generator.manual_seed(rank)
        training.train(optimizer, steps=2)
        found.append(training.parameters())
    assert differences(*found) == []
