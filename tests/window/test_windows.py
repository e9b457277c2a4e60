"""Windows: which backward synchronises what, and what the reducer's state says about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastddp
from models import RaisesInBackward
from ranks import RankPool

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])


class TwoHeads(nn.Module):
    """A trunk and two heads that can be trained apart; every gradient is the rank's input times a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Parameter(torch.ones(3))
        self.left = nn.Parameter(torch.ones(3))
        self.right = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, parts: str = "trunk left right") -> Tensor:
        return sum((getattr(self, part) * x).sum() for part in parts.split())  # type: ignore[return-value]


def wrapped(view: bool = False, **options: object) -> fastddp.DistributedDataParallel:
    # A bucket for each parameter, so that some can be exchanged while others are missing.
    return fastddp.DistributedDataParallel(TwoHeads(), gradient_as_bucket_view=view, bucket_cap_mb=0, **options)


def gradients(model: nn.Module) -> dict[str, float | None]:
    """The first element of each gradient by parameter; all elements are equal."""
    found = {}
    for name, parameter in model.module.named_parameters():
        gradient = parameter.grad
        assert gradient is None or torch.allclose(gradient, gradient[0], rtol=0, atol=0, equal_nan=True)
        found[name] = None if gradient is None else gradient[0].item()
    return found


def everywhere(value: float) -> dict[str, float]:
    return {"trunk": value, "left": value, "right": value}


def local_input(rank: int, factor: float = 1.0) -> Tensor:
    return torch.full((3,), factor * (rank + 1))  # the mean over two ranks is 1.5 * factor


def states_of_a_step(rank: int, view: bool) -> list[str]:
    model = wrapped(view)
    states: list[str] = [model.reducer.state]
    output = model(local_input(rank))
    states.append(model.reducer.state)
    output.backward()
    states.append(model.reducer.state)
    with model.no_sync():
        output = model(local_input(rank))
        states.append(model.reducer.state)
        output.backward()
        states.append(model.reducer.state)
    return states


@VIEWS
def test_a_step_goes_from_idle_over_armed_to_finished(ranks: RankPool, view: bool) -> None:
    for states in ranks.run(states_of_a_step, 2, view):
        assert states == ["idle", "armed", "finished", "idle", "accumulating"]


def accumulate_then_synchronise(rank: int, view: bool) -> list[dict[str, float | None]]:
    model = wrapped(view)
    seen = []
    for _ in range(2):
        with model.no_sync():
            model(local_input(rank)).backward()
            model(local_input(rank)).backward()
        seen.append(gradients(model))
        model(local_input(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad(set_to_none=False)
    return seen


@VIEWS
def test_gradients_under_no_sync_stay_local_until_the_next_synchronising_backward(ranks: RankPool, view: bool) -> None:
    for rank, seen in enumerate(ranks.run(accumulate_then_synchronise, 2, view)):
        assert seen == [everywhere(2.0 * (rank + 1)), everywhere(3 * 1.5)] * 2


def backward_over_two_forwards(rank: int, view: bool) -> dict[str, float | None]:
    model = wrapped(view)
    (model(local_input(rank)) + model(local_input(rank, 4.0))).backward()
    return gradients(model)


@VIEWS
def test_one_backward_over_several_forwards_synchronises_their_sum(ranks: RankPool, view: bool) -> None:
    for seen in ranks.run(backward_over_two_forwards, 2, view):
        assert seen == everywhere(5 * 1.5)


def a_forward_in_no_sync_behind_one_that_syncs(rank: int) -> dict[str, float | None]:
    model = wrapped()
    outside = model(local_input(rank))
    with model.no_sync():
        inside = model(local_input(rank))
    (outside + inside).backward()
    return gradients(model)


def test_a_forward_under_no_sync_does_not_take_back_what_an_earlier_one_asked_for(ranks: RankPool) -> None:
    for seen in ranks.run(a_forward_in_no_sync_behind_one_that_syncs, 2):
        assert seen == everywhere(2 * 1.5)


def backward_in_parts(rank: int, view: bool) -> tuple[str, dict[str, float | None]]:
    model = wrapped(view)
    x = local_input(rank)
    left = model(x, "left")
    right = model(x, "trunk right")
    left.backward()
    between = model.reducer.state
    right.backward()
    return between, gradients(model)


@VIEWS
def test_several_backwards_may_bring_the_gradients_of_one_window_in_parts(ranks: RankPool, view: bool) -> None:
    for between, seen in ranks.run(backward_in_parts, 2, view):
        assert between == "partial"
        assert seen == everywhere(1.5)


def used_only_under_no_sync(rank: int, view: bool) -> dict[str, float | None]:
    model = wrapped(view)
    with model.no_sync():
        model(local_input(rank)).backward()
    model(local_input(rank), "trunk right").backward()
    return gradients(model)


@VIEWS
def test_a_gradient_from_no_sync_travels_although_the_last_backward_has_none(ranks: RankPool, view: bool) -> None:
    for seen in ranks.run(used_only_under_no_sync, 2, view):
        assert seen == {"trunk": 3.0, "left": 1.5, "right": 3.0}


def late_gradient(rank: int) -> None:
    model = wrapped()
    with model.no_sync():
        model(local_input(rank)).backward()
    left, rest = model(local_input(rank), "left"), model(local_input(rank), "trunk right")
    rest.backward()
    left.backward()


def test_a_gradient_that_comes_after_its_window_closed_is_an_error(ranks: RankPool) -> None:
    for error in ranks.errors(late_gradient, 2):
        assert "parameter left (number 1, bucket" in error.message
        assert "no_sync()" in error.message


def second_backward_without_forward(rank: int) -> tuple[dict[str, float | None], list[str]]:
    model = wrapped()
    loss = model(local_input(rank))
    loss.backward(retain_graph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    return gradients(model), [str(warning.message) for warning in caught]


def test_a_second_backward_over_a_synchronised_forward_stays_local_and_says_so(ranks: RankPool) -> None:
    for rank, (seen, messages) in enumerate(ranks.run(second_backward_without_forward, 2)):
        assert seen == everywhere(1.5 + rank + 1)
        assert any("stay on this rank" in message for message in messages)


def a_kept_gradient(rank: int, view: bool) -> tuple[list[float], list[float], bool]:
    model = wrapped(view)
    for _ in range(2):  # buckets are rebuilt after the first
        model.zero_grad(set_to_none=True)
        model(local_input(rank)).backward()
    kept = model.module.trunk.grad
    model.zero_grad(set_to_none=True)
    model(local_input(rank, 10.0)).backward()
    return kept.tolist(), model.module.trunk.grad.tolist(), kept is model.module.trunk.grad


def test_a_gradient_that_somebody_keeps_is_not_overwritten_by_the_next_window(ranks: RankPool) -> None:
    assert ranks.run(a_kept_gradient, 2, False) == [([1.5] * 3, [15.0] * 3, False)] * 2


def test_with_bucket_views_a_kept_gradient_is_overwritten_as_under_torchs_ddp(ranks: RankPool) -> None:
    assert ranks.run(a_kept_gradient, 2, True) == [([15.0] * 3, [15.0] * 3, True)] * 2


def gradient_buffer_of_the_user(rank: int, steps: int) -> tuple[list[float], bool]:
    model = wrapped()
    buffer = torch.zeros(9)
    for parameter, part in zip(model.parameters(), buffer.split(3), strict=True):
        parameter.grad = part
    for _ in range(steps):
        model.zero_grad(set_to_none=False)
        model(local_input(rank)).backward()
    pairs = zip(model.parameters(), buffer.split(3), strict=True)
    return buffer.tolist(), all(parameter.grad.is_set_to(part) for parameter, part in pairs)


def test_gradients_in_memory_of_the_users_stay_there(ranks: RankPool) -> None:
    assert ranks.run(gradient_buffer_of_the_user, 2, 3) == [([1.5] * 9, True)] * 2


def same_gradient_object(rank: int) -> bool:
    model = wrapped()
    with model.no_sync():
        model(local_input(rank)).backward()
    held = model.module.trunk.grad
    model(local_input(rank)).backward()
    return held is model.module.trunk.grad and held.tolist() == [3.0] * 3


def test_a_gradient_that_the_user_refers_to_is_averaged_in_place(ranks: RankPool) -> None:
    assert ranks.run(same_gradient_object, 2) == [True, True]


def memory_of_two_steps(rank: int, view: bool, set_to_none: bool) -> tuple[int, bool]:
    model = wrapped(view)
    places = []
    for _ in range(4):
        model.zero_grad(set_to_none)
        model(local_input(rank)).backward()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    detachable = True
    try:
        model.module.trunk.grad.detach_()
    except RuntimeError:
        detachable = False
    return len({tuple(place) for place in places[1:]}), detachable  # the first step is before the rebuild


@VIEWS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_nobody_keeps_have_the_same_memory_in_every_step(
    ranks: RankPool, view: bool, set_to_none: bool
) -> None:
    for places, detachable in ranks.run(memory_of_two_steps, 2, view, set_to_none):
        assert places == 1
        assert detachable != view  # as under torch's DDP: views of buckets cannot be detached in place


def gradients_in_the_wire(rank: int) -> list[bool]:
    model = fastddp.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
    wire_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return [parameter.grad.untyped_storage().nbytes() == wire_bytes for parameter in model.parameters()]


def test_gradients_of_ordinary_layers_live_in_the_wire(ranks: RankPool) -> None:
    assert ranks.run(gradients_in_the_wire, 2) == [[True] * 4] * 2


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + 2 * self.b) * x).sum()


def for_a_choice(rank: int, wrap: Any, keeps: bool) -> list[list[list[float] | None]]:
    """The gradients after a backward for one parameter, and after one for the other."""
    model = wrap(TwoWeights(), bucket_cap_mb=1e-6)
    model(torch.ones(3)).backward()
    model.zero_grad(set_to_none=not keeps)
    loss = model(torch.full((3,), rank + 1.0))
    seen = []
    for parameter in (model.module.b, model.module.a):
        loss.backward(inputs=[parameter], retain_graph=True)
        seen.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("keeps", [False, True], ids=["gradients to none", "gradients to zero"])
def test_a_backward_for_a_choice_leaves_its_gradients_whole_until_all_have_come(ranks: RankPool, keeps: bool) -> None:
    ours = ranks.run(for_a_choice, 2, fastddp.DistributedDataParallel, keeps)
    nothing = [0.0] * 3 if keeps else None
    for rank, seen in enumerate(ours):
        assert seen == [[nothing, [2.0 * (rank + 1)] * 3], [[1.5] * 3, [3.0] * 3]]
    assert ours == ranks.run(for_a_choice, 2, TorchDDP, keeps)


def captured_on_the_way(rank: int) -> tuple[bool, list[float]]:
    model = fastddp.DistributedDataParallel(UsedThroughAView())
    captured: list[Tensor] = []
    model.module.captured = captured
    model(torch.full((3, 2), rank + 1.0)).backward()
    weight = model.module.weight
    shares_memory = weight.grad.data_ptr() == captured[0].data_ptr()
    return shares_memory, weight.grad.flatten().tolist()


class UsedThroughAView(nn.Module):
    """The gradient of the weight is a view of a gradient that user code captures."""

    captured: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        used = self.weight.view(3, 2)
        used.register_hook(lambda gradient: self.captured.append(gradient))
        return (used * x).sum()


def test_a_gradient_that_shares_memory_with_what_user_code_captured_stays_in_it(ranks: RankPool) -> None:
    for shares_memory, gradient in ranks.run(captured_on_the_way, 2):
        assert shares_memory  # as without DDP: autograd made a view of it
        assert gradient == [1.5] * 6


class SharedGradient(nn.Module):
    """Autograd hands both parameters gradients in one piece of memory, if it can."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + self.b.view(4)) * x).sum()


def shared_gradient_memory(rank: int, view: bool) -> list[list[float]]:
    model = fastddp.DistributedDataParallel(SharedGradient(), gradient_as_bucket_view=view)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((4,), rank + 1.0)).backward()
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


@VIEWS
def test_parameters_whose_gradients_share_memory_are_each_averaged_once(ranks: RankPool, view: bool) -> None:
    assert ranks.run(shared_gradient_memory, 2, view) == [[[1.5] * 4] * 2] * 2


def create_graph(rank: int, view: bool) -> list[dict[str, float | None]]:
    model = wrapped(view)
    seen = []
    for _ in range(2):
        model.zero_grad()
        loss = model(local_input(rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: it may leak memory
            loss.backward(create_graph=True)
        seen.append(gradients(model))
    # Accumulating on top of a gradient that has a graph of its own, out of place.
    loss = model(local_input(rank))
    loss.backward(create_graph=True)
    seen.append(gradients(model))
    return seen


@VIEWS
def test_backward_with_create_graph_synchronises_values(ranks: RankPool, view: bool) -> None:
    for seen in ranks.run(create_graph, 2, view):
        assert seen == [everywhere(1.5), everywhere(1.5), everywhere(3.0)]


def second_derivative(rank: int) -> float:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.constant_(model.module.weight, 3.0)
    y = model(torch.ones(1, 1)) ** 3
    (first,) = torch.autograd.grad(y, model.module.weight, create_graph=True)
    first.backward()  # d(3 w^2)/dw = 6 w, equal on all ranks
    return model.module.weight.grad.item()


def test_double_backward_through_autograd_grad_synchronises_at_its_end(ranks: RankPool) -> None:
    assert ranks.run(second_derivative, 2) == [18.0, 18.0]


def exception_in_backward(rank: int, view: bool, failing: list[int], reset: Callable[[nn.Module], None]) -> object:
    model = wrapped(view)
    model(local_input(rank)).backward()
    reset(model)
    # Backward runs from the last term to the first: right is exchanged before trunk raises.
    trunk = model.module.trunk
    first = (RaisesInBackward.apply(trunk) if rank in failing else trunk).sum()
    loss = model(local_input(rank), "left right") + first
    message = None
    try:
        loss.backward()
    except ArithmeticError as error:
        message = str(error)
    state = model.reducer.state
    # Gradients are void, and what is in flight may still write to them.
    reset(model)
    for _ in range(2):
        reset(model)
        model(local_input(rank)).backward()
    return message, state, gradients(model), model.reducer.state


def to_none(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


@VIEWS
@pytest.mark.parametrize("reset", [to_none, to_zero])
def test_the_step_after_an_exception_in_backward_is_right(
    ranks: RankPool, view: bool, reset: Callable[[nn.Module], None]
) -> None:
    for message, state, seen, end in ranks.run(exception_in_backward, 2, view, [0, 1], reset):
        assert (message, state, end) == ("in the middle of backward", "failed", "finished")
        assert seen == everywhere(1.5)


class Checkpointed(nn.Module):
    """Three layers, each recomputed in backward; or plain ones, to compare with."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def two_steps(rank: int, use_reentrant: bool | None) -> list[Tensor]:
    model = fastddp.DistributedDataParallel(Checkpointed(use_reentrant), bucket_cap_mb=0)
    gradients: list[Tensor] = []
    for scale in (1.0, 2.0):
        model.zero_grad()
        x = torch.full((2, 4), scale * (rank + 1), requires_grad=True)
        model(x).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    return gradients


def checkpointing_changes_nothing(rank: int, use_reentrant: bool) -> bool:
    checkpointed, plain = two_steps(rank, use_reentrant), two_steps(rank, None)
    return all(torch.equal(a, b) for a, b in zip(checkpointed, plain, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(ranks: RankPool, use_reentrant: bool) -> None:
    assert ranks.run(checkpointing_changes_nothing, 2, use_reentrant) == [True, True]
