"""Parameter groups that come after the optimizer was made."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastddp
from on_ranks import on_ranks
from parts import local_input, wrapped


@on_ranks(2)
def test_groups_may_come_until_the_first_step(rank: int) -> None:
    found = []
    for sharded in (True, False):
        model = wrapped()
        a, b, c = model.parameters()
        optimizer = (
            fastddp.ShardedOptimizer(model, torch.optim.SGD, [a], lr=0.5, momentum=0.5)
            if sharded
            else torch.optim.SGD([a], lr=0.5, momentum=0.5)
        )
        optimizer.add_param_group({"params": [b], "lr": 0.25})
        model(local_input(rank)).backward()
        if sharded:
            with pytest.raises(
                ValueError, match=r"leaves out c, and (.|\n)*by add_param_group(.|\n)*optimizer_class(.|\n)*FD042"
            ):
                optimizer.step()
            assert all(torch.equal(parameter, torch.ones(3)) for parameter in (a, b, c))
        optimizer.add_param_group({"params": c})
        optimizer.step()
        model.zero_grad()
        optimizer.param_groups[1]["lr"] = 0.125  # of a group that was added, after its part has been made
        model(local_input(rank)).backward()
        optimizer.step()
        found.append([parameter.tolist() for parameter in (a, b, c)])
    assert found[0] == found[1]


@on_ranks(2)
def test_a_group_that_cannot_be_trained_is_refused_and_leaves_nothing(rank: int) -> None:
    model = wrapped()
    optimizer = fastddp.ShardedOptimizer(model, torch.optim.SGD, lr=0.5)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    for parameter, text in [
        (nn.Parameter(torch.ones(3)), "is not trained by the model"),
        (model.module.a, "more than one parameter group"),
    ]:
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": [parameter]})
    assert optimizer.state_dict()["param_groups"] == before
