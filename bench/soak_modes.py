"""The ways of training that `bench.soak` runs for long, each a function that makes one step of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from fastddp import comm_hooks

WIDTH = 64
FAILS_EVERY = 10  # steps

Step = Callable[[int], None]  # takes the step's number


class Layers(nn.Module):
    """A stack of layers, of which a forward may leave some out; parameters in several buckets, 0.1 MB in all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, left_out: Iterable[int] = (), fails_behind: int | None = None) -> Tensor:
        """From and to (batch, WIDTH); backward raises when it comes to layer `fails_behind`."""
        for number, layer in enumerate(self.layers):
            if number not in left_out:
                x = layer(x).tanh()
            if number == fails_behind:
                x = _Fails.apply(x)
        return x


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise _FailureOnPurposeError


class _FailureOnPurposeError(Exception):
    pass


class Words(nn.Module):
    """An embedding with sparse gradients before two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, WIDTH, sparse=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        """(batch,) integers -> (batch, WIDTH)."""
        return self.layers(self.words(words))


class Training:
    """A wrapped model and its optimizer."""

    def __init__(self, module: nn.Module | None = None, **options: Any) -> None:
        # So small that the model has several buckets.
        self.model = fastddp.DistributedDataParallel(module or Layers(), bucket_cap_mb=0.04, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def backward(self, step: int, **arguments: Any) -> None:
        """Forward and backward on random numbers."""
        self.model(torch.randn(4, WIDTH), **arguments).square().mean().backward()

    def update(self) -> None:
        """The optimizer's part."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, step: int) -> None:
        """All of it."""
        self.backward(step)
        self.update()


def _plain(**options: Any) -> Callable[[], Step]:
    return lambda: Training(**options).step


def _with_hook(state: Callable[[], object], hook: Callable[..., Any]) -> Callable[[], Step]:
    def make() -> Step:
        training = Training()
        training.model.register_comm_hook(state(), hook)
        return training.step

    return make


def _sum_by_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Torch's mean, written by a user."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _power_sgd_state() -> object:
    return comm_hooks.PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def _changing_use() -> Step:
    training = Training(find_unused_parameters=True)

    def step(number: int) -> None:
        # Sometimes the same layers on all ranks, sometimes others, and layer 5 often on none.
        left_out = {number % 5, (number // 3 + dist.get_rank()) % 5, 5 if number % 7 else 0}
        training.backward(number, left_out=left_out)
        training.update()

    return step


def _static_graph() -> Step:
    training = Training(static_graph=True)

    def step(number: int) -> None:
        training.backward(number, left_out=(2,))
        training.update()

    return step


def _accumulating() -> Step:
    training = Training()

    def step(number: int) -> None:
        with training.model.no_sync():
            training.backward(number)
            training.backward(number)
        training.step(number)

    return step


def _sparse() -> Step:
    training = Training(Words())

    def step(number: int) -> None:
        training.model(torch.randint(100, (1 + number % 4,))).square().mean().backward()
        training.update()

    return step


def _weighted() -> Step:
    tokens = itertools.count(1)
    return Training(gradient_average=lambda: 1.0 + next(tokens) % 5).step


def _sampled() -> Step:
    training = Training()
    training.model.sample_steps(1, compare_ranks=True)

    def step(number: int) -> None:
        training.step(number)
        training.model.step_report()

    return step


def _joined() -> Step:
    training = Training()

    def step(number: int) -> None:
        with training.model.join():
            for _ in range(1 + (number + dist.get_rank()) % 2):
                training.step(number)

    return step


def _failing() -> Step:
    training = Training()

    def step(number: int) -> None:
        try:
            fails = number % FAILS_EVERY == FAILS_EVERY - 1
            training.backward(number, fails_behind=number // FAILS_EVERY % 5 if fails else None)
        except _FailureOnPurposeError:
            training.optimizer.zero_grad()
        else:
            training.update()

    return step


def _two_wrappers() -> Step:
    first, second = Training(), Training()

    def step(number: int) -> None:
        first.backward(number)
        loss = second.model(first.model(torch.randn(4, WIDTH)))  # one backward for both
        loss.square().mean().backward()
        first.update()
        second.update()

    return step


@dataclass(frozen=True)
class Mode:
    """A way of training; `make` is called once, on each rank."""

    name: str
    about: str
    make: Callable[[], Step]


MODES = (
    Mode("default", "no options", _plain()),
    Mode("view", "gradient_as_bucket_view", _plain(gradient_as_bucket_view=True)),
    Mode("unused", "find_unused_parameters; ranks use other layers in each step", _changing_use),
    Mode("static", "static_graph, one layer never used", _static_graph),
    Mode("no_sync", "three backwards a window", _accumulating),
    Mode("bf16", "bf16_compress_hook", _with_hook(lambda: None, comm_hooks.bf16_compress_hook)),
    Mode("powersgd", "PowerSGD of rank 2", _with_hook(_power_sgd_state, comm_hooks.powerSGD_hook)),
    Mode("hook", "a hook in Python", _with_hook(lambda: None, _sum_by_hook)),
    Mode("sparse", "an embedding with sparse gradients", _sparse),
    Mode("weight", "gradient_average: a weight that changes", _weighted),
    Mode("sampling", "sample_steps(1, compare_ranks=True), and a report of each step", _sampled),
    Mode("join", "join() around each step; a rank has one batch more", _joined),
    Mode("failing", f"each {FAILS_EVERY}th backward raises on all ranks, and is caught", _failing),
    Mode("two", "two wrappers in one backward", _two_wrappers),
)
