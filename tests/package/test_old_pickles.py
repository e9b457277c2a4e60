"""Pickles that were made when fastddp had no folders still find the classes that they name."""

from __future__ import annotations

import importlib
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import fastddp
from fastddp import comm_hooks
from fastddp._old_pickles import PLACES
from ranks import RankPool

OLD = [(place, cls.__name__) for place, classes in PLACES.items() for cls in classes]
# The modules in which a class of a pickle may be, beside the old places: those of public names, and what is compiled.
STAY = {"fastddp._C", "fastddp.bucket_plan", "fastddp.comm_hooks", "fastddp.config", "fastddp.ddp"}


def test_classes_alone_are_found_where_they_were() -> None:
    for place, name in OLD:
        found = pickle.loads(f"c{place}\n{name}\n.".encode())
        assert found.__module__ != place
        assert found.__name__ == name
    assert not hasattr(importlib.import_module("fastddp.parameters"), "collect_parameters")


def named(pickled: bytes) -> Iterator[str]:
    """``module name`` of every class and function that a pickle of protocol 2 names."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            yield str(argument)


def module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def pickles(rank: int) -> list[bytes]:
    powered = fastddp.DistributedDataParallel(module())
    powered.register_comm_hook(comm_hooks.PowerSGDState(None), comm_hooks.powerSGD_hook)
    delayed = module()
    waiting: dict[str, Any] = {
        "delay_all_reduce_named_params": [("0.weight", delayed[0].weight)],
        "param_to_hook_all_reduce": delayed[0].bias,
    }
    models = [
        powered,
        fastddp.DistributedDataParallel(module(), bucket_plan=powered.bucket_plan()),
        fastddp.DistributedDataParallel(module(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)),
        fastddp.DistributedDataParallel(delayed, **waiting),
    ]
    return [pickle.dumps(model, protocol=2) for model in models]


def as_then(pickled: bytes) -> bytes:
    """The same pickle, had it been made when there were no folders."""
    for place, classes in PLACES.items():
        for cls in classes:
            pickled = pickled.replace(
                f"c{cls.__module__}\n{cls.__name__}\n".encode(), f"c{place}\n{cls.__name__}\n".encode()
            )
    return pickled


def gradients_of_loaded(rank: int, pickled: list[bytes]) -> list[float]:
    found = []
    for each in pickled:
        model = pickle.loads(each)
        model(torch.ones(2, 3)).sum().backward()
        found.append(model.module[1].bias.grad.sum().item())
    return found


def test_wrappers_of_then_are_loaded_and_train(ranks: RankPool) -> None:
    made = [as_then(pickled) for pickled in ranks.run(pickles, 1)[0]]
    names = {name for pickled in made for name in named(pickled) if name.startswith("fastddp.")}
    assert {name.split()[0] for name in names} <= {*PLACES, *STAY}
    assert ranks.run(gradients_of_loaded, 1, made) == [[6.0] * len(made)]
