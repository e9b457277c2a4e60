"""What users put around the wrapper, into the module or between the two: everything is as under torch's DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as distributed_autograd
import torch.nn.utils.parametrizations as parametrizations
from torch import Tensor, nn
from torch.distributed import rpc
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fastddp
from both import Program, gradients, same_under_both
from ranks import RankPool

WIDTH = 6
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class Block(nn.Module):
    """A layer whose backward needs what its forward saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)))


def batch(rank: int, step: int = 0) -> Tensor:
    # A reentrant checkpoint drops the gradients of a segment whose inputs need none.
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


def wrapped(wrap: Program, module: nn.Module) -> Any:
    """With a bucket for each parameter, so that exchanges begin while other gradients are on their way."""
    return wrap(module, bucket_cap_mb=0)


def steps(model: Any, rank: int, forward: Callable[..., Tensor] | None = None, **options: Any) -> list[Any]:
    """The gradients of three steps, and all values in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        (forward or model)(batch(rank, step), **options).square().sum().backward()
        found.append(gradients(model))
        optimizer.step()
    return [*found, [tensor.clone() for tensor in model.state_dict().values()]]


# ------------------------------------------------------------------------------------------- activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, how: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = blocks()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.blocks, x)


def each(layers: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def nested(layers: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    x = checkpoint(lambda x: each(layers[:2], x, reentrant), x, use_reentrant=reentrant)
    return checkpoint(lambda x: each(layers[2:], x, reentrant), x, use_reentrant=reentrant)


def some(layers: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    """The first parameters to get a gradient and the last ones do so outside of a checkpoint."""
    return layers[3](each(layers[1:3], layers[0](x), reentrant))


def checkpointed(wrap: Program, rank: int, how: Callable[..., Tensor], reentrant: bool) -> list[Any]:
    return steps(wrapped(wrap, Checkpointed(partial(how, reentrant=reentrant))), rank)


def around_the_wrapper(wrap: Program, rank: int, reentrant: bool) -> list[Any]:
    model = wrapped(wrap, blocks())
    return steps(model, rank, partial(checkpoint, model, use_reentrant=reentrant))


for kind, reentrant in {"reentrant": True, "not reentrant": False}.items():
    for how in (each, nested, some):
        PROGRAMS[f"{how.__name__}, {kind}"] = partial(checkpointed, how=how, reentrant=reentrant)
    PROGRAMS[f"around the wrapper, {kind}"] = partial(around_the_wrapper, reentrant=reentrant)


# ----------------------------------------------------------------------------------------------------------- hooks


class Scaled(nn.Sequential):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * scale


@program
def forward_hooks(wrap: Program, rank: int) -> list[Any]:
    """On the wrapper and on the module, with and without keyword arguments; each changes what it is given."""
    model = wrapped(wrap, Scaled(*blocks()))
    for module in (model, model.module):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"scale": kwargs["scale"] + 1}), with_kwargs=True
        )
        module.register_forward_hook(lambda _, args, output: output + args[0])
        module.register_forward_hook(lambda _, args, kwargs, output: output * kwargs["scale"], with_kwargs=True)
    return steps(model, rank, scale=2.0)


@program
def backward_hooks(wrap: Program, rank: int) -> list[Any]:
    """On the wrapper, the module, layers and parameters; each scales the gradient that it is given."""
    model = wrapped(wrap, blocks())
    seen: list[Tensor] = []

    def scale(module: nn.Module, grad_input: tuple[Tensor, ...], grad_output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.extend(grad_output)
        return tuple(gradient * 0.5 for gradient in grad_input)

    for module in (model, model.module, model.module[1], model.module[2].linear):
        module.register_full_backward_hook(scale)
        module.register_full_backward_pre_hook(lambda _, grad_output: tuple(gradient * 3 for gradient in grad_output))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (rank + 2))
    return [steps(model, rank), seen]


@program
def saved_tensors(wrap: Program, rank: int) -> list[Any]:
    """What backward needs is kept as another tensor, or elsewhere."""
    model = wrapped(wrap, blocks())

    def forward(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double() * 2, lambda x: (x / 2).float()):
            x = model(x)
        with torch.autograd.graph.save_on_cpu():
            return x + model(x)

    return steps(model, rank, forward)


# ------------------------------------------------------------------------------- what modules can be made of


def parametrized(wrap: Program, rank: int, by: Callable[[nn.Module], object]) -> list[Any]:
    module = blocks()
    for block in module:
        by(block.linear)
    return steps(wrapped(wrap, module), rank)


PROGRAMS |= {
    name: partial(parametrized, by=by)
    for name, by in {
        "weight_norm": parametrizations.weight_norm,
        # As torch had it before parametrizations: the weight is an attribute that a hook sets.
        "weight_norm_of_old": nn.utils.weight_norm,
        "orthogonal": parametrizations.orthogonal,
        "spectral_norm": parametrizations.spectral_norm,  # forward changes buffers of it
    }.items()
}


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


@program
def cached_parametrization(wrap: Program, rank: int) -> list[Any]:
    """The parameter is computed once for all uses."""
    module = blocks()
    for block in module:
        parametrize.register_parametrization(block.linear, "weight", Symmetric())
    model = wrapped(wrap, module)

    def forward(x: Tensor) -> Tensor:
        with parametrize.cached():
            return model(x) * 1

    return steps(model, rank, forward)


@program
def traced(wrap: Program, rank: int) -> list[Any]:
    """By TorchScript."""
    return steps(wrapped(wrap, torch.jit.trace(blocks(), torch.zeros(5, WIDTH))), rank)


# ------------------------------------------------------------------------------------------------ ways to train


@program
def autocast(wrap: Program, rank: int) -> list[Any]:
    """bf16 on the CPU, around forward, with a scaler that grows and shrinks."""
    model = wrapped(wrap, blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, found = [], []
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
        found += [gradients(model), [parameter.detach().clone() for parameter in model.parameters()]]
    assert scales[3] < scales[2]
    return [found, scales]


@program
def gradient_penalty(wrap: Program, rank: int) -> list[Any]:
    """Backward through a gradient with respect to the inputs."""
    model = wrapped(wrap, blocks())

    def forward(x: Tensor) -> Tensor:
        output = model(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return output + gradient

    return steps(model, rank, forward)


@program
def autograd_grad(wrap: Program, rank: int) -> list[Any]:
    """It returns this rank's own gradients, and the next backward is synchronised."""
    model = wrapped(wrap, blocks())
    own = torch.autograd.grad(model(batch(rank)).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, own, own_gradients(model, batch(rank))))
    return [own, gradients(model), steps(model, rank)]


@program
def called_with_its_own_parameters(wrap: Program, rank: int) -> list[Any]:
    model = wrapped(wrap, blocks())
    return steps(model, rank, lambda x: functional_call(model, dict(model.named_parameters()), (x,)))


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_under_torchs_ddp(ranks: RankPool, name: str) -> None:
    same_under_both(ranks, run, name)


def run(wrap: Program, rank: int, name: str) -> list[Any]:
    return PROGRAMS[name](wrap, rank)


# ----------------------------------------------------------------------------------- without the wrapper's knowledge


def own_gradients(model: Any, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model.module(x).square().sum(), list(model.parameters())))


def loss(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, values, (x,)).square().sum()


def gradient_of_each_sample(model: Any, values: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    of_module = {name.removeprefix("module."): value for name, value in values.items()}
    each = vmap(grad(partial(loss, model.module)), in_dims=(None, 0))(of_module, x[:, None])
    return [gradient.sum(0) for gradient in each.values()]


def other_values(model: Any, values: dict[str, Tensor], x: Tensor) -> list[Any]:
    """Gradients of values that are put in place of the parameters are the user's own, as under torch's DDP."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    loss(model, leaves, x).backward()
    return [leaf.grad for leaf in leaves.values()]


def the_wrapper_under_a_transform(model: Any, values: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    return list(grad(partial(loss, model))(values, x).values())


def state_around(rank: int, what: Callable[..., list[Tensor]]) -> str:
    """The window's state behind ``what``, whose gradients are right, as those of the steps after it are."""
    module = blocks()
    expected = steps(TorchDDP(copy.deepcopy(module)), rank)
    model = fastddp.DistributedDataParallel(module, bucket_cap_mb=0)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for one, other in zip(what(model, values, batch(rank).detach()), own_gradients(model, batch(rank)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    state: str = model.reducer.state
    for ours, theirs in zip(steps(model, rank), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    return state


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


def in_and_around_a_context(rank: int, folder: Path) -> tuple[str, str, float, list[float]]:
    """What forward and backward inside a context say; a gradient under no_sync there; and those of steps behind it."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    try:
        model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), rank + 1.0)
        loss = model(x).sum()
        with distributed_autograd.context() as context:
            with pytest.raises(NotImplementedError) as forward:
                model(x)
            with pytest.raises(RuntimeError) as backward:
                distributed_autograd.backward(context, [loss])
        with distributed_autograd.context() as context, model.no_sync():
            distributed_autograd.backward(context, [model(x).sum()])
            own = distributed_autograd.get_gradients(context)[model.module.weight].item()
        averaged = []
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            averaged.append(model.module.weight.grad.item())
        return str(forward.value), str(backward.value), own, averaged
    finally:
        rpc.shutdown()


def test_distributed_autograd_is_refused_where_it_would_synchronise_and_the_model_stays_usable(
    ranks: RankPool, tmp_path: Path
) -> None:
    for rank, (forward, backward, own, averaged) in enumerate(ranks.run(in_and_around_a_context, 2, tmp_path)):
        assert "does not support torch.distributed.autograd" in forward
        assert "parameter weight (number 0, bucket 0) got a gradient that is not in parameter.grad" in backward
        assert (own, averaged) == (rank + 1, [1.5, 1.5])
