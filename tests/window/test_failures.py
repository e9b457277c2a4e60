"""Windows that fail: what the rank says on which backward raised, what the others say, and how all go on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fake_cuda
import fastddp
from fastddp import _C, comm_hooks
from fastddp.comm_hooks import PowerSGDState, powerSGD_hook
from models import RaisesInBackward
from program_execution import averages
from ranks import RankPool
from test_windows import TwoHeads, everywhere, gradients, local_input, wrapped


class Network(nn.Module):
    """Matrices that PowerSGD compresses, a head that a step may leave out, and an embedding."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(5, 16, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 16)

    def forward(self, words: Tensor, fails: bool, with_head: bool = True) -> Tensor:
        # Backward runs from the last call to the first: it reaches the head and the layers before this.
        first = RaisesInBackward.apply(self.words.weight).sum() if fails else self.words(words).sum()
        value = self.layers(self.words(words))
        if with_head:
            value = self.head(value)
        return value.sum() + first


EXCHANGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "views": {"gradient_as_bucket_view": True},
    "bf16": {"hook": (None, comm_hooks.bf16_compress_hook)},
    "fp16, sums in the wire": {"hook": (comm_hooks.CompressState(accumulate="wire"), comm_hooks.fp16_compress_hook)},
    "hook": {"hook": (None, averages)},
    "powersgd": {"power_sgd": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "sum": {"gradient_average": "sum"},
    "weight": {"gradient_average": torch.ones(1)},
    "sparse": {"sparse": True},
}


def build(settings: dict[str, Any]) -> fastddp.DistributedDataParallel:
    options = dict(settings)
    hook, power_sgd = options.pop("hook", None), options.pop("power_sgd", False)
    model = fastddp.DistributedDataParallel(Network(options.pop("sparse", False)), bucket_cap_mb=0, **options)
    if power_sgd:
        hook = (PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    if hook is not None:
        model.register_comm_hook(*hook)
    return model


def training(rank: int, settings: dict[str, Any], failing_step: int) -> dict[str, Any]:
    """Six steps; in one of them rank 0's backward raises in its middle. The loop catches whatever backward raises."""
    model = build(settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    words = torch.tensor([rank, rank + 1])
    errors, said = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            optimizer.zero_grad()
            loss = model(words, rank == 0 and step == failing_step)
            try:
                loss.backward()
            except (ArithmeticError, RuntimeError) as error:
                errors.append((step, type(error).__name__, str(error)))
                with pytest.raises(RuntimeError, match="An optimizer was about to use them"):
                    optimizer.step()
                continue
            optimizer.step()
        said = [str(warning.message) for warning in caught if "fastddp" in str(warning.message)]
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"errors": errors, "said": said, "values": values}


@pytest.mark.parametrize("failing_step", [0, 3])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_where_one_rank_fails_all_do_and_replicas_stay_alike(ranks: RankPool, exchange: str, failing_step: int) -> None:
    failed, healthy = ranks.run(training, 2, EXCHANGES[exchange], failing_step)
    assert failed["errors"] == [(failing_step, "ArithmeticError", "in the middle of backward")]
    (warning,) = failed["said"]
    where = f"the backward of synchronised step {failing_step + 1}"
    assert f"{where} raised (in the middle of backward) on rank 0" in warning
    ((step, kind, message),) = healthy["errors"]
    assert (step, kind) == (failing_step, "RuntimeError")
    assert f"{where} failed on rank 0" in message
    assert "rank 1 too" in message
    assert healthy["said"] == []
    assert torch.isfinite(failed["values"]).all()
    assert torch.equal(failed["values"], healthy["values"])


def left_and_right_then_trunk(model: nn.Module, rank: int, fails: bool) -> Tensor:
    """Backward runs from the last term to the first: `right` and `left` are exchanged before `trunk` raises."""
    trunk = (RaisesInBackward.apply(model.module.trunk) if fails else model.module.trunk).sum()
    return model(local_input(rank), "left right") + trunk


def two_fail(rank: int) -> str:
    model = wrapped()
    loss = left_and_right_then_trunk(model, rank, fails=rank > 0)
    with pytest.raises((ArithmeticError, RuntimeError)) as caught:
        loss.backward()
    model.zero_grad()
    model(local_input(rank)).backward()
    assert gradients(model) == everywhere(2.0)
    return str(caught.value)


def test_where_several_ranks_fail_the_others_say_so(ranks: RankPool) -> None:
    assert "failed on several ranks" in ranks.run(two_fail, 3)[0]


def on_a_device(rank: int, notices: str) -> tuple[str, dict[str, float | None]]:
    """No host waits, so rank 1 has ended its backward when it gets to know of rank 0's. What it says then."""
    fake_cuda.schedule("lazy")
    model = fastddp.DistributedDataParallel(TwoHeads().to(fake_cuda.DEVICE), bucket_cap_mb=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = local_input(rank).to(fake_cuda.DEVICE)
    trunk = (RaisesInBackward.apply(model.module.trunk) if rank == 0 else model.module.trunk).sum()
    loss = trunk + model(x, "left right")
    said = ""
    if rank == 0:
        with pytest.raises(ArithmeticError):
            loss.backward()
        with pytest.warns(UserWarning, match="on rank 0"), torch.no_grad():
            model(x)
    else:
        loss.backward()
        if notices == "forward after one under no_sync":  # which ends the window: that of the failure is none any more
            with model.no_sync():
                model(x)
        fake_cuda.synchronize()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step() if notices == "optimizer" else model(x)
        said = str(caught.value)
    model.zero_grad()
    model(x).backward()
    optimizer.step()
    return said, gradients(model)


@pytest.mark.parametrize("notices", ["optimizer", "forward", "forward after one under no_sync"])
def test_on_a_device_the_next_step_or_forward_says_once_that_another_rank_has_failed(
    simulated_ranks: RankPool, notices: str
) -> None:
    (_, failed), (said, healthy) = simulated_ranks.run(on_a_device, 2, notices)
    assert "the backward of synchronised step 1 failed on rank 0" in said
    assert "On this device that is known only now" in said
    assert failed == healthy == everywhere(1.5)


def nobody_waits(rank: int) -> str:
    """Rank 1 begins its backward when rank 0 has its exception in hand."""
    model = wrapped()
    model(local_input(rank)).backward()
    model.zero_grad()
    store = dist.distributed_c10d._get_default_store()
    loss = left_and_right_then_trunk(model, rank, fails=rank == 0)
    if rank == 0:
        with pytest.raises(ArithmeticError):
            loss.backward()
        store.set("raised", "")
    else:
        store.wait(["raised"])
        with pytest.raises(RuntimeError, match="failed on rank 0"):
            loss.backward()
    model.zero_grad()
    model(local_input(rank)).backward()
    return str(gradients(model))


def test_an_exception_reaches_its_caller_although_other_ranks_have_not_come(ranks: RankPool) -> None:
    assert ranks.run(nobody_waits, 2) == [str(everywhere(1.5))] * 2


def zeroed_in_place(rank: int, view: bool) -> dict[str, float | None]:
    """What was on its way when backward raised arrives after the caller has set gradients to zero."""
    model = wrapped(view)
    model(local_input(rank)).backward()
    model.zero_grad(set_to_none=False)
    with pytest.raises(ArithmeticError if rank == 0 else RuntimeError):
        left_and_right_then_trunk(model, rank, fails=rank == 0).backward()
    model.zero_grad(set_to_none=False)
    model(local_input(rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_the_caller_has_zeroed_stay_zero(ranks: RankPool, view: bool) -> None:
    assert ranks.run(zeroed_in_place, 2, view) == [everywhere(1.5)] * 2


class RaisesFirst(nn.Module):
    """Its last layer raises in backward before any parameter has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, value: Tensor, fails: bool) -> Tensor:
        value = self.layer(value)
        return (RaisesInBackward.apply(value) if fails else value.clone()).clone()


def before_the_first_gradient(rank: int) -> list[float]:
    model = fastddp.DistributedDataParallel(RaisesFirst())
    seen = []
    for step in range(4):
        model.zero_grad()
        loss = model(torch.full((1, 1), 10.0 * step + rank), step == 1 and rank == 0).sum()
        if step == 1:
            with pytest.raises((ArithmeticError, RuntimeError)):
                loss.backward()
            continue
        loss.backward()
        seen.append(model.module.layer.weight.grad.item())
    return seen


def test_an_exception_before_the_first_gradient_leaves_no_rank_a_window_behind(ranks: RankPool) -> None:
    assert ranks.run(before_the_first_gradient, 2) == [[0.5, 20.5, 30.5]] * 2


def before_the_model(rank: int, extra_forward: bool) -> list[object]:
    """Step 1 raises on rank 0 in the backward of the loss: nothing has reached the model."""
    model = fastddp.DistributedDataParallel(RaisesFirst())
    seen: list[object] = []
    for step in range(5):
        model.zero_grad()
        if extra_forward and rank == 0:
            model(torch.ones(1, 1), False)
        output = model(torch.full((1, 1), 10.0 * step + rank), False)
        loss = (RaisesInBackward.apply(output) if step == 1 and rank == 0 and not extra_forward else output).sum()
        try:
            loss.backward()
            seen.append(model.module.layer.weight.grad.item())
        except ArithmeticError:
            seen.append("raised")
        except RuntimeError as error:
            seen.append(str(error))
    if not extra_forward and rank == 0:  # it has lost one
        model.zero_grad()
        model(torch.full((1, 1), 10.0 * 5), False).sum().backward()
        seen.append(model.module.layer.weight.grad.item())
    return seen


def test_an_exception_before_the_model_is_noticed_in_the_next_backward_of_that_rank(ranks: RankPool) -> None:
    failed, healthy = ranks.run(before_the_model, 2, False)
    assert failed[:2] == [0.5, "raised"]
    assert healthy[0] == 0.5
    for message in (failed[2], healthy[1]):
        assert "of synchronised step 2 had not the same number of forwards on all ranks" in message
        assert "raised on rank 0 before it reached the model" in message


def test_more_forwards_on_one_rank_are_no_error_as_long_as_no_backward_is_lost(ranks: RankPool) -> None:
    assert ranks.run(before_the_model, 2, True) == [[0.5, 10.5, 20.5, 30.5, 40.5]] * 2


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


def backward_that_waits(model: nn.Module, rank: int) -> threading.Thread:
    """A thread whose backward has gradients for `left` and `right`, and waits with that for `trunk`."""
    Waits.runs.clear()
    Waits.may_end.clear()
    trunk = (Waits.apply(model.module.trunk) * local_input(rank)).sum()
    loss = trunk + model(local_input(rank), "left right")
    thread = threading.Thread(target=loss.backward)
    thread.start()
    assert Waits.runs.wait(60)
    return thread


def evaluation_during_backward(rank: int) -> tuple[str, dict[str, float | None]]:
    """This thread has called the forward, another one runs backward, and this one evaluates meanwhile."""
    model = wrapped()
    thread = backward_that_waits(model, rank)
    with torch.no_grad():
        model(local_input(rank))
    state = model.reducer.state
    Waits.may_end.set()
    thread.join()
    return state, gradients(model)


def test_a_forward_without_gradients_leaves_the_backward_of_another_thread_alone(ranks: RankPool) -> None:
    assert ranks.run(evaluation_during_backward, 2) == [("reducing", everywhere(1.5))] * 2


def next_forward_during_backward(rank: int) -> list[dict[str, float | None]]:
    model = wrapped()
    thread = backward_that_waits(model, rank)
    threading.Timer(0.2, Waits.may_end.set).start()
    next_loss = model(local_input(rank, 2.0))  # waits
    thread.join()
    seen = [gradients(model)]
    model.zero_grad()
    next_loss.backward()
    return [*seen, gradients(model)]


def test_a_forward_that_is_to_be_trained_waits_for_the_backward_of_another_thread(ranks: RankPool) -> None:
    assert ranks.run(next_forward_during_backward, 2) == [[everywhere(1.5), everywhere(3.0)]] * 2


def foreign_dtype(rank: int, dtype: torch.dtype) -> str:
    """Somebody has put errors of another dtype into PowerSGD's state; from integers no gradient can be taken out."""
    model = build({})
    state = PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    words = torch.tensor([0, 1])
    for _ in range(3):
        model(words, False).backward()
    for error in state.errors.values():
        error.data = error.data.to(dtype)
    with pytest.raises(Exception) as caught:
        model(words, fails=True).backward()
    return f"{model.reducer.state} {type(caught.value).__name__}"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_what_cannot_be_given_back_aborts_nothing(ranks: RankPool, dtype: torch.dtype) -> None:
    for answer in ranks.run(foreign_dtype, 2, dtype):
        assert answer.startswith("failed ")


QUESTIONS: dict[str, Callable[[fastddp.DistributedDataParallel], object]] = {
    "windows": lambda model: model.reducer.windows(),
    "missing": lambda model: model.reducer.missing(),
    "state": lambda model: model.reducer.state,
    "report": lambda model: model.step_report(),
    "order": lambda model: model.reducer.arrival_order(),
    "evaluation": lambda model: model(torch.ones(3)).item(),
}


def asking(rank: int, place: str, question: str) -> bool:
    model = wrapped()
    answers = []

    def ask() -> None:
        with torch.no_grad():
            answers.append(QUESTIONS[question](model))

    def ask_on_two_threads() -> None:
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    def asking_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        ask_on_two_threads()
        return averages(state, bucket)

    def value_of(future: torch.futures.Future[Tensor]) -> Tensor:
        ask()
        return future.value()

    if place == "hook":
        model.register_comm_hook(None, asking_hook)
    elif place == "callback of a future":
        model.register_comm_hook(None, lambda state, bucket: averages(state, bucket).then(value_of))
    else:
        model.reducer.on_averaged(lambda parameters: ask_on_two_threads())
    model(local_input(rank)).backward()
    return len(answers) >= 3 and gradients(model) == everywhere(1.5)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("place", ["hook", "callback of a future", "averaged"])
def test_code_of_users_may_ask_the_model_anything(ranks: RankPool, place: str, question: str) -> None:
    assert ranks.run(asking, 2, place, question) == [True, True]


def replaced_in_a_hook(rank: int) -> str:
    model = wrapped()
    errors = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        try:
            model.reducer.set_exchange(_C.Exchange.noop())
        except RuntimeError as error:
            errors.append(str(error))
        return averages(state, bucket)

    model.register_comm_hook(None, hook)
    model(local_input(rank)).backward()
    assert gradients(model) == everywhere(1.5)
    return errors[0]


def test_what_a_hook_may_not_do_is_an_error(ranks: RankPool) -> None:
    assert "between two windows only" in ranks.run(replaced_in_a_hook, 2)[0]
