"""Communication hooks written for torch's DDP, unchanged."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

import fastddp
from models import MODELS, inputs
from ranks import RankPool

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])


def completed(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def train(
    rank: int, make: Callable[..., nn.Module], hook: Callable[..., Any] | None, steps: int = 3, **options: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    model = make(MODELS["batch norm MLP"](), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs("batch norm MLP", rank, step)).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return gradients


def same_as_under_torch(rank: int, hook: Callable[..., Any], view: bool) -> bool:
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 100 / 2**20}
    ours = train(rank, fastddp.DistributedDataParallel, hook, **options)
    theirs = train(rank, nn.parallel.DistributedDataParallel, hook, **options)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def fp16_by_another_name(state, bucket):  # type: ignore[no-untyped-def]
    return default_hooks.fp16_compress_hook(state, bucket)


@VIEWS
@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, fp16_by_another_name])
def test_torchs_default_hooks_give_the_gradients_that_they_give_under_torch(
    ranks: RankPool, hook: Callable[..., Any], view: bool
) -> None:
    assert ranks.run(same_as_under_torch, 2, hook, view) == [True, True]


def bf16_on_gloo(rank: int) -> float:
    ours = train(rank, fastddp.DistributedDataParallel, default_hooks.bf16_compress_hook, steps=1)
    exact = train(rank, fastddp.DistributedDataParallel, None, steps=1)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True) if b.norm() > 1e-3)


def test_torchs_bf16_hook_runs_on_gloo_too(ranks: RankPool) -> None:
    assert max(ranks.run(bf16_on_gloo, 2)) < 2**-6


def power_sgd(rank: int, bucket_cap_mb: float, view: bool) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model = fastddp.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=view)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(6):
        model.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, 32)).square().sum().backward()
    return len(model._plan()), [parameter.grad.clone() for parameter in model.parameters()]


@VIEWS
def test_torchs_power_sgd_runs_with_several_buckets_and_leaves_all_ranks_with_equal_gradients(
    ranks: RankPool, view: bool
) -> None:
    (buckets, first), (_, second) = ranks.run(power_sgd, 2, 0.004, view)
    assert buckets > 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(bool(a.isfinite().all()) for a in first)


class ThreeParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (3,), (1,)))

    def forward(self) -> Tensor:
        return (self.a * 2).sum() + (self.b * 3).sum() + (self.c * 5).sum()


def what_a_hook_sees(rank: int) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    def hook(state: str, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.gradients()
        seen.append(
            {
                "state": state,
                "index": bucket.index(),
                "is_last": bucket.is_last(),
                "buffer": bucket.buffer().tolist(),
                "gradients": [gradient.tolist() for gradient in gradients],
                "parameters": [tuple(parameter.shape) for parameter in bucket.parameters()],
            }
        )
        bucket.set_buffer(bucket.buffer() * 2)
        return completed(bucket.buffer())

    model = fastddp.DistributedDataParallel(ThreeParameters(), bucket_cap_mb_list=[16 / 2**20, 100])
    model.register_comm_hook("my state", hook)
    model().backward()
    return [*seen, {"grads": [parameter.grad.flatten().tolist() for parameter in model.parameters()]}]


def test_a_hook_gets_buckets_in_order_with_unscaled_gradients_and_can_replace_the_buffer(ranks: RankPool) -> None:
    (seen,) = ranks.run(what_a_hook_sees, 1)
    assert seen == [
        {
            "state": "my state",
            "index": 0,
            "is_last": False,
            "buffer": [5.0, 3.0, 3.0, 3.0],
            "gradients": [[5.0], [3.0, 3.0, 3.0]],
            "parameters": [(1,), (3,)],
        },
        {
            "state": "my state",
            "index": 1,
            "is_last": True,
            "buffer": [2.0, 2.0, 2.0, 2.0],
            "gradients": [[[2.0, 2.0], [2.0, 2.0]]],
            "parameters": [(2, 2)],
        },
        {"grads": [[4.0] * 4, [6.0] * 3, [10.0]]},
    ]


def complex_buffer(rank: int) -> tuple[Any, ...]:
    seen = []

    def hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        seen.append((bucket.buffer().dtype, [tuple(gradient.shape) for gradient in bucket.gradients()]))
        return completed(bucket.buffer())

    model = fastddp.DistributedDataParallel(nn.Linear(3, 2, dtype=torch.complex64))
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
    return tuple(seen)


def test_a_hook_sees_complex_gradients_as_pairs_of_real_numbers(ranks: RankPool) -> None:
    assert ranks.run(complex_buffer, 1) == [((torch.float32, [(2, 2), (2, 3, 2)]),)]


def kept_buckets(rank: int) -> list[tuple[int, ...]]:
    """Shapes of complex gradients, as a bucket of the first window shows them when other buckets have replaced it."""
    kept = []

    def hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        kept.append(bucket)
        return completed(bucket.buffer())

    layers = [nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(2, 5, dtype=torch.complex64)]
    model = fastddp.DistributedDataParallel(nn.Sequential(*layers))
    model.register_comm_hook(None, hook)
    for _ in range(3):  # buckets are rebuilt when the second begins
        model(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
    del model
    gc.collect()
    return [tuple(gradient.shape) for gradient in kept[0].gradients()]


def test_a_bucket_that_a_hook_keeps_outlives_rebuilt_buckets_and_the_model(ranks: RankPool) -> None:
    assert ranks.run(kept_buckets, 1) == [[(5, 2), (5, 2, 2), (2, 2), (2, 3, 2)]]


def raising_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    if state["raises"] and bucket.index() == 1:
        raise KeyError("nothing under this key")
    return completed(bucket.buffer())


def wrong_size_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    return completed(bucket.buffer()[:-1] if state["raises"] else bucket.buffer())


def raising_later_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    def callback(future: Future[Tensor]) -> Tensor:
        if state["raises"]:
            raise OverflowError("in a callback")
        return future.value()

    return completed(bucket.buffer()).then(callback)


def none_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Any:
    return None if state["raises"] else completed(bucket.buffer())


def list_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Any:
    future: Future[Any] = Future()
    future.set_result([bucket.buffer()] if state["raises"] else bucket.buffer())
    return future


def future_of_none_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Any:
    future: Future[Any] = Future()
    future.set_result(None if state["raises"] else bucket.buffer())
    return future


def collectives_own_future_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Any:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future if state["raises"] else future.then(lambda done: done.value()[0])


def integers_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    return completed(bucket.buffer().int() if state["raises"] else bucket.buffer())


def elsewhere_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    return completed(bucket.buffer().to("meta") if state["raises"] else bucket.buffer())


def sparse_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Future[Tensor]:
    return completed(bucket.buffer().to_sparse() if state["raises"] else bucket.buffer())


def not_a_future_hook(state: dict[str, bool], bucket: dist.GradBucket) -> Any:
    return bucket.buffer() if state["raises"] else completed(bucket.buffer())


def fail_once(rank: int, hook: Callable[..., Any], view: bool) -> tuple[str, str, str, list[float]]:
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model = fastddp.DistributedDataParallel(inner, bucket_cap_mb=0, gradient_as_bucket_view=view)
    state = {"raises": True}
    model.register_comm_hook(state, hook)
    raised: BaseException | None = None
    try:
        model(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        raised = error
    after = model.reducer.state
    state["raises"] = False
    model.zero_grad(set_to_none=True)
    model(torch.ones(1, 2)).sum().backward()
    return type(raised).__name__, str(raised), after, inner[1].weight.grad.flatten().tolist()


@VIEWS
@pytest.mark.parametrize(
    ("hook", "error", "text"),
    [
        (raising_hook, "KeyError", "nothing under this key"),
        (wrong_size_hook, "RuntimeError", "returned a tensor of 3 elements"),
        (raising_later_hook, "RuntimeError", "in a callback"),
        (
            not_a_future_hook,
            "TypeError",
            "not_a_future_hook returned an object of type Tensor for bucket 0, not a torch",
        ),
        (
            none_hook,
            "TypeError",
            "hook none_hook returned an object of type NoneType for bucket 0, not a torch.futures",
        ),
        (functools.partial(none_hook), "TypeError", "hook none_hook returned an object of type NoneType for bucket 0"),
        (list_hook, "TypeError", "list_hook returned for bucket 0 holds an object of type list, not a tensor"),
        (future_of_none_hook, "TypeError", "for bucket 0 holds an object of type NoneType, not a tensor"),
        (collectives_own_future_hook, "TypeError", "_own_future_hook returned for bucket 0 holds an object of type"),
        (
            integers_hook,
            "RuntimeError",
            "integers_hook returned a tensor of 4 elements, Int, Strided, on cpu for bucket 0",
        ),
        (
            elsewhere_hook,
            "RuntimeError",
            "4 elements, Float, Strided, on meta for bucket 0, whose buffer has 4 elements",
        ),
        (sparse_hook, "RuntimeError", "returned a tensor of 4 elements, Float, Sparse, on cpu for bucket 0"),
    ],
)
def test_what_a_hook_gets_wrong_surfaces_in_backward_and_the_next_step_is_right(
    ranks: RankPool, hook: Callable[..., Any], error: str, text: str, view: bool
) -> None:
    for raised, message, state, gradient in ranks.run(fail_once, 2, hook, view):
        assert raised == error
        assert text in message
        assert state == "failed"
        assert gradient == pytest.approx([gradient[0], gradient[1]] * 2)


def register(rank: int, hook: Any, times: int) -> None:
    model = fastddp.DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(times):
        model.register_comm_hook(None, hook)


def wrongly_annotated_hook(state: object, bucket: int) -> Future[Tensor]:
    raise AssertionError


def wrongly_returning_hook(state: object, bucket: dist.GradBucket) -> int:
    raise AssertionError


@pytest.mark.parametrize(
    ("hook", "times", "type_name", "text"),
    [
        ("not callable", 1, "TypeError", "must be callable"),
        ("wrong bucket", 1, "ValueError", "torch.distributed.GradBucket"),
        ("wrong return", 1, "ValueError", "torch.futures.Future"),
        ("twice", 2, "RuntimeError", "already registered"),
    ],
)
def test_a_hook_that_cannot_be_one_is_refused(
    ranks: RankPool, hook: str, times: int, type_name: str, text: str
) -> None:
    hooks: dict[str, Any] = {
        "not callable": 3,
        "wrong bucket": wrongly_annotated_hook,
        "wrong return": wrongly_returning_hook,
        "twice": default_hooks.allreduce_hook,
    }
    (error,) = ranks.errors(register, 1, hooks[hook], times)
    assert error.type_name == type_name
    assert text in error.message


def collective_in_a_callback(rank: int) -> float:
    """A hook's second collective is started when the first is done: at once on rank 0, some time later on rank 1."""

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        if rank == 1:
            time.sleep(0.3)
        (tensor,) = future.value()
        dist.all_reduce(tensor)
        return tensor

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        if rank == 0:
            future.wait()
        return future.then(again)

    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()


def test_nothing_of_fastddps_is_started_among_what_a_hook_starts_in_callbacks(ranks: RankPool) -> None:
    assert ranks.run(collective_in_a_callback, 2) == [2 * (1.0 + 2.0)] * 2
