"""What users write to the state and the groups of a sharded optimizer counts, as it does in one that is not sharded."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import fastddp
from on_ranks import on_ranks

Act = Callable[[Any, list[nn.Parameter]], object]


class Net(nn.Module):
    """Of a few parameters a rank has nothing; one is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def trained(act: Act, before: int, *, kind: Any = AdamW, sharded: bool, **how: Any) -> list[Tensor]:
    """Parameters after 4 steps; ``act`` comes before step ``before``, and gets what an earlier one has returned."""
    module: Any = Net()
    parameters = [*module.parameters()]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.0001) if sharded else module
    make = (lambda: fastddp.ShardedOptimizer(model, kind, groups, lr=0.1, **how)) if sharded else None
    optimizer = make() if make else kind(groups, lr=0.1)
    for number in range(4):
        if number >= before:
            act(optimizer, parameters) if number == before else None
        optimizer.zero_grad()
        (model(torch.full((2, 5), number + 1.0)) - 5 * number).square().mean().backward()
        optimizer.step()
    if sharded:
        model.parameters_ready()
    return [parameter.detach().clone() for parameter in parameters]


def each(write: Callable[[Any, nn.Parameter], object]) -> Act:
    """For all parameters."""
    return lambda optimizer, parameters: [write(optimizer, parameter) for parameter in parameters]


def of(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    found: Tensor = optimizer.state[parameter]["exp_avg"]
    return found


def fresh(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {"step": torch.tensor(3.0), **{key: torch.ones_like(parameter.data) for key in ("exp_avg", "exp_avg_sq")}}


def twice(optimizer: Any, parameter: nn.Parameter) -> None:
    state = optimizer.state[parameter]
    state["exp_avg"] = torch.full(parameter.shape, 2.0)
    state["exp_avg"] *= 2
    of(optimizer, parameter).add_(1)


def ranked(parameter: nn.Parameter) -> Tensor:
    return torch.arange(parameter.numel()).view(parameter.shape) / 100


def drop(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"] = parameters[:1]
    optimizer.param_groups[1]["params"].pop()


def exchange(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = parameters[2:], parameters[:2]


def split(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups[:] = [{**first, "params": [one], "lr": 0.3} for one in first["params"]] + [second]


ACTS: dict[str, Act] = {
    "del": each(lambda optimizer, one: optimizer.state.__delitem__(one)),
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "clear each": lambda optimizer, _: [state.clear() for state in optimizer.state.values()],
    "pop": each(lambda optimizer, one: optimizer.state.pop(one)),
    "popitem": each(lambda optimizer, one: optimizer.state.popitem()),
    "assign": lambda optimizer, _: setattr(optimizer, "state", collections.defaultdict(dict)),
    "assign one": each(lambda optimizer, one: optimizer.state.__setitem__(one, fresh(one))),
    "update": lambda optimizer, parameters: optimizer.state.update({one: fresh(one) for one in parameters}),
    "update one": each(lambda optimizer, one: optimizer.state[one].update(fresh(one))),
    "or": lambda optimizer, parameters: optimizer.state.__ior__({one: fresh(one) for one in parameters}),
    "setdefault": each(lambda o, one: (o.state.pop(one), o.state.setdefault(one, fresh(one)))),
    "a tensor": each(lambda optimizer, one: optimizer.state[one].__setitem__("exp_avg", torch.zeros_like(one.data))),
    "a tensor of ranks": each(lambda optimizer, one: optimizer.state[one].__setitem__("exp_avg", ranked(one))),
    "like": each(lambda o, one: o.state[one].__setitem__("exp_avg", torch.zeros_like(of(o, one)))),
    "a step": each(lambda optimizer, one: optimizer.state[one].__setitem__("step", torch.tensor(0.0))),
    "zero_": each(lambda optimizer, one: of(optimizer, one).zero_()),
    "all zero_": lambda o, _: [value.zero_() for state in o.state.values() for value in state.values()],
    "data": each(lambda optimizer, one: of(optimizer, one).data.mul_(0.1)),
    "a whole operand": each(lambda optimizer, one: of(optimizer, one).mul_(ranked(one))),
    "lerp_ to another": each(lambda o, one: of(o, one).lerp_(o.state[one]["exp_avg_sq"], 0.5)),
    "rows": each(lambda optimizer, one: of(optimizer, one).__setitem__(slice(1, 2), 0.0)),
    "columns": each(lambda optimizer, one: of(optimizer, one).__setitem__((..., [0, 2]), 3.0)),
    "a mask": each(lambda optimizer, one: of(optimizer, one).masked_fill_(ranked(one) > 0.02, 0.0)),
    "twice": each(twice),
    "replaced groups": lambda o, _: setattr(o, "param_groups", [{**group, "lr": 1.0} for group in o.param_groups]),
    "one replaced": lambda o, _: o.param_groups.__setitem__(0, {**o.param_groups[0], "weight_decay": 0.5}),
    "shorter": drop,
    "exchanged": exchange,
    "split": split,
    "a group less": lambda optimizer, _: optimizer.param_groups.pop(),
}


@pytest.mark.tier("slow", but_one_in=3)
@pytest.mark.parametrize(("before", "how"), [(1, {}), (2, {"gather": "forward"}), (2, {"shard": "parameters"})])
@pytest.mark.parametrize("act", ACTS)
@on_ranks(2)
def test_a_write_counts(rank: int, act: str, before: int, how: dict[str, Any]) -> None:
    """Before the second step buckets are planned anew, before the third they stay."""
    expected = trained(ACTS[act], before, sharded=False)
    torch.testing.assert_close(trained(ACTS[act], before, sharded=True, **how), expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_dictionaries_that_are_kept_follow_and_count(rank: int) -> None:
    found = []
    for sharded in (False, True):
        kept: list[Any] = []

        def write(optimizer: Any, parameters: list[nn.Parameter], kept: list[Any] = kept) -> None:
            kept.extend([optimizer.state, [optimizer.state[one] for one in parameters], optimizer])
            optimizer.register_step_post_hook(again)

        def again(optimizer: Any, *_: object, kept: list[Any] = kept) -> None:
            for state in kept[1]:
                state["exp_avg"].mul_(0.5)
            assert optimizer.state is kept[0]

        found.append(trained(write, 1, sharded=sharded))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


UNFIT: dict[str, tuple[Act, str]] = {
    "another shape": (
        lambda o, all_: o.state[all_[0]].update(exp_avg=torch.ones(2)),
        r"first\.weight.*\(7, 5\)(.|\n)*FD043",
    ),
    "another's part": (lambda o, all_: o.state[all_[0]].update(exp_avg=of(o, all_[3])), r"first\.weight(.|\n)*FD043"),
    "no parameter": (lambda o, all_: o.state.update({"count": {}}), r"does not train(.|\n)*FD043"),
    "no dictionary": (lambda o, all_: o.state.update({all_[0]: 1}), r"first\.weight(.|\n)*FD043"),
    "a foreign parameter": (
        lambda o, all_: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(2))),
        r"not trained by the model(.|\n)*FD042",
    ),
}


@pytest.mark.parametrize("unfit", UNFIT)
@on_ranks(2)
def test_what_cannot_be_taken_is_an_error_on_all_ranks_until_it_is_gone(rank: int, unfit: str) -> None:
    module = Net()
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    optimizer = fastddp.ShardedOptimizer(model, AdamW, lr=0.1)
    parameters = [*module.parameters()]
    for _ in range(2):
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    before, groups = optimizer.full_state_dict(), copy.copy(optimizer.param_groups[0]["params"])
    act, text = UNFIT[unfit]
    act(optimizer, parameters)
    for use in (optimizer.step, optimizer.state_dict, optimizer.full_state_dict):
        with pytest.raises(ValueError, match=text):
            use()
    optimizer.param_groups[0]["params"] = groups
    optimizer.load_state_dict(before)
    optimizer.step()


@on_ranks(2)
def test_a_parameter_does_not_change_its_class(rank: int) -> None:
    module = Net()
    model = fastddp.DistributedDataParallel(module)
    matrices, others = ([one for one in module.parameters() if (one.ndim == 2) is way] for way in (True, False))
    groups = [{"params": matrices}, {"params": others, "optimizer_class": AdamW}]
    optimizer = fastddp.ShardedOptimizer(model, Muon, groups, lr=0.1)
    optimizer.param_groups.reverse()
    with pytest.raises(ValueError, match=r"whose groups name their classes(.|\n)*FD042"):
        optimizer.step()


@on_ranks(2)
def test_what_reads_other_ranks_elements_is_refused_on_all_ranks(rank: int) -> None:
    module = Net()
    model = fastddp.DistributedDataParallel(module)
    optimizer = fastddp.ShardedOptimizer(model, AdamW, lr=0.1)
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()
    for parameter in module.parameters():
        for use in (
            lambda one: one.cumsum_(0),
            lambda one: one.norm(),
            lambda one: one + 1,
            lambda one: one.resize_(2),
        ):
            with pytest.raises(RuntimeError, match=r"FD043"):
                use(of(optimizer, parameter))
