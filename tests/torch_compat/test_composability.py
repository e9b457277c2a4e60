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
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import fastddp
from on_ranks import Wrap, differences, gradients, on_ranks, same_under_both
from parts import Parts, local_input, wrapped

WIDTH = 6


class Block(nn.Module):
    """A layer whose backward needs what its forward saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Blocks(nn.Sequential):
    """Run by ``how``, if that is given."""

    def __init__(self, how: Callable[..., Tensor] | None = None) -> None:
        super().__init__(*(Block() for _ in range(4)))
        self.how = how

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return (self.how(list(self), x) if self.how else super().forward(x)) * scale


def batch(rank: int, step: int = 0) -> Tensor:
    # A reentrant checkpoint drops the gradients of a segment whose inputs need none.
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_()


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


# With a bucket for each parameter, so that exchanges begin while other gradients are on their way. Torch's DDP takes no
# cap of 0 before 2.13.
SMALL_BUCKETS = {"bucket_cap_mb": 1e-6}

# ------------------------------------------------------------------------------------------- activation checkpointing


def each(layers: list[nn.Module], x: Tensor, reentrant: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def nested(layers: list[nn.Module], x: Tensor, reentrant: bool) -> Tensor:
    """The first parameters to get a gradient and the last ones do so outside of a checkpoint."""
    return layers[3](checkpoint(lambda x: each(layers[1:3], x, reentrant), layers[0](x), use_reentrant=reentrant))


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", [each, nested])
@same_under_both()
def test_activation_checkpointing(wrap: Wrap, rank: int, how: Callable[..., Tensor], reentrant: bool) -> Any:
    return steps(wrap(Blocks(partial(how, reentrant=reentrant)), **SMALL_BUCKETS), rank)


# ----------------------------------------------------------------------------------------------------------- hooks


@same_under_both()
def test_forward_hooks_that_change_what_they_are_given(wrap: Wrap, rank: int) -> Any:
    model = wrap(Blocks(), **SMALL_BUCKETS)
    for module in (model, model.module):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"scale": kwargs["scale"] + 1}), with_kwargs=True
        )
        module.register_forward_hook(lambda _, args, output: output + args[0])
        module.register_forward_hook(lambda _, args, kwargs, output: output * kwargs["scale"], with_kwargs=True)
    return steps(model, rank, scale=2.0)


@same_under_both()
def test_backward_hooks_of_wrapper_module_layers_and_parameters(wrap: Wrap, rank: int) -> Any:
    model = wrap(Blocks(), **SMALL_BUCKETS)
    for module in (model, model.module, model.module[1], model.module[2].linear):
        module.register_full_backward_hook(lambda _, grad_input, grad_output: tuple(one * 0.5 for one in grad_input))
        module.register_full_backward_pre_hook(lambda _, grad_output: tuple(one * 3 for one in grad_output))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (rank + 2))
    return steps(model, rank)


# ------------------------------------------------------------------------------- what modules can be made of


@pytest.mark.parametrize(
    "by",
    [
        nn.utils.weight_norm,  # as it was before parametrizations: the weight is an attribute that a hook sets
        parametrizations.spectral_norm,  # forward changes buffers of it
    ],
    ids=["weight_norm of old", "spectral_norm"],
)
@same_under_both()
def test_parametrizations(wrap: Wrap, rank: int, by: Callable[[nn.Module], Any]) -> Any:
    module = Blocks()
    for block in module:
        by(block.linear)
    return steps(wrap(module, **SMALL_BUCKETS), rank)


# ------------------------------------------------------------------------------------------------ ways to train


@same_under_both()
def test_autocast_with_a_scaler_that_grows_and_shrinks(wrap: Wrap, rank: int) -> Any:
    model = wrap(Blocks(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found: list[Any] = []
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
        found += [scaler.get_scale(), gradients(model), [one.detach().clone() for one in model.parameters()]]
    return found


def with_saved_tensors_elsewhere(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double() * 2, lambda x: (x / 2).float()):
        x = model(x)
    with torch.autograd.graph.save_on_cpu():
        return x + model(x)


def with_a_penalty_on_the_gradient_of_inputs(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return output + gradient


def by_functional_call(model: Any, x: Tensor) -> Tensor:
    return functional_call(model, dict(model.named_parameters()), (x,))


AROUND = [
    partial(checkpoint, use_reentrant=True),
    partial(checkpoint, use_reentrant=False),
    with_saved_tensors_elsewhere,
    with_a_penalty_on_the_gradient_of_inputs,
    by_functional_call,
]


@pytest.mark.parametrize("around", AROUND)
@same_under_both()
def test_what_is_put_around_a_forward(wrap: Wrap, rank: int, around: Callable[..., Tensor]) -> Any:
    model = wrap(Blocks(), **SMALL_BUCKETS)
    return steps(model, rank, partial(around, model))


@same_under_both()
def test_autograd_grad_returns_this_ranks_own_and_the_next_backward_synchronises(wrap: Wrap, rank: int) -> Any:
    model = wrap(Blocks(), **SMALL_BUCKETS)
    own = torch.autograd.grad(model(batch(rank)).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, own, own_gradients(model, batch(rank))))
    return [own, gradients(model), steps(model, rank)]


# ----------------------------------------------------------------------------------- without the wrapper's knowledge


def own_gradients(model: Any, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model.module(x).square().sum(), list(model.parameters())))


def of_other_values(model: Any, values: dict[str, Tensor], x: Tensor) -> list[Any]:
    """Put in place of the parameters, as under torch's DDP."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    loss(model, leaves, x).backward()
    return [leaf.grad for leaf in leaves.values()]


def of_the_wrapper_under_a_transform(model: Any, values: dict[str, Tensor], x: Tensor) -> list[Any]:
    return list(grad(partial(loss, model))(values, x).values())


def loss(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, values, (x,)).square().sum()


@pytest.mark.parametrize("which", [of_other_values, of_the_wrapper_under_a_transform])
@on_ranks(2)
def test_gradients_that_no_parameter_gets_leave_the_wrapper_alone(rank: int, which: Any) -> None:
    module = Blocks()
    theirs = TorchDDP(copy.deepcopy(module))
    ours = fastddp.DistributedDataParallel(module, **SMALL_BUCKETS)
    values = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    found = which(ours, values, batch(rank).detach())
    torch.testing.assert_close(found, own_gradients(ours, batch(rank)), rtol=0, atol=1e-5)
    assert ours.reducer.state == "armed"  # a forward of the wrapper ran
    assert differences(steps(theirs, rank), steps(ours, rank)) == []


@on_ranks(2)
def test_distributed_autograd_is_refused_where_it_would_synchronise(rank: int, tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), rank + 1.0)
    loss = model(x).sum()
    with distributed_autograd.context() as context:
        with pytest.raises(NotImplementedError, match=r"does not support torch\.distributed\.autograd"):
            model(x)
        with pytest.raises(RuntimeError, match=r"weight \(number 0, bucket 0\) got .* not in parameter\.grad"):
            distributed_autograd.backward(context, [loss])
    with distributed_autograd.context() as context, model.no_sync():
        distributed_autograd.backward(context, [model(x).sum()])
        assert distributed_autograd.get_gradients(context)[model.module.weight].item() == rank + 1
    rpc.shutdown()


# ------------------------------------------------------------------------------ optimizers that step inside backward


@on_ranks(2)
def test_they_leave_alone_what_no_rank_has_used(rank: int) -> None:
    model = wrapped(Parts("ab"), find_unused_parameters=True)
    model.module.b.grad = torch.full((3,), float(rank))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    model(local_input(rank), "a").backward()
    assert [parameter.tolist() for parameter in model.parameters()] == [[-0.5] * 3, [1.0] * 3]
    assert gradients(model)[1].tolist() == [rank] * 3


@pytest.mark.parametrize("some", [False, True], ids=["all parameters", "some parameters"])
@same_under_both()
def test_fused_optimizers_do_what_they_do_under_torchs_ddp(wrap: Wrap, rank: int, some: bool) -> Any:
    inner = Blocks()
    before = inner[0].linear.weight.detach().clone()
    model = wrap(inner)
    model._register_fused_optim(torch.optim.Adam, 1e-2, optim_params=list(inner.parameters())[:2] if some else None)
    for step in range(3):
        model(batch(rank, step)).square().sum().backward()
    return [torch.equal(inner[0].linear.weight, before), *inner.parameters()]
