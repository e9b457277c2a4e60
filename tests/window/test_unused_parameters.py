"""Parameters that a step does not use: find_unused_parameters, static_graph, skip_all_reduce_unused_params."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastddp import comm_hooks
from on_ranks import of_ranks, on_ranks
from outputs import OUTPUTS, loss_in
from parts import gradients, local_input, step, wrapped

FIND: dict[str, Any] = {"find_unused_parameters": True}


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_what_comes_first_and_unexpectedly_counts_once(rank: int, view: bool) -> None:
    """b has the first gradient of each backward that uses it, on rank 1 in every other one; by what a forward returns.

    Behind a metric's forward, that of the loss is under no_sync.
    """
    for output in [*OUTPUTS, "metric"]:
        model = wrapped(**FIND, gradient_as_bucket_view=view)
        model.module.output = "tensor" if output == "metric" else output
        for both_use_b in (True, False, True, False):
            used = "ab" if both_use_b or rank == 0 else "a"
            model.zero_grad()
            if output == "metric":
                model(local_input(rank), used)
            with model.no_sync() if output == "metric" else nullcontext():
                loss_in(model(local_input(rank), used)).backward()
            assert gradients(model) == [1.5, 1.5 if both_use_b else 0.5, None], output


# --------------------------------------------------------------------------------------------------- late gradients


def matrices() -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
    layers.forward = lambda x, used: sum(layers[i](x).square().sum() for i in used)  # type: ignore[method-assign]
    return layers


def inputs(number: int) -> Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@pytest.mark.parametrize("is_late", [False, True])
@on_ranks(2)
def test_powersgd_keeps_the_error_of_what_nobody_used_and_compresses_nothing_late(
    rank: int, is_late: bool, hook: str
) -> None:
    model, alone = wrapped(matrices(), **FIND), matrices()
    state = comm_hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, getattr(comm_hooks, hook))
    errors = []
    for used in [(0, 2)] * 4 + [(1, 0, 2)] if is_late else [(0, 1, 2)] * 4 + [(0, 2)]:
        model.zero_grad()
        model(inputs(rank), used).backward()
        errors.append([error.clone() for name, error in state.errors.items() if "1.weight" in name])
    if is_late:
        alone(inputs(rank), (1,)).backward()
        expected = alone[1].weight.grad
        dist.all_reduce(expected)
        torch.testing.assert_close(model.module[1].weight.grad, expected / 2, rtol=1e-5, atol=1e-7)
    else:
        (before,), (after,) = errors[-2:]
        assert model.module[1].weight.grad is None
        assert (after - before).norm() < 1e-6 * before.norm()


# ------------------------------------------------------------------------------------------ several losses, outputs


@dataclasses.dataclass
class Output:
    loss: Tensor
    more: dict[str, list[Tensor]]


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize(("reentrant", "uses_right"), [(False, False), (True, False), (False, True)])
@on_ranks(2)
def test_an_output_may_be_left_unused_or_have_a_backward_of_its_own_79171(
    rank: int, option: str, reentrant: bool, uses_right: bool
) -> None:
    trunk, left, right = module = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(x: Tensor) -> Output:
        hidden = checkpoint(trunk, x, use_reentrant=True) if reentrant else trunk(x)
        return Output(left(hidden).sum(), {"right": [right(hidden).sum()]})

    module.forward = forward  # type: ignore[method-assign]
    model = wrapped(module, **{option: True})
    for _ in range(3):
        model.zero_grad()
        output = model(local_input(rank).expand(2, 3))
        output.loss.backward(retain_graph=True)
        if uses_right:
            output.more["right"][0].backward()
        first, second = of_ranks([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
        assert first == second
        assert [gradient is not None for gradient in first] == [True] * 4 + [uses_right] * 2


# --------------------------------------------
# ------------------------------------------------------------------------------------------------------ static graphs


STATIC, SKIPS = {"static_graph": True}, {**FIND, "skip_all_reduce_unused_params": True}


@pytest.mark.parametrize(
    ("options", "set_later", "members"),
    [(STATIC, False, ["c", "a"]), ({}, True, ["c", "a"]), (SKIPS, False, ["c", "a"]), (FIND, False, ["c", "a", "b"])],
    ids=str,
)
@on_ranks(2)
def test_what_a_static_graph_never_uses_does_not_travel(
    rank: int, options: dict[str, Any], set_later: bool, members: list[str]
) -> None:
    model = wrapped(**options)
    if set_later:
        model._set_static_graph()
    for _ in range(3):
        assert step(model, rank, "ac") == [1.5, None, 1.5]
    assert [parameter.name for bucket in model.bucket_plan().buckets for parameter in bucket.parameters] == members
    if set_later:
        with pytest.warns(UserWarning, match="set already"):
            model._set_static_graph()


@pytest.mark.parametrize("options", [STATIC, SKIPS], ids=lambda options: list(options)[-1])
@on_ranks(2)
def test_a_parameter_that_comes_into_use_is_an_error_that_names_it(rank: int, options: dict[str, Any]) -> None:
    model = wrapped(**options)
    for _ in range(2):
        step(model, rank, "ac")
    with pytest.raises(RuntimeError, match=r"parameter b \(number 1, in no bucket\) got a gradient on this rank"):
        step(model, rank)
