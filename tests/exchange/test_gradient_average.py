"""What a rank's gradients count: their mean, their sum, or a weight of each rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks
from ranks import RankPool


def backward(model: fastddp.DistributedDataParallel, rank: int, step: int = 1) -> float:
    """The gradient behind it; rank r's own is r + 1, times the step's number."""
    model(torch.full((1, 1), (rank + 1.0) * step)).sum().backward()
    return model.module.weight.grad.item()


def wrapped(average: Any, **options: Any) -> fastddp.DistributedDataParallel:
    return fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), gradient_average=average, **options)


def of_steps(model: fastddp.DistributedDataParallel, rank: int, steps: int) -> list[float]:
    seen = []
    for step in range(1, steps + 1):
        model.zero_grad()
        seen.append(backward(model, rank, step))
    return seen


def gradient(rank: int, average: Any, hook: Any = None, **options: Any) -> list[float]:
    weight = 100_000 * (2.0 * rank + 1)  # as many tokens as a batch may have
    if average == "tensor":
        average = torch.tensor(weight)
    elif average == "callable":
        average = lambda: weight  # noqa: E731
    model = wrapped(average, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return of_steps(model, rank, 2)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("average", "expected"),
    [("mean", [2.0, 4.0]), ("sum", [6.0, 12.0]), ("tensor", [22 / 9, 44 / 9]), ("callable", [22 / 9, 44 / 9])],
)
def test_gradients_are_averaged_as_asked(ranks: RankPool, average: str, expected: list[float], view: bool) -> None:
    for seen in ranks.run(gradient, 3, average, gradient_as_bucket_view=view):
        assert seen == pytest.approx(expected, rel=1e-6)


def over_pairs(rank: int, average: str, wire: str | None) -> list[float]:
    """Of each step; four ranks, of which two at a time exchange gradients."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hook = comm_hooks.allreduce_hook if wire is None else getattr(comm_hooks, f"{wire}_compress_hook")
    source = (lambda: 2.0 * rank + 1) if average == "weight" else average
    model = wrapped(source)
    model.register_comm_hook(pairs[rank // 2], hook)
    return of_steps(model, rank, 3)


@pytest.mark.parametrize("wire", [None, "fp16"])
@pytest.mark.parametrize(
    ("average", "expected"), [("mean", [1.5, 3.5]), ("sum", [3.0, 7.0]), ("weight", [7 / 4, 43 / 12])]
)
def test_what_gradients_count_follows_from_the_ranks_that_exchange_them(
    ranks: RankPool, average: str, expected: list[float], wire: str | None
) -> None:
    for rank, seen in enumerate(ranks.run(over_pairs, 4, average, wire)):
        assert seen == pytest.approx([expected[rank // 2] * step for step in (1, 2, 3)], rel=2e-3 if wire else 1e-6)


def weight_of_its_own(rank: int) -> float:
    """Local SGD without an exchange: a weight that the other rank does not add is no error, and changes nothing."""
    state = comm_hooks.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
    model = wrapped(lambda: float(rank))
    model.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    return backward(model, rank)


def test_a_rank_that_keeps_its_gradients_keeps_them_whole_whatever_its_weight(ranks: RankPool) -> None:
    assert ranks.run(weight_of_its_own, 2) == [1.0, 2.0]


def two_losses(rank: int, **options: Any) -> list[list[float]]:
    """The gradients of two parameters, each used by a loss of its own, after each step."""
    module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    module.forward = lambda x, which: module[which](x)
    model = fastddp.DistributedDataParallel(module, gradient_average="sum", **options)
    seen = []
    for _ in range(3):
        model.zero_grad()
        losses = [model(torch.full((1, 1), rank + 1.0), which).sum() for which in (0, 1)]
        for loss in losses:
            loss.backward()
        seen.append([parameter.grad.item() for parameter in model.parameters()])
    return seen


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_sum_that_the_next_loss_does_not_use_is_not_added_up_again(ranks: RankPool, option: str) -> None:
    assert ranks.run(two_losses, 2, **{option: True}) == [[[3.0, 3.0]] * 3] * 2


def weight_of_each_step(rank: int) -> list[float]:
    tokens = torch.zeros(())
    model = wrapped(tokens)
    seen = []
    for step in range(3):
        tokens.fill_(1.0 if step == 0 else float(rank == step - 1))
        seen += of_steps(model, rank, 1)
    return seen


def sums_that_get_more(rank: int) -> list[float]:
    """Behind each of three backwards without zero_grad; before the second one there is another under no_sync."""
    model = wrapped("sum")
    seen = []
    for step in range(1, 4):
        if step == 2:
            with model.no_sync():
                backward(model, rank, step)
        seen.append(backward(model, rank, step))
    return seen


def sums_behind_their_window(rank: int) -> list[float]:
    """Two windows; behind each, two more backwards over its forward, which stay on this rank."""
    model = wrapped("sum")
    seen = []
    for _ in range(2):
        loss = model(torch.full((1, 1), rank + 1.0)).sum()
        loss.backward(retain_graph=True)
        seen.append(model.module.weight.grad.item())
        with pytest.warns(UserWarning, match="its gradients stay on this rank") if len(seen) == 1 else nullcontext():
            loss.backward(retain_graph=True)
        loss.backward()
    return seen


def test_what_stays_behind_the_window_of_a_sum_counts_in_the_next(ranks: RankPool) -> None:
    for seen in ranks.run(sums_behind_their_window, 2):
        assert seen == [3.0, 3.0 + 2 * 3.0 + 3.0]


def test_a_sum_that_gets_more_counts_once(ranks: RankPool) -> None:
    for seen in ranks.run(sums_that_get_more, 2):
        assert seen == [3.0, 3.0 + 2 * 6.0, 15.0 + 9.0]


def test_a_weight_is_read_in_every_step(ranks: RankPool) -> None:
    assert ranks.run(weight_of_each_step, 2) == [[1.5, 1.0, 2.0]] * 2


def weights_without_a_sum(rank: int, weight: float) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1), gradient_average=lambda: weight if rank == 0 else 0.0)
    model(torch.ones(1, 1))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_without_a_sum_to_divide_by_are_an_error_on_every_rank(ranks: RankPool, weight: float) -> None:
    for error in ranks.errors(weights_without_a_sum, 2, weight):
        assert error.type_name == "ValueError"
        assert f"add up to {weight} over all ranks" in error.message


class WithBuffer(nn.Module):
    """With a buffer, which ranks exchange after their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def raises() -> None:
    raise LookupError("no tokens")


def weight_that_is_none(rank: int, broken: Any) -> tuple[str, str, float]:
    """Where rank 1's weight cannot be read: the error, and the next step's gradient."""
    weights: list[Any] = [1.0, broken if rank == 1 else 1.0, 1.0]

    def weight() -> Any:
        value = weights.pop(0)
        return value() if callable(value) else value

    model = fastddp.DistributedDataParallel(WithBuffer(), gradient_average=weight)
    batch = torch.full((1, 1), rank + 1.0)
    model(batch).sum().backward()
    with pytest.raises(Exception) as caught:
        model(batch)
    model.zero_grad()
    model(batch).sum().backward()
    return type(caught.value).__name__, str(caught.value), model.module.linear.weight.grad.item()


@pytest.mark.parametrize(
    ("broken", "type_name", "text"),
    [
        (None, "TypeError", "The callable of gradient_average returned None, which is no number"),
        ("x", "TypeError", "The callable of gradient_average returned 'x', which is no number"),
        (torch.ones(2), "TypeError", "The callable of gradient_average returned tensor([1., 1.]), which is no number"),
        (raises, "LookupError", "no tokens"),
    ],
    ids=["None", "a text", "two numbers", "an exception"],
)
def test_a_weight_that_one_rank_cannot_read_is_an_error_on_every_rank(
    ranks: RankPool, broken: Any, type_name: str, text: str
) -> None:
    (zeroth, message, gradient_0), (first, complaint, gradient_1) = ranks.run(weight_that_is_none, 2, broken)
    assert (first, complaint.rstrip(".")) == (type_name, text)
    assert zeroth == "ValueError"
    assert "Where a rank cannot read its weight, it sends nan" in message
    assert gradient_0 == gradient_1 == 1.5  # the next step is right


@pytest.mark.parametrize(
    ("average", "type_name"), [("median", "ValueError"), (torch.ones(2), "ValueError"), (3, "TypeError")]
)
def test_other_choices_are_refused(ranks: RankPool, average: Any, type_name: str) -> None:
    (error,) = ranks.errors(gradient, 1, average)
    assert error.type_name == type_name
    assert "gradient_average" in error.message
    assert ("a tensor of one element or a callable" in error.message) == (not isinstance(average, Tensor))


def hook_of_the_user(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def power_sgd_and_sum(rank: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(1, 1), gradient_average="sum")
    model.register_comm_hook(comm_hooks.PowerSGDState(None, start_powerSGD_iter=2), comm_hooks.powerSGD_hook)
    for _ in range(4):
        model(torch.ones(1, 1)).sum().backward()


def test_powersgd_has_no_sum_so_both_together_are_refused(ranks: RankPool) -> None:
    (error,) = ranks.errors(power_sgd_and_sum, 1)
    assert error.type_name == "ValueError"
    assert "PowerSGD keeps what its average has lost" in error.message


def hook_and_sum(rank: int) -> tuple[str, float]:
    model = wrapped("sum")
    with pytest.raises(ValueError) as caught:
        model.register_comm_hook(None, hook_of_the_user)
    return str(caught.value), backward(model, rank)  # as if it had not been tried


def test_a_hook_decides_itself_so_both_together_are_refused(ranks: RankPool) -> None:
    for message, seen in ranks.run(hook_and_sum, 2):
        assert "scale in the hook" in message
        assert seen == 3.0
