"""States of hooks that outlive their model: they know how far it came, can be saved, and go on with another one."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import fastddp
from fastddp import comm_hooks
from on_ranks import on_ranks

STATES = {
    "int8": (comm_hooks.BlockState, comm_hooks.int8_compress_hook),
    "PowerSGD": (lambda: comm_hooks.PowerSGDState(None, 1, start_powerSGD_iter=2), comm_hooks.powerSGD_hook),
    "auto": (lambda: comm_hooks.AutoState(error_budget=1), comm_hooks.auto_hook),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def iterations_of(state: Any) -> int:
    return state._blocks.iter if isinstance(state, comm_hooks.AutoState) else state.iter


@pytest.mark.parametrize("is_in_a_cycle", [False, True], ids=["deleted", "collected"])
@pytest.mark.parametrize("name", STATES)
@on_ranks(2)
def test_a_state_knows_how_far_its_model_came(rank: int, name: str, is_in_a_cycle: bool) -> None:
    make, hook = STATES[name]
    state: Any = make()
    module = nn.Linear(20, 30)

    def trained(windows: int) -> fastddp.DistributedDataParallel:
        model = fastddp.DistributedDataParallel(module)
        model.register_comm_hook(state, hook)
        for _ in range(windows):
            model.zero_grad()
            model(torch.full((1, 20), rank + 1.0)).sum().backward()
        return model

    model = trained(4)
    twin = copy.deepcopy(state)  # whose iterations are asked for while there is the model
    twin.process_group = None
    if is_in_a_cycle:
        model.itself = [model]
    del model
    gc.collect()
    assert equal(twin.state_dict(), state.state_dict())
    assert iterations_of(state) == 4
    again = trained(2)
    assert iterations_of(state) == 6
    del again
