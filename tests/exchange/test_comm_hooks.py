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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

import fastddp
from on_ranks import on_ranks

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket views"])


def completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ThreeParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (3,), (1,)))

    def forward(self) -> Tensor:
        return (self.a * 2).sum() + (self.b * 3).sum() + (self.c * 5).sum()


@on_ranks(1)
def test_a_hook_gets_buckets_in_order_with_unscaled_gradients_and_can_replace_the_buffer(rank: int) -> None:
    def hook(seen: list[Any], bucket: dist.GradBucket) -> Future[Tensor]:
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        gradients = [gradient.tolist() for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().tolist(), gradients, shapes))
        bucket.set_buffer(bucket.buffer() * 2)
        return completed(bucket.buffer())

    model = fastddp.DistributedDataParallel(ThreeParameters(), bucket_cap_mb_list=[16 / 2**20, 100])
    seen: list[Any] = []
    model.register_comm_hook(seen, hook)
    model().backward()
    assert seen == [
        (0, False, [5.0, 3.0, 3.0, 3.0], [[5.0], [3.0, 3.0, 3.0]], [(1,), (3,)]),
        (1, True, [2.0, 2.0, 2.0, 2.0], [[[2.0, 2.0], [2.0, 2.0]]], [(2, 2)]),
    ]
    assert [parameter.grad.flatten().tolist() for parameter in model.parameters()] == [[4.0] * 4, [6.0] * 3, [10.0]]


@on_ranks(1)
def test_a_bucket_that_a_hook_keeps_outlives_rebuilt_buckets_and_the_model(rank: int) -> None:
    """It is one of complex gradients, which a hook sees as pairs of real numbers."""

    def hook(kept: list[dist.GradBucket], bucket: dist.GradBucket) -> Future[Tensor]:
        assert bucket.buffer().dtype == torch.float32
        kept.append(bucket)
        return completed(bucket.buffer())

    layers = [nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(2, 5, dtype=torch.complex64)]
    model = fastddp.DistributedDataParallel(nn.Sequential(*layers))
    kept: list[dist.GradBucket] = []
    model.register_comm_hook(kept, hook)
    for _ in range(3):  # buckets are rebuilt when the second begins
        model(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
    del model
    gc.collect()
    assert [tuple(gradient.shape) for gradient in kept[0].gradients()] == [(5, 2), (5, 2, 2), (2, 2), (2, 3, 2)]


def raises(bucket: dist.GradBucket) -> Any:
    if bucket.index() == 1:
        raise KeyError("nothing under this key")
    return completed(bucket.buffer())


def raises_later(bucket: dist.GradBucket) -> Any:
    def callback(future: Future[Tensor]) -> Tensor:
        raise OverflowError("in a callback")

    return completed(bucket.buffer()).then(callback)


# What a hook does in a window, as which exception that surfaces, and with which words.
MISTAKES: dict[str, tuple[Callable[[dist.GradBucket], Any], type[Exception], str]] = {
    "raises": (raises, KeyError, "nothing under this key"),
    "raises later": (raises_later, RuntimeError, "in a callback"),
    "no future": (lambda b: b.buffer(), TypeError, "wrong returned an object of type Tensor for bucket 0"),
    "list": (lambda b: completed([b.buffer()]), TypeError, "for bucket 0 holds an object of type list"),
    "future of None": (lambda b: completed(None), TypeError, "for bucket 0 holds an object of type NoneType"),
    "wrong size": (lambda b: completed(b.buffer()[:-1]), RuntimeError, "returned a tensor of 3 elements"),
    "integers": (lambda b: completed(b.buffer().int()), RuntimeError, "4 elements, Int, Strided, on cpu"),
    "elsewhere": (lambda b: completed(b.buffer().to("meta")), RuntimeError, "on meta for bucket 0, whose buffer has 4"),
    "sparse": (lambda b: completed(b.buffer().to_sparse()), RuntimeError, "4 elements, Float, Sparse, on cpu"),
}


def wrong(mistakes: list[str], bucket: dist.GradBucket) -> Any:
    return MISTAKES[mistakes[0]][0](bucket) if mistakes else completed(bucket.buffer())


@VIEWS
@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(2)
def test_what_a_hook_gets_wrong_surfaces_in_backward_and_the_next_step_is_right(
    rank: int, mistake: str, view: bool
) -> None:
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model = fastddp.DistributedDataParallel(layers, bucket_cap_mb=0, gradient_as_bucket_view=view)
    mistakes = [mistake]
    model.register_comm_hook(mistakes, functools.partial(wrong) if view else wrong)  # named alike
    _, error, text = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        model(torch.ones(1, 2)).sum().backward()
    assert type(caught.value) is error
    assert text in str(caught.value)
    assert model.reducer.state == "failed"
    mistakes.clear()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    hidden = layers[0](torch.ones(1, 2))
    torch.testing.assert_close(layers[1].weight.grad, hidden.expand(2, 2))


@on_ranks(1)
def test_a_hook_that_cannot_be_one_is_refused(rank: int) -> None:
    def not_of_a_bucket(state: object, bucket: int) -> Future[Tensor]:
        raise AssertionError

    def not_of_a_future(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError

    model = fastddp.DistributedDataParallel(nn.Linear(2, 2))
    hooks: list[Any] = [3, not_of_a_bucket, not_of_a_future, default_hooks.allreduce_hook]
    texts = ["must be callable", "torch.distributed.GradBucket", "torch.futures.Future", "already registered"]
    for hook, text in zip(hooks, texts, strict=True):
        if text == "already registered":
            model.register_comm_hook(None, hook)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
            model.register_comm_hook(None, hook)


@on_ranks(2)
def test_nothing_of_fastddps_is_started_among_what_a_hook_starts_in_callbacks(rank: int) -> None:
    """A hook's second collective is started when the first is done: at once on rank 0, some time later on rank 1."""

    def again(future: Future[list[Tensor]]) -> Tensor:
        if rank == 1:
            time.sleep(0.3)
        (tensor,) = future.value()
        dist.all_reduce(tensor)
        return tensor

    def hook(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        if rank == 0:
            future.wait()
        return future.then(again)

    model = fastddp.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.item() == 2 * (1.0 + 2.0)
