"""Which optimizers treat each element by itself, which each parameter, and which neither."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    "numbers of 8 bits": ("parameters", small.Quantised, {}),
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


NEITHER: dict[str, tuple[Any, str]] = {
    "one distance": (small.Prodigy, "Prodigy steps parameters in another way together than apart"),
    "momentum that is in no state": (small.KeepsElsewhere, "KeepsElsewhere keeps outside of its state"),
    "gathers by itself": (small.GathersItself, "GathersItself calls collectives in its step, so it shards itself"),
    "adds up": (small.AddsUp, "AddsUp calls collectives in its step, so it shards itself"),
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


@on_ranks(2)
def test_a_line_says_what_could_not_be_tried(rank: int) -> None:
    with pytest.warns(UserWarning, match="Half could not be tried.*no kernel for Double.*whole parameters"):
        optimizer = of(Training(rank, Layers()).model, partial(small.Half))
    assert optimizer.parts.whole


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
@pytest.mark.parametrize(
    ("kind", "cap"),
    [
        (small.LAMB, 0),  # of the first bucket, which has one bias, a rank has no part
        (small.Shampoo, 0.01),
        (small.KeepsAnObject, 0.01),
        (small.AdamWClipped, 0.01),
    ],
)
@on_ranks(2)
def test_parameters_are_those_of_the_replicated_optimizer(rank: int, kind: Any, cap: float) -> None:
    replicated, sharded = both(rank, Layers, partial(kind, lr=0.01), {}, steps=5, cap=cap)
    torch.testing.assert_close(sharded, replicated)


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


# ------------------------------------------------------------------------------------------------ state of other kinds


class Wide(nn.Module):
    """A matrix whose state is quantised, whether it is cut or not, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(256, 128), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@on_ranks(2)
def test_numbers_of_8_bits_and_their_scales_stay_what_they_are(rank: int) -> None:
    found: list[Any] = []
    for is_sharded in (False, True):
        model = fastddp.DistributedDataParallel(Wide(), bucket_cap_mb=0.01)
        optimizer: Any = (
            fastddp.ShardedOptimizer(model, small.Quantised) if is_sharded else small.Quantised(model.parameters())
        )
        for step in range(4):
            model(torch.full((2, 256), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_sharded and step == 2:
                optimizer.load_state_dict(optimizer.full_state_dict())
        state = optimizer.full_state_dict()["state"] if is_sharded else optimizer.state_dict()["state"]
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        found.append([sorted(of.items()) for of in state.values()])
    assert found[3][0][0][1].dtype == torch.uint8
    assert differences(found[:2], found[2:]) == []


@on_ranks(2)
def test_what_parts_cannot_have_is_refused_by_name_on_all_ranks(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1024, 200, bias=False))
    optimizer = fastddp.ShardedOptimizer(model, small.QuantisedLate)
    assert not optimizer.parts.whole
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r'QuantisedLate has in its state scales of weight.*shard="parameters".*FD046'):
        optimizer.full_state_dict()


@pytest.mark.parametrize("nesterov", [False, True])
@on_ranks(2)
def test_muon_keeps_its_momentum_under_parameters_of_16_bits(rank: int, nesterov: bool) -> None:
    """torch's own makes the momentum orthogonal in its place, without Nesterov's; here it steps copies in fp32."""
    model = fastddp.DistributedDataParallel(nn.Linear(16, 8, bias=False, dtype=torch.bfloat16))
    copy = model.module.weight.detach().float().requires_grad_()
    settings: Any = {"lr": 0.1, "nesterov": nesterov}
    sharded, plain = fastddp.ShardedOptimizer(model, torch.optim.Muon, **settings), torch.optim.Muon([copy], **settings)
    for step in range(3):
        model(torch.eye(16, dtype=torch.bfloat16)[: step + 2]).square().sum().backward()
        copy.grad = of_weight(copy.detach().bfloat16(), step)
        for optimizer in (sharded, plain):
            optimizer.step()
            optimizer.zero_grad()
    state = sharded.full_state_dict()["state"][0]
    assert differences(plain.state[copy]["momentum_buffer"], state["momentum_buffer"]) == []
    assert differences(copy.detach().bfloat16(), model.module.weight.detach()) == []


def of_weight(weight: Tensor, step: int) -> Tensor:
    weight = weight.requires_grad_()
    (torch.eye(16, dtype=torch.bfloat16)[: step + 2] @ weight.T).square().sum().backward()
    assert weight.grad is not None
    return weight.grad.float()


@on_ranks(2)
def test_what_the_model_ignores_is_left_out_with_a_word(rank: int) -> None:
    module = Wide()
    fastddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["last.weight"])
    model, before = fastddp.DistributedDataParallel(module), module.last.weight.detach().clone()
    with pytest.warns(UserWarning, match="does not step last.weight, which the model ignores.*FD042"):
        optimizer = fastddp.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    local = torch.optim.AdamW([module.last.weight], lr=0.1)
    model(torch.ones(2, 256)).square().mean().backward()
    optimizer.step()
    assert torch.equal(module.last.weight, before)
    local.step()
    assert not torch.equal(module.last.weight, before)


@on_ranks(2)
def test_a_compiled_step_is_the_same_step(rank: int) -> None:
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        training = Training(rank, Layers())
        optimizer: Any = of(training.model, partial(torch.optim.AdamW, lr=0.01))
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(3):
            training.backward()
            step()
            optimizer.zero_grad()
        found.append(training.parameters())
    assert differences(*found) == []
