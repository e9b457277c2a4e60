"""Parameters that came to the module after it was wrapped: an error names them before they train on one rank alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fastddp
from ranks import RankPool


def module() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    layers[0].requires_grad_(False)
    return layers


def assign_state(layers: nn.Sequential) -> None:
    layers.load_state_dict({name: value.clone() for name, value in layers.state_dict().items()}, assign=True)


def replace_a_layer(layers: nn.Sequential) -> None:
    layers[2] = nn.Linear(3, 3)


def add_a_parameter(layers: nn.Sequential) -> None:
    layers[1].extra = nn.Parameter(torch.ones(3))


def add_a_prompt(layers: nn.Sequential) -> None:
    layers.prompt = nn.Parameter(torch.ones(3))  # where there was no parameter


def add_an_adapter(layers: nn.Sequential) -> None:
    layers[1].adapter = nn.Linear(3, 3)  # where there was no module


def replace_a_parameter(layers: nn.Sequential) -> None:
    layers[1].weight = nn.Parameter(layers[1].weight.detach().clone())


def unfreeze(layers: nn.Sequential) -> None:
    layers[0].requires_grad_(True)


def cast(layers: nn.Sequential) -> None:
    layers.double()


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


def parametrized(layers: nn.Sequential) -> None:
    parametrize.register_parametrization(layers[2], "weight", Doubled())


CHANGES = {
    assign_state: "1.weight, 1.bias, 2.weight, 2.bias is not",
    replace_a_layer: "2.weight, 2.bias is not",
    add_a_parameter: "1.extra is not",
    add_a_prompt: "prompt is not",
    add_an_adapter: "1.adapter.weight, 1.adapter.bias is not",
    replace_a_parameter: "1.weight is not",
    unfreeze: "0.weight, 0.bias is not",
    cast: "1.weight, 1.bias, 2.weight, 2.bias has lost",
    parametrized: "2.weight has lost",
}


def forward_after(rank: int, change: Callable[[nn.Sequential], None], find_unused: bool) -> str:
    model = fastddp.DistributedDataParallel(module(), find_unused_parameters=find_unused)
    model(torch.ones(1, 3)).sum().backward()
    change(model.module)
    inputs = torch.ones(1, 3, dtype=model.module[0].weight.dtype)
    with torch.no_grad():
        model(inputs)  # trains nothing
    with pytest.raises(RuntimeError) as caught:
        model(inputs)
    return str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("find_unused", [False, True])
def test_what_would_train_on_one_rank_alone_is_named_at_the_next_forward(
    ranks: RankPool, change: Callable[[nn.Sequential], None], find_unused: bool
) -> None:
    for message in ranks.run(forward_after, 2, change, find_unused):
        assert f"it changed: {CHANGES[change]}" in message
        assert "Wrap the module again" in message


def unfrozen_later(rank: int) -> str:
    model = fastddp.DistributedDataParallel(module())
    model.module.prompt = nn.Parameter(torch.ones(3), requires_grad=False)
    model(torch.ones(1, 3)).sum().backward()
    model.module.prompt.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


def test_a_frozen_parameter_may_be_added_and_is_named_when_it_is_unfrozen(ranks: RankPool) -> None:
    for message in ranks.run(unfrozen_later, 2):
        assert "it changed: prompt is not" in message


def harmless_changes(rank: int) -> list[float]:
    model = fastddp.DistributedDataParallel(module(), find_unused_parameters=True)
    layers = model.module
    seen = []

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        seen.append(float(sum(p.grad.sum() for p in layers.parameters() if p.grad is not None)))

    step()
    layers.load_state_dict(copy.deepcopy(layers.state_dict()))
    step()
    layers[1].weight.requires_grad_(False)
    layers[1].weight.requires_grad_(True)
    step()
    layers[1] = layers[2]
    step()
    layers[0] = nn.Identity()
    step()
    return seen


def test_changes_that_leave_the_trained_parameters_are_no_error(ranks: RankPool) -> None:
    first, second = ranks.run(harmless_changes, 2)
    assert first == second
    assert first[0] == first[1] == first[2]
