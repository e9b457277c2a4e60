"""Windows that fail: what the rank says on which backward raised, what the others say, and how all go on."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import _C
from fastddp.comm_hooks import PowerSGDState, powerSGD_hook
from hooks_by_name import averages
from models import RaisesInBackward
from on_ranks import Wrap, on_ranks, same_under_both
from parts import Parts, gradients, local_input, step, wrapped


@pytest.mark.parametrize("failing_step", [0, 3])
@on_ranks(2)
def test_where_one_rank_fails_all_do_and_replicas_stay_alike(rank: int, failing_step: int) -> None:
    """In one of six steps rank 0's backward raises in its middle. The loop catches whatever backward raises."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    where, middle = f"the backward of synchronised step {failing_step + 1}", "in the middle of backward"
    warns = pytest.warns(UserWarning, match=rf"{where} raised \({middle}\) on rank 0")
    of_others = pytest.raises(RuntimeError, match=f"{where} failed on rank 0(.|\n)*rank 1 too")
    raises = of_others if rank else pytest.raises(ArithmeticError, match=middle)
    warnings.simplefilter("error", UserWarning)
    for number in range(6):
        fails = number == failing_step
        optimizer.zero_grad()
        with warns if (rank, number) == (0, failing_step + 1) else nullcontext():
            loss = model(local_input(rank), fails=fails and rank == 0)
        with raises if fails else nullcontext():
            loss.backward()
        with pytest.raises(RuntimeError, match="An optimizer was about to use them") if fails else nullcontext():
            optimizer.step()
    torch.testing.assert_close([*model.parameters()], [torch.full((3,), 1 - 5 * 0.01 * 1.5)] * 3)


@on_ranks(3)
def test_where_several_ranks_fail_the_others_say_so(rank: int) -> None:
    model = wrapped()
    error = pytest.raises(ArithmeticError) if rank else pytest.raises(RuntimeError, match="failed on several ranks")
    with error:
        model(local_input(rank), fails=rank > 0).backward()
    assert step(model, rank) == [2.0] * 3


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("failing", [[0], [0, 1]], ids=str)
@on_ranks(2)
def test_gradients_that_the_caller_has_zeroed_stay_zero(rank: int, failing: list[int], view: bool) -> None:
    """What was on its way when backward raised arrives after that."""
    model = wrapped(gradient_as_bucket_view=view)
    model(local_input(rank)).backward()
    model.zero_grad(set_to_none=False)
    loss = model(local_input(rank), fails=rank in failing)
    with pytest.raises(ArithmeticError if rank in failing else RuntimeError):
        loss.backward()
    assert model.reducer.state == "failed"
    assert step(model, rank, set_to_none=False) == [1.5] * 3


@pytest.mark.parametrize("notices", ["optimizer", "forward after one under no_sync"])
@on_ranks(2, pool="simulated_ranks")
def test_on_a_device_the_next_step_or_forward_says_once_that_another_rank_has_failed(rank: int, notices: str) -> None:
    """No host waits, so rank 1 has ended its backward when it gets to know of rank 0's."""
    fake_cuda.schedule("lazy")
    model = wrapped(Parts().to(fake_cuda.DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = local_input(rank).detach().to(fake_cuda.DEVICE)
    loss = model(x, fails=rank == 0)
    if rank == 0:
        with pytest.raises(ArithmeticError):
            loss.backward()
        with pytest.warns(UserWarning, match="on rank 0"), torch.no_grad():
            model(x)
    else:
        loss.backward()
        if notices != "optimizer":  # this forward ends the window: that of the failure is none any more
            with model.no_sync():
                model(x)
        fake_cuda.synchronize()
        said = r"the backward of synchronised step 1 failed on rank 0(.|\n)*On this device that is known only now"
        with pytest.raises(RuntimeError, match=said):
            optimizer.step() if notices == "optimizer" else model(x)
    model.zero_grad()
    model(x).backward()
    optimizer.step()
    assert gradients(model) == [1.5] * 3


@on_ranks(2)
def test_an_exception_reaches_its_caller_although_other_ranks_have_not_come(rank: int) -> None:
    """Rank 1 begins its backward when rank 0 has its exception in hand."""
    model = wrapped()
    step(model, rank)
    model.zero_grad()
    store = dist.distributed_c10d._get_default_store()
    loss = model(local_input(rank), fails=rank == 0)
    if rank == 1:
        store.wait(["raised"])
    with pytest.raises(ArithmeticError if rank == 0 else RuntimeError):
        loss.backward()
    if rank == 0:
        store.set("raised", "")
    assert step(model, rank) == [1.5] * 3


# ------------------------------------------------------------------------------------------------------ ranks in step

WRAPPERS: dict[str, Any] = {"wrapper": fastddp.DistributedDataParallel, "in place": fastddp.replicate}


def raises_before_the_model(model: Any, optimizer: Any, rank: int) -> None:
    with pytest.raises(ArithmeticError):
        RaisesInBackward.apply(model(local_input(rank))).backward()


def has_no_graph(model: Any, optimizer: Any, rank: int) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(local_input(rank)).detach().backward()


def reaches_no_parameter(model: Any, optimizer: Any, rank: int) -> None:
    (model(local_input(rank)).detach() * torch.ones(1, requires_grad=True)).backward()
    optimizer.step()


@pytest.mark.parametrize("late", [raises_before_the_model, has_no_graph, reaches_no_parameter])
@pytest.mark.parametrize("way", list(WRAPPERS))
@on_ranks(2)
def test_a_rank_that_has_missed_a_step_is_named(rank: int, way: str, late: Any) -> None:
    """In step 2 rank 0 takes no part. Its third step meets the second one of rank 1."""
    model = WRAPPERS[way](Parts(), bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    said: list[Any] = []
    for number in range(5):
        optimizer.zero_grad()
        if (rank, number) == (0, 1):
            late(model, optimizer, rank)
            continue
        if (rank, number) == (1, 4):
            break
        try:
            model(local_input(rank)).backward()
            said.append(gradients(model))
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    assert said[0] == said[2] == said[3] == [1.5] * 3
    assert "synchronised step 2 met another step of other ranks: an earlier backward on rank 0 has raised" in said[1]


def forward_more(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    if rank == 0:
        model(local_input(rank))  # a sample for the log
    other(torch.ones(2)).sum().backward()  # the critic


def saliency(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad(other(x).sum(), x)
        model(local_input(rank))


def attack(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    for _ in range(1 + rank):
        x = local_input(rank)
        torch.autograd.grad(model(x).sum(), x)


def raises_elsewhere(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    if rank == 0:
        model(local_input(rank))
        with pytest.raises(ArithmeticError):
            RaisesInBackward.apply(other(torch.ones(2))).sum().backward()


def steps_twice(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    other(torch.ones(2)).sum().backward()
    optimizer.step()


def steps_once_more(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    if rank == 0:
        steps_twice(model, optimizer, other, rank)


def steps_once_more_with_nothing(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    optimizer.zero_grad()
    if rank == 0:
        optimizer.step()


def all_skip(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    optimizer.zero_grad()
    model(local_input(rank))
    optimizer.step()


def trains_another(model: Any, optimizer: Any, other: Any, rank: int) -> None:
    optimizer.zero_grad()
    other(model(local_input(rank)).detach().expand(2)).sum().backward()
    optimizer.step()


INNOCENT = [forward_more, saliency, attack, raises_elsewhere, steps_twice, steps_once_more, all_skip, trains_another]
INNOCENT += [steps_once_more_with_nothing]


@pytest.mark.parametrize("what", INNOCENT)
@pytest.mark.parametrize("way", list(WRAPPERS))
@on_ranks(2)
def test_ranks_that_are_in_step_are_told_nothing(rank: int, way: str, what: Any) -> None:
    model, other = WRAPPERS[way](Parts(), bucket_cap_mb=0), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    warnings.simplefilter("error")
    for _ in range(4):
        optimizer.zero_grad()
        model(local_input(rank)).backward()
        assert gradients(model) == [1.5] * 3
        optimizer.step()
        what(model, optimizer, other, rank)


@on_ranks(2)
def test_no_later_backward_takes_the_place_of_one_that_has_raised(rank: int) -> None:
    model = wrapped()
    for _ in range(2):
        model.zero_grad()
        raises_before_the_model(model, None, rank)
        with model.no_sync():
            model(local_input(rank)).backward()
        assert gradients(model) == [rank + 1.0] * 3
        assert step(model, rank) == [1.5] * 3


# ----------------------------------------------------------------------------------------- other threads, users' code


class Waits(torch.autograd.Function):
    """Identity whose backward tells that it runs and waits to be allowed to end."""

    runs, may_end = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Waits.runs.set()
        assert Waits.may_end.wait(60)
        return gradient


@on_ranks(2)
def test_a_forward_leaves_the_backward_of_another_thread_alone_or_waits_for_it(rank: int) -> None:
    """A thread's backward has gradients for `b` and `c`, and waits with that for `a`."""
    model = wrapped()
    Waits.runs.clear()
    Waits.may_end.clear()
    loss = (Waits.apply(model.module.a) * local_input(rank)).sum() + model(local_input(rank), "bc")
    thread = threading.Thread(target=loss.backward)
    thread.start()
    assert Waits.runs.wait(60)
    with torch.no_grad():
        model(local_input(rank))
    assert model.reducer.state == "reducing"
    threading.Timer(0.1, Waits.may_end.set).start()
    next_loss = model(local_input(rank, 2.0))  # which is to be trained: it waits
    thread.join()
    assert gradients(model) == [1.5] * 3
    model.zero_grad()
    next_loss.backward()
    assert gradients(model) == [3.0] * 3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
@on_ranks(2)
def test_what_cannot_be_given_back_aborts_nothing(rank: int, dtype: torch.dtype) -> None:
    """Somebody has put errors of another dtype into PowerSGD's state; from integers no gradient can be taken out."""
    model = wrapped(nn.Sequential(nn.Linear(16, 16), nn.Identity(), nn.Linear(16, 16)))
    state = PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()
    for error in state.errors.values():
        error.data = error.data.to(dtype)
    model.module[1].register_forward_hook(lambda module, inputs, output: RaisesInBackward.apply(output))
    with pytest.raises(Exception):  # noqa: B017
        model(torch.ones(2, 16)).sum().backward()
    assert model.reducer.state == "failed"


@pytest.mark.parametrize("place", ["hook", "callback of a future", "averaged"])
@on_ranks(2)
def test_code_of_users_may_ask_the_model_anything(rank: int, place: str) -> None:
    """In each bucket, on two threads or where a future calls back."""
    model = wrapped()
    reducer, answers = model.reducer, []

    def ask() -> None:
        with torch.no_grad():
            model(torch.ones(3))
        answers.append((reducer.windows(), reducer.missing(), reducer.state, reducer.arrival_order()))
        model.step_report()

    def ask_on_two_threads() -> None:
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    def asking_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        ask_on_two_threads()
        with pytest.raises(RuntimeError, match="between two windows only"):
            reducer.set_way(_C.Way.nowhere())
        return averages(state, bucket)

    def value_of(future: torch.futures.Future[Tensor]) -> Tensor:
        ask()
        return future.value()

    if place == "hook":
        model.register_comm_hook(None, asking_hook)
    elif place == "callback of a future":
        model.register_comm_hook(None, lambda state, bucket: averages(state, bucket).then(value_of))
    else:
        reducer.on_averaged(lambda parameters: ask_on_two_threads())
    assert step(model, rank) == [1.5] * 3
    assert len(answers) >= 3


# ------------------------------------------------------------------------------------------------------- loss scales


@pytest.mark.parametrize("difference", ["loaded", "disabled", "none", "equal"])
@on_ranks(2)
def test_losses_that_ranks_scale_by_different_numbers_are_named(rank: int, difference: str) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=difference != "disabled" or rank == 0)
    if difference == "loaded" and rank == 1:
        scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
    loss = model(torch.ones(1, 2)).sum()
    scaled = loss if difference == "none" and rank == 1 else scaler.scale(loss)
    torch.amp.GradScaler("cpu", init_scale=2.0).scale(torch.ones(1, requires_grad=True).sum())  # of something else
    named = pytest.raises(RuntimeError, match="scaled by different numbers on different ranks")
    with named if difference != "equal" else nullcontext():
        scaled.backward()


@same_under_both()
def test_a_model_hears_of_the_scaler_of_its_own_loss_alone(wrap: Wrap, rank: int) -> Any:
    model, critic = wrap(nn.Linear(2, 2)), nn.Linear(2, 1)  # the critic is of this rank alone
    scaler, of_critic = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 4.0 + rank))
    for number in range(4):
        loss = model(torch.full((1, 2), 1.0 + rank)).sum()
        losses = [scaler.scale(loss) if number < 2 else loss, of_critic.scale(critic(torch.ones(1, 2)).sum())]
        for one in losses if number % 2 else reversed(losses):
            one.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]
