"""Windows: which backward synchronises what, where gradients live, and what the reducer's state says."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from fastddp import DistributedDataParallel as DDP
from fastddp import Watch, comm_hooks
from on_ranks import on_ranks
from outputs import OUTPUTS, loss_in
from parts import Parts, gradients, local_input, step, wrapped

FIND, VIEW = {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])


# ------------------------------------------------------------------------------------------------- what synchronises


@VIEWS
@on_ranks(2)
def test_gradients_are_averaged_once(rank: int, view: bool) -> None:
    model, x, own, states = wrapped(gradient_as_bucket_view=view), local_input(rank), rank + 1.0, []
    for _ in range(2):  # buckets are rebuilt after the first windows
        # Under no_sync they stay local, those too that the last backward does not bring.
        model.zero_grad()
        with model.no_sync():
            model(x).backward()
        loss = model(x, "ac")
        states.append(model.reducer.state)
        loss.backward()
        assert gradients(model) == [3.0, 1.5, 3.0]

        # Several backwards may bring a window's gradients in parts; another one over its forwards stays on its rank.
        model.zero_grad()
        losses = [model(x, "b"), model(x, "ac")]
        losses[0].backward()
        states.append(model.reducer.state)
        losses[1].backward(retain_graph=True)
        assert gradients(model) == [1.5] * 3
        states.append(model.reducer.state)
        losses[1].backward()
        assert gradients(model) == [1.5 + own, 1.5, 1.5 + own]
    assert states == ["armed", "partial", "finished"] * 2


@VIEWS
@on_ranks(2)
def test_backward_with_create_graph_synchronises_values(rank: int, view: bool) -> None:
    """The second adds, out of place, to gradients that have a graph of their own."""
    model = wrapped(gradient_as_bucket_view=view)
    warnings.simplefilter("ignore")  # of torch: it may leak memory
    for mean in (1.5, 3.0):
        model(local_input(rank)).backward(create_graph=True)
        assert gradients(model) == [mean] * 3


@on_ranks(2)
def test_a_gradient_that_comes_after_its_window_closed_is_an_error(rank: int) -> None:
    model = wrapped()
    with model.no_sync():
        model(local_input(rank)).backward()
    late, rest = model(local_input(rank), "b"), model(local_input(rank), "ac")
    rest.backward()
    with pytest.raises(RuntimeError, match=r"parameter b \(number 1, bucket(.|\n)*no_sync\(\)"):
        late.backward()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("wrap", "options"), [(TorchDDP, {}), (DDP, {}), (DDP, FIND), (DDP, FIND | VIEW)])
@on_ranks(2)
def test_a_backward_for_a_choice_leaves_its_gradients_whole_until_all_have_come(
    rank: int, wrap: Any, options: dict[str, Any], keeps: bool
) -> None:
    """So it is under torch's DDP. Where the other parameter may be unused, there is nothing to wait for."""
    model = wrap(Parts("ab"), bucket_cap_mb=1e-6, **options)
    model(local_input(rank)).backward()
    model.zero_grad(set_to_none=not keeps)
    loss = model(local_input(rank))
    loss.backward(inputs=[model.module.b], retain_graph=True)
    assert gradients(model) == [0.0 if keeps else None, 1.5 if options else rank + 1.0]
    loss.backward(inputs=[model.module.a])
    assert gradients(model) == [1.5, 1.5]


# ------------------------------------------------------------------------------------------------ where gradients live


@VIEWS
@on_ranks(2)
def test_a_gradient_that_somebody_keeps_is_overwritten_if_it_is_a_view_as_under_torchs_ddp(
    rank: int, view: bool
) -> None:
    model = wrapped(gradient_as_bucket_view=view)
    for factor in (1.0, 1.0, 10.0):
        kept = model.module.a.grad
        model.zero_grad()
        model(local_input(rank, factor)).backward()
    assert model.module.a.grad.tolist() == [15.0] * 3
    assert kept.tolist() == [15.0 if view else 1.5] * 3


@on_ranks(2)
def test_gradients_in_memory_of_the_users_are_averaged_in_place(rank: int) -> None:
    model = wrapped()
    buffer = torch.zeros(9)
    for parameter, part in zip(model.parameters(), buffer.split(3), strict=True):
        parameter.grad = part
    held = [parameter.grad for parameter in model.parameters()]
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        with model.no_sync():
            model(local_input(rank)).backward()
        model(local_input(rank)).backward()
    assert buffer.tolist() == [3.0] * 9
    assert all(parameter.grad is own for parameter, own in zip(model.parameters(), held, strict=True))


@VIEWS
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_gradients_nobody_keeps_have_the_same_memory_in_every_step(rank: int, view: bool, set_to_none: bool) -> None:
    model = wrapped(gradient_as_bucket_view=view, bucket_cap_mb=25)
    places = []
    for _ in range(4):
        step(model, rank, set_to_none=set_to_none)
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places[1] == places[2] == places[3]  # the first step is before the rebuild
    if view or set_to_none:  # they live in the wire
        assert len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
    # As under torch's DDP, views of buckets cannot be detached in place.
    with pytest.raises(RuntimeError) if view else nullcontext():
        model.module.a.grad.detach_()


@on_ranks(2)
def test_a_gradient_that_shares_memory_with_what_user_code_captured_stays_in_it(rank: int) -> None:
    """The gradient of the weight is a view of it."""
    module, captured = nn.Linear(3, 2, bias=False), []

    def forward(x: Tensor) -> Tensor:
        used = module.weight.view(3, 2)
        used.register_hook(captured.append)
        return (used * x).sum()

    module.forward = forward  # type: ignore[method-assign]
    model = DDP(module)
    model(torch.full((3, 2), rank + 1.0)).backward()
    assert module.weight.grad.data_ptr() == captured[0].data_ptr()  # as without DDP: autograd made a view of it
    assert module.weight.grad.flatten().tolist() == [1.5] * 6


@VIEWS
@on_ranks(2)
def test_parameters_whose_gradients_share_memory_are_each_averaged_once(rank: int, view: bool) -> None:
    """Autograd hands both gradients in one piece of memory, if it can."""
    layer: Any = nn.Bilinear(1, 1, 4)
    layer.forward = lambda x: ((layer.weight.view(4) + layer.bias) * x).sum()
    model = DDP(layer, gradient_as_bucket_view=view)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((4,), rank + 1.0)).backward()
        assert [parameter.grad.flatten().tolist() for parameter in model.parameters()] == [[1.5] * 4] * 2


# ----------
# -------------------------------------------------------------------------------------------- activation checkpoints


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
@on_ranks(2)
def test_a_backward_is_refused_that_begins_unseen_inside_a_checkpoint(rank: int, option: str) -> None:
    refused = pytest.raises(RuntimeError, match=r"inside a reentrant checkpoint(.|\n)*use_reentrant=False")
    for output in ("containers", "slots"):
        module = nn.ModuleDict({"layer": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
        module.forward = lambda x, layer=module["layer"], output=output: OUTPUTS[output](  # type: ignore[misc]
            checkpoint(layer, x, use_reentrant=True).sum()
        )
        model = DDP(module, **{option: True})
        loss = loss_in(model(torch.ones(2, 3, requires_grad=True)))
        with refused if output == "slots" else nullcontext():
            loss.backward()


# -----------
# -------------------------------------------------------------------- what ranks tell each other at the end of a window


def started() -> int:
    """Collectives, so far."""
    group: Any = dist.group.WORLD  # torch does not declare what counts its collectives
    return group._get_sequence_number_for_group()


@pytest.mark.parametrize(
    ("hook", "options", "more"),
    [
        (None, VIEW, 0),
        (comm_hooks.allreduce_hook, {}, 0),
        (None, {"watch": Watch(corruption="raise")}, 0),  # measuring has none either
        (None, FIND, 1),  # it also says which parameters were used
    ],
    ids=["views", "hook", "measured", "unused parameters"],
)
@on_ranks(2)
def test_it_is_no_collective_of_its_own_where_a_sum_carries_the_last_bucket(
    rank: int, hook: Any, options: dict[str, Any], more: int
) -> None:
    model = wrapped(**options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for _ in range(3):
        before = started()
        model(local_input(rank)).backward()
    assert started() - before == 3 + more  # buckets


@on_ranks(2)
def test_only_the_bucket_that_it_travels_with_waits_for_the_end_of_backward(rank: int) -> None:
    model = wrapped()
    counts = []
    for _ in range(4):
        x = local_input(rank)
        before = started()
        x.register_hook(lambda _, before=before: counts.append(started() - before))
        model(x * 1).backward()
    assert counts[2:] == [2, 2]


@on_ranks(2)
def test_it_is_no_gradient(rank: int) -> None:
    model = wrapped(**VIEW)
    for _ in range(3):
        step(model, rank)
        assert float(model.last_grad_norm()) == pytest.approx(3 * 1.5, rel=1e-6)  # of nine elements
