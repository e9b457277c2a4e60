"""What users put around the wrapper, into the module or between the two: everything is as under torch's DDP.

A scenario trains a little and returns tensors. It runs under both classes, on two ranks whose batches differ; all that
it returns has to be bitwise equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fastddp
from ranks import RankPool

WIDTH = 6
Wrap = Callable[[nn.Module], Any]
Scenario = Callable[[Wrap, int], list[Tensor]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class Block(nn.Module):
    """A layer whose backward needs what its forward saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


def linears(module: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def blocks(number: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)))


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def steps(model: nn.Module, rank: int, number: int = 3) -> list[Tensor]:
    """Trains, and returns the last gradients and all values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(number):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
    return gradients(model) + values(model)


def values(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


# ------------------------------------------------------------------------------------------- activation checkpointing


class Checkpointed(nn.Module):
    """Blocks, run with ``how`` around each of them or around several."""

    def __init__(self, how: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = blocks()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        # A reentrant checkpoint drops the gradients of a segment whose inputs need none.
        return self.how(self.blocks, x.requires_grad_())


def each(layers: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def segments(layers: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint_sequential(layers, 2, x, use_reentrant=reentrant)


def nested(layers: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    x = checkpoint(lambda x: each(layers[:2], x, reentrant), x, use_reentrant=reentrant)
    return checkpoint(lambda x: each(layers[2:], x, reentrant), x, use_reentrant=reentrant)


def some(layers: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    """The first parameters to get a gradient and the last ones do so outside of a checkpoint."""
    return layers[3](each(layers[1:3], layers[0](x), reentrant))


def around_the_wrapper(wrap: Wrap, rank: int, reentrant: bool) -> list[Tensor]:
    model = wrap(blocks())
    for step in range(3):
        model.zero_grad()
        checkpoint(model, batch(rank, step).requires_grad_(), use_reentrant=reentrant).square().sum().backward()
    return gradients(model)


def checkpointed(wrap: Wrap, rank: int, how: Callable[[nn.Sequential, Tensor], Tensor]) -> list[Tensor]:
    return steps(wrap(Checkpointed(how)), rank)


for reentrant in (True, False):
    kind = "reentrant" if reentrant else "not reentrant"
    for way in (each, segments, nested, some):
        SCENARIOS[f"{way.__name__}, {kind}"] = partial(checkpointed, how=partial(way, reentrant=reentrant))
    SCENARIOS[f"around the wrapper, {kind}"] = partial(around_the_wrapper, reentrant=reentrant)


# ----------------------------------------------------------------------------------------------------------- hooks


@scenario
def forward_hooks(wrap: Wrap, rank: int) -> list[Tensor]:
    """On the wrapper and on the module, with and without keyword arguments; each changes what it is given."""
    model = wrap(Scaled())
    for module in (model, model.module):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"scale": kwargs["scale"] + 1}), with_kwargs=True
        )
        module.register_forward_hook(lambda _, args, output: output + args[0])
        module.register_forward_hook(lambda _, args, kwargs, output: output * kwargs["scale"], with_kwargs=True)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step), scale=2.0).square().sum().backward()
    return gradients(model)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(2)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.blocks(x) * scale


@scenario
def backward_hooks(wrap: Wrap, rank: int) -> list[Tensor]:
    """Full ones, on the wrapper, the module and a layer; each scales the gradient that it is given."""
    model = wrap(blocks())
    seen: list[Tensor] = []

    def scale(module: nn.Module, grad_input: tuple[Tensor, ...], grad_output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.extend(grad_output)
        return tuple(gradient * 0.5 for gradient in grad_input)

    def scale_before(module: nn.Module, grad_output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(gradient * 3 for gradient in grad_output)

    for module in (model, model.module, model.module[1], model.module[2].linear):
        module.register_full_backward_hook(scale)
        module.register_full_backward_pre_hook(scale_before)
    for step in range(2):
        model.zero_grad()
        model(batch(rank, step).requires_grad_()).square().sum().backward()
    return gradients(model) + seen


@scenario
def parameter_hooks(wrap: Wrap, rank: int) -> list[Tensor]:
    """Before a gradient is accumulated; it is scaled by another factor on each rank."""
    model = wrap(blocks())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (rank + 2))
    return steps(model, rank)


@scenario
def saved_tensors(wrap: Wrap, rank: int) -> list[Tensor]:
    """What backward needs is kept as another tensor."""
    model = wrap(blocks())
    seen = []
    for step in range(2):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double() * 2, lambda x: (x / 2).float()):
            loss = model(batch(rank, step)).square().sum()
        loss.backward()
        seen += gradients(model)
        with torch.autograd.graph.save_on_cpu():
            loss = model(batch(rank, step)).square().sum()
        loss.backward()
        seen += gradients(model)
    return seen


# ------------------------------------------------------------------------------- what modules can be made of


def parametrized(by: Callable[[nn.Module], object], wrap: Wrap, rank: int) -> list[Tensor]:
    module = blocks()
    for linear in linears(module):
        by(linear)
    return steps(wrap(module), rank)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


@scenario
def one_of_the_users_own(wrap: Wrap, rank: int) -> list[Tensor]:
    """Cached: the parameter is computed once for all uses."""
    module = blocks()
    for linear in linears(module):
        parametrize.register_parametrization(linear, "weight", Symmetric())
    with parametrize.cached():
        model = wrap(module)
        model(batch(rank)).square().sum().backward()
    return gradients(model) + steps(model, rank)


@scenario
def traced(wrap: Wrap, rank: int) -> list[Tensor]:
    """By TorchScript."""
    return steps(wrap(torch.jit.trace(blocks(), torch.zeros(5, WIDTH))), rank)


SCENARIOS |= {
    name: partial(parametrized, by)
    for name, by in {
        "weight_norm": parametrizations.weight_norm,
        # As torch had it before parametrizations: the weight is an attribute that a hook sets.
        "weight_norm_of_old": nn.utils.weight_norm,
        "orthogonal": parametrizations.orthogonal,
        "spectral_norm": parametrizations.spectral_norm,  # forward changes buffers of it
    }.items()
}


# ------------------------------------------------------------------------------------------------ ways to train


@scenario
def autocast(wrap: Wrap, rank: int) -> list[Tensor]:
    """bf16 on the CPU, around forward, with a scaler that grows and shrinks."""
    model = wrap(blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(rank, step)).square().sum()
        if step == 3:
            loss = loss * (torch.inf if rank == 0 else 1)  # the step is skipped on both ranks
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[3] < scales[2]
    return [*gradients(model), *values(model), torch.tensor(scales)]


@scenario
def gradient_penalty(wrap: Wrap, rank: int) -> list[Tensor]:
    """Backward through a gradient with respect to the inputs."""
    model = wrap(blocks())
    seen = []
    for step in range(3):
        model.zero_grad()
        x = batch(rank, step).requires_grad_()
        output = model(x).square().sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        (output + gradient.square().sum()).backward()
        seen += gradients(model)
    return seen


@scenario
def autograd_grad(wrap: Wrap, rank: int) -> list[Tensor]:
    """It returns this rank's own gradients, and the next backward is synchronised."""
    model = wrap(blocks())
    own = torch.autograd.grad(model(batch(rank)).square().sum(), list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    alone = torch.autograd.grad(model.module(batch(rank)).square().sum(), list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(own, alone, strict=True))
    return [*own, *steps(model, rank)]


@scenario
def copied_after_training(wrap: Wrap, rank: int) -> list[Tensor]:
    """The copy and the original go on, each for itself."""
    model = wrap(blocks())
    before = steps(model, rank)
    twin = copy.deepcopy(model)
    return before + steps(twin, rank, 2) + steps(model, rank, 1) + steps(twin, rank, 1)


@scenario
def called_with_its_own_parameters(wrap: Wrap, rank: int) -> list[Tensor]:
    """functional_call of the wrapper with its own parameters."""
    model = wrap(blocks())
    seen = []
    for step in range(3):
        model.zero_grad()
        given = dict(model.named_parameters())
        functional_call(model, given, (batch(rank, step),)).square().sum().backward()
        seen += gradients(model)
    return seen


# ----------------------------------------------------------------------------------------------------- they agree


def run(rank: int, name: str, ours: bool) -> list[Tensor]:
    torch.manual_seed(5)
    # A bucket for each parameter, so that exchanges begin while other gradients are on their way.
    wrapper = fastddp.DistributedDataParallel if ours else TorchDDP
    return SCENARIOS[name](lambda module: wrapper(module, bucket_cap_mb=0), rank)


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("name", SCENARIOS)
def test_results_are_bitwise_those_of_torchs_ddp(ranks: RankPool, name: str) -> None:
    expected, actual = (ranks.run(run, 2, name, ours) for ours in (False, True))
    for theirs, ours in zip(expected, actual, strict=True):
        assert len(theirs) == len(ours) > 0
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
            assert torch.equal(one.isnan(), other.isnan())


# ----------------------------------------------------------------------------------- without the wrapper's knowledge


def state_around(rank: int, what: Callable[[Any, Tensor], list[Tensor]]) -> str:
    """The window's state behind ``what``, whose gradients are right, as those of the steps after it are."""
    torch.manual_seed(5)
    module = blocks()
    expected = steps(TorchDDP(copy.deepcopy(module)), rank)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0)
    for one, other in zip(what(model, batch(rank)), own_gradients(model, batch(rank)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    state: str = model.reducer.state
    assert all(map(torch.equal, steps(model, rank), expected))
    return state


def loss(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, values, (x,)).square().sum()


def detached(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def own_gradients(model: Any, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model.module(x).square().sum(), list(model.parameters())))


def gradient_of_each_sample(model: Any, x: Tensor) -> list[Tensor]:
    each = vmap(grad(partial(loss, model.module)), in_dims=(None, 0))(detached(model.module), x[:, None])
    return [gradient.sum(0) for gradient in each.values()]


def other_values(model: Any, x: Tensor) -> list[Tensor]:
    """Gradients of values that are put in place of the parameters are the user's own, as under torch's DDP."""
    leaves = {name: value.clone().requires_grad_() for name, value in detached(model).items()}
    loss(model, leaves, x).backward()
    return [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def the_wrapper_under_a_transform(model: Any, x: Tensor) -> list[Tensor]:
    return list(grad(partial(loss, model))(detached(model), x).values())


@pytest.mark.parametrize(
    ("what", "state"),
    [
        (gradient_of_each_sample, "idle"),
        (other_values, "armed"),  # a forward of the wrapper ran
        (the_wrapper_under_a_transform, "armed"),
    ],
)
def test_gradients_that_no_parameter_gets_leave_the_wrapper_alone(ranks: RankPool, what: Any, state: str) -> None:
    assert ranks.run(state_around, 2, what) == [state] * 2
