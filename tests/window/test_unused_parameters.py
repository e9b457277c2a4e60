"""Parameters that a step does not use: find_unused_parameters, static_graph, skip_all_reduce_unused_params."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import fastddp
from fastddp import comm_hooks
from outputs import OUTPUTS, loss_in
from ranks import RankPool

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])
KEEPS = pytest.mark.parametrize("keeps", [False, True], ids=["gradients to none", "gradients to zero"])


class Parts(nn.Module):
    """Three parameters, of which a forward uses those it is told to; every gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(3)) for _ in range(3))
        self.output = "tensor"

    def forward(self, x: Tensor, used: str = "abc") -> Tensor:
        loss = x.sum() * 0
        for name in used:
            loss = loss + (getattr(self, name) * x).sum()
        return OUTPUTS[self.output](loss)


def wrapped(**options: Any) -> fastddp.DistributedDataParallel:
    options = {"find_unused_parameters": True, **options}
    return fastddp.DistributedDataParallel(Parts(), bucket_cap_mb=0, **options)


def local_input(rank: int, factor: float = 1.0) -> Tensor:
    return torch.full((3,), factor * (rank + 1), requires_grad=True)  # the mean over two ranks is 1.5 * factor


def gradients(model: nn.Module) -> list[float | None]:
    """The first element of each gradient; all elements are equal."""
    found: list[float | None] = []
    for parameter in model.module.parameters():
        gradient = parameter.grad
        assert gradient is None or torch.allclose(gradient, gradient[0], rtol=0, atol=0, equal_nan=True)
        found.append(None if gradient is None else gradient[0].item())
    return found


def steps(rank: int, uses: list[tuple[str, str]], keeps: bool, options: dict[str, Any]) -> list[list[float | None]]:
    """The gradients after each step, in which each rank uses parameters of its own."""
    model = wrapped(**options)
    if keeps:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    seen = []
    for use in uses:
        model.zero_grad(set_to_none=not keeps)
        model(local_input(rank), use[rank]).backward()
        seen.append(gradients(model))
    return seen


# What the two ranks use, step by step; and the gradients then, None where nobody used the parameter.
SEQUENCES: dict[str, list[tuple[tuple[str, str], list[float | None]]]] = {
    "always all": [(("abc", "abc"), [1.5, 1.5, 1.5])] * 3,
    "never one": [(("ac", "ac"), [1.5, None, 1.5])] * 3,
    "one comes and goes": [
        (("ac", "ac"), [1.5, None, 1.5]),
        (("abc", "abc"), [1.5, 1.5, 1.5]),
        (("ac", "ac"), [1.5, None, 1.5]),
        (("ac", "ac"), [1.5, None, 1.5]),
        (("abc", "abc"), [1.5, 1.5, 1.5]),
    ],
    "ranks use others": [(("ab", "bc"), [0.5, 1.5, 1.0])] * 3,
    "ranks take turns": [
        (("ab", "bc"), [0.5, 1.5, 1.0]),
        (("bc", "ab"), [1.0, 1.5, 0.5]),
        (("ab", "bc"), [0.5, 1.5, 1.0]),
        (("c", "a"), [1.0, None, 0.5]),
    ],
    "one rank uses none": [
        (("abc", ""), [0.5, 0.5, 0.5]),
        (("", "a"), [1.0, None, None]),
        (("a", ""), [0.5, None, None]),
    ],
    "nobody uses any": [(("", ""), [None, None, None]), (("abc", "abc"), [1.5, 1.5, 1.5])],
}


@VIEWS
@KEEPS
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_used_gradients_are_averaged_and_others_left_alone(
    ranks: RankPool, sequence: str, keeps: bool, view: bool
) -> None:
    uses, expected = zip(*SEQUENCES[sequence], strict=True)
    if keeps:
        expected = [[0.0 if value is None else value for value in gradients] for gradients in expected]
    for seen in ranks.run(steps, 2, list(uses), keeps, {"gradient_as_bucket_view": view}):
        assert seen == list(expected)


def come_and_go(rank: int, output: str, has_metric: bool, options: dict[str, Any]) -> list[list[float | None]]:
    """b has the first gradient of each backward that uses it, on rank 1 in every other one."""
    model = wrapped(**options)
    model.module.output = output
    seen = []
    for use in ("ab", "ab" if rank == 0 else "a") * 2:
        model.zero_grad()
        if has_metric:
            loss_in(model(local_input(rank), use))
        with model.no_sync() if has_metric else nullcontext():
            loss_in(model(local_input(rank), use)).backward()
        seen.append(gradients(model))
    return seen


@VIEWS
@pytest.mark.parametrize(
    ("output", "has_metric"), [*((output, False) for output in OUTPUTS), ("tensor", True)], ids=lambda value: str(value)
)
def test_what_comes_first_and_unexpectedly_counts_once(
    ranks: RankPool, output: str, has_metric: bool, view: bool
) -> None:
    for seen in ranks.run(come_and_go, 2, output, has_metric, {"gradient_as_bucket_view": view}):
        assert seen == [[1.5, 1.5, None], [1.5, 0.5, None]] * 2


# --------------------------------------------------------------------------------------------------- late gradients


def late(rank: int, hook: str | None, keeps: bool) -> list[list[float | None]]:
    """b was not used in the step before, and comes behind its bucket; on rank 1 it is not used at all."""
    model = wrapped()
    if hook == "callable":
        model.register_comm_hook(None, sums_up)
    elif hook is not None:
        model.register_comm_hook(None, getattr(comm_hooks, hook))
    if keeps:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    seen = []
    for use in ("ac", "ac", "bac" if rank == 0 else "ac", "ac"):
        model.zero_grad(set_to_none=not keeps)
        model(local_input(rank), use).backward()
        seen.append(gradients(model))
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert torch.allclose(model.last_grad_norm(), norm)
    return seen


def sums_up(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    def added_up(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return future.value()[0] * 10

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(added_up)


@KEEPS
@pytest.mark.parametrize("hook", [None, "fp16_compress_hook", "bf16_compress_hook", "allreduce_hook"])
def test_a_gradient_that_comes_behind_its_bucket_is_completed(ranks: RankPool, hook: str | None, keeps: bool) -> None:
    unused = 0.0 if keeps else None
    for seen in ranks.run(late, 2, hook, keeps):
        assert seen[:2] == [[1.5, unused, 1.5]] * 2
        assert seen[2] == [1.5, 0.5, 1.5]
        assert seen[3] == [1.5, unused, 1.5]


def test_a_hook_of_the_users_is_called_once_more_for_it(ranks: RankPool) -> None:
    for seen in ranks.run(late, 2, "callable", False):
        assert seen == [[30.0, None, 30.0], [30.0, None, 30.0], [30.0, 10.0, 30.0], [30.0, None, 30.0]]


def late_in_two_dtypes(rank: int) -> list[Tensor | None]:
    module = Parts()
    module.c = nn.Parameter(module.c.double())
    model = fastddp.DistributedDataParallel(module, find_unused_parameters=True)
    for used in ("a", "a", "bca"):
        model.zero_grad()
        model(torch.full((3,), 0.1 * (rank + 1), dtype=torch.float64), used).backward()
    return [parameter.grad for parameter in module.parameters()]


def test_late_gradients_of_several_dtypes_keep_theirs(ranks: RankPool) -> None:
    for gradients in ranks.run(late_in_two_dtypes, 2):
        assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32, torch.float64]
        for gradient, accuracy in zip(gradients, [1e-6, 1e-6, 1e-15], strict=True):
            assert (gradient - 0.15).abs().max() < accuracy


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return sum(self.layers[i](x).square().sum() for i in used)  # type: ignore[return-value]


def under_power_sgd(hook: str) -> tuple[fastddp.DistributedDataParallel, comm_hooks.PowerSGDState]:
    model = fastddp.DistributedDataParallel(Matrices(), bucket_cap_mb=0, find_unused_parameters=True)
    state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, getattr(comm_hooks, hook))
    return model, state


def power_sgd_with_unused(rank: int, hook: str) -> tuple[list[bool], float, bool]:
    model, state = under_power_sgd(hook)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
    for _ in range(4):
        model.zero_grad()
        model(x, (0, 1, 2)).backward()
    before = {name: error.clone() for name, error in state.errors.items()}
    model.zero_grad()
    model(x, (0, 2)).backward()
    are_none = [layer.weight.grad is None for layer in model.module.layers]
    (name,) = (name for name in before if "layers.1.weight" in name)
    change = ((state.errors[name] - before[name]).norm() / before[name].norm()).item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return are_none, change, torch.allclose(model.last_grad_norm(), norm, rtol=1e-5)


POWER_SGD = pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])


@POWER_SGD
def test_powersgd_keeps_the_error_of_what_nobody_used(ranks: RankPool, hook: str) -> None:
    for are_none, change, norm_is_right in ranks.run(power_sgd_with_unused, 2, hook):
        assert are_none == [False, True, False]
        assert change < 1e-6
        assert norm_is_right


def late_under_power_sgd(rank: int, hook: str) -> bool:
    """A layer that no step used before."""
    model, _ = under_power_sgd(hook)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
    for used in ((0, 2), (0, 2), (0, 2), (1, 0, 2)):
        model.zero_grad()
        model(x, used).backward()
    alone = Matrices()
    alone(x, (1,)).backward()
    expected = alone.layers[1].weight.grad
    dist.all_reduce(expected)
    return torch.allclose(model.module.layers[1].weight.grad, expected / 2, rtol=1e-5)


@POWER_SGD
def test_powersgd_does_not_compress_what_comes_behind_its_bucket(ranks: RankPool, hook: str) -> None:
    assert ranks.run(late_under_power_sgd, 2, hook) == [True, True]


# ------------------------------------------------------------------------------------------ several losses, outputs


def two_losses(rank: int, shared: bool) -> list[list[float | None]]:
    model = wrapped()
    seen = []
    for _ in range(3):
        model.zero_grad()
        first, second = model(local_input(rank), "ab" if shared else "a"), model(local_input(rank), "bc")
        first.backward()
        second.backward()
        seen.append(gradients(model))
    return seen


def test_losses_may_have_a_backward_each(ranks: RankPool) -> None:
    assert ranks.run(two_losses, 2, False) == [[[1.5, 1.5, 1.5]] * 3] * 2


def test_losses_may_share_parameters(ranks: RankPool) -> None:
    assert ranks.run(two_losses, 2, True) == [[[1.5, 3.0, 1.5]] * 3] * 2


@dataclasses.dataclass
class Output:
    loss: Tensor
    more: dict[str, list[Tensor]]


class Heads(nn.Module):
    """Two heads, in an output of which the loss uses one."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = (nn.Linear(3, 3) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Output:
        hidden = checkpoint(self.trunk, x, use_reentrant=True) if self.reentrant else self.trunk(x)
        return Output(self.left(hidden).sum(), {"right": [self.right(hidden)]})


def unused_output(rank: int, options: dict[str, Any], backwards: int) -> list[list[bool]]:
    """Which gradients there are, step by step; and whether they are those of a module alone, averaged."""
    model = fastddp.DistributedDataParallel(Heads(options.pop("reentrant", False)), bucket_cap_mb=0, **options)
    seen = []
    for _ in range(3):
        model.zero_grad()
        output = model(local_input(rank).expand(2, 3))
        output.loss.backward(retain_graph=backwards == 2)
        if backwards == 2:
            output.more["right"][0].sum().backward()
        seen.append([parameter.grad is not None for parameter in model.parameters()])
    for parameter in model.parameters():
        if parameter.grad is not None:
            other = parameter.grad.clone()
            dist.broadcast(other, 0)
            assert torch.equal(other, parameter.grad)
    return seen


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_an_output_may_be_left_unused_79171(ranks: RankPool, option: str, reentrant: bool) -> None:
    for seen in ranks.run(unused_output, 2, {option: True, "reentrant": reentrant}, 1):
        assert seen == [[True] * 4 + [False] * 2] * 3


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_each_output_may_have_a_backward_of_its_own(ranks: RankPool, option: str) -> None:
    for seen in ranks.run(unused_output, 2, {option: True}, 2):
        assert seen == [[True] * 6] * 3


# ------------------------------------------------------------------------------------------------------ static graphs


def static(rank: int, wrap: Any, microbatches: int, option: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = wrap(Repeated(), **{option: True})
    seen = []
    for step in range(3):
        model.zero_grad()
        for micro in range(microbatches):
            x = torch.full((2, 3), rank + step + micro + 1.0, requires_grad=True)
            if micro < microbatches - 1:
                with model.no_sync():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        seen += [parameter.grad for parameter in model.module.parameters() if parameter.grad is not None]
    return [gradient.clone() for gradient in seen]


class Repeated(nn.Module):
    """One layer inside two reentrant checkpoints, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def for_a_choice(rank: int, options: dict[str, Any]) -> list[list[float | None]]:
    """Behind a backward for one parameter, and behind one over the same forward for the other."""
    model = wrapped(**options)
    loss = model(local_input(rank), "ab")
    seen = []
    for parameter in (model.module.b, model.module.a):
        loss.backward(inputs=[parameter], retain_graph=True)
        seen.append(gradients(model))
    return seen


@VIEWS
def test_another_backward_for_a_choice_is_averaged_too(ranks: RankPool, view: bool) -> None:
    for seen in ranks.run(for_a_choice, 2, {"gradient_as_bucket_view": view}):
        assert seen == [[None, 1.5, None], [1.5, 1.5, None]]


class Hidden(nn.Module):
    def __init__(self, output: str) -> None:
        super().__init__()
        self.inner, self.output = Repeated(), output

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.output](self.inner(x).sum())


def hidden_checkpoints(rank: int, output: str, option: str) -> str:
    model = fastddp.DistributedDataParallel(Hidden(output), **{option: True})
    loss = loss_in(model(torch.ones(2, 3, requires_grad=True)))
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "well"


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_a_backward_is_refused_that_begins_unseen_inside_a_checkpoint(ranks: RankPool, option: str) -> None:
    assert ranks.run(hidden_checkpoints, 2, "containers", option) == ["well"] * 2
    for said in ranks.run(hidden_checkpoints, 2, "slots", option):
        assert "inside a reentrant checkpoint" in said
        assert "use_reentrant=False" in said


def static_is_right(rank: int, microbatches: int, option: str) -> bool:
    ours = static(rank, fastddp.DistributedDataParallel, microbatches, option)
    alone = [gradient.clone() for gradient in static(rank, Alone, microbatches, option)]
    for gradient in alone:
        dist.all_reduce(gradient)
        gradient /= 2
    return len(ours) == len(alone) and all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(ours, alone, strict=True))


class Alone(nn.Module):
    """No data parallelism."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def no_sync(self) -> torch.autograd.grad_mode.set_grad_enabled:
        return torch.enable_grad()  # type: ignore[return-value]


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_repeated_reentrant_checkpoints_and_accumulation_are_right_24005_46166_187732_143580(
    ranks: RankPool, microbatches: int, option: str
) -> None:
    assert ranks.run(static_is_right, 2, microbatches, option) == [True, True]


def changed_graph(rank: int, options: dict[str, Any]) -> None:
    model = wrapped(**options)
    for used in ("ac", "ac", "abc"):
        model.zero_grad()
        model(local_input(rank), used).backward()


@pytest.mark.parametrize(
    "options",
    [{"static_graph": True, "find_unused_parameters": False}, {"skip_all_reduce_unused_params": True}],
    ids=["static_graph", "skip_all_reduce_unused_params"],
)
def test_a_parameter_that_comes_into_use_is_an_error_that_names_it(ranks: RankPool, options: dict[str, Any]) -> None:
    for error in ranks.errors(changed_graph, 2, options):
        assert "parameter b (number 1, in no bucket) got a gradient on this rank, but none in the first step" in (
            error.message
        )


def bucket_members(rank: int, options: dict[str, Any]) -> list[str]:
    model = wrapped(**options)
    for _ in range(2):
        model.zero_grad()
        model(local_input(rank), "ac").backward()
    return [parameter.name for bucket in model.bucket_plan().buckets for parameter in bucket.parameters]


def test_what_a_static_graph_never_uses_does_not_travel(ranks: RankPool) -> None:
    assert ranks.run(bucket_members, 2, {"static_graph": True}) == [["c", "a"]] * 2
    assert ranks.run(bucket_members, 2, {"skip_all_reduce_unused_params": True}) == [["c", "a"]] * 2
    assert ranks.run(bucket_members, 2, {}) == [["c", "a", "b"]] * 2


def set_later(rank: int) -> list[list[float | None]]:
    model = fastddp.DistributedDataParallel(Parts(), bucket_cap_mb=0)
    model._set_static_graph()
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(local_input(rank), "ac").backward()
        seen.append(gradients(model))
    with pytest.warns(UserWarning, match="set already"):
        model._set_static_graph()
    return seen


def test_a_static_graph_can_be_set_later(ranks: RankPool) -> None:
    assert ranks.run(set_later, 2) == [[[1.5, None, 1.5]] * 3] * 2


# ---------------------------------------------------------------------------------------------------- as torch's DDP


def against_torch(rank: int, options: dict[str, Any]) -> bool:
    """Several steps in which each rank uses layers of its own, with an optimizer: the same parameters in the end."""
    finals = []
    for wrap in (fastddp.DistributedDataParallel, TorchDDP):
        model = wrap(Matrices(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x, [(0, 1, 2), (0, 2), (0,), (2, 1)][(step + rank * (step % 3)) % 4]).backward()
            optimizer.step()
        finals.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}], ids=str)
def test_ranks_that_use_other_layers_train_as_under_torchs_ddp_128949(ranks: RankPool, options: dict[str, Any]) -> None:
    assert ranks.run(against_torch, 2, {"find_unused_parameters": True, **options}) == [True, True]
