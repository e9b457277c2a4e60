"""The ways of training that `bench.soak` runs for long, each a function that makes one step of it."""

from __future__ import annotations

import gc
import io
import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastddp
from bench.checks import digest
from bench.contestants import hook_named
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

    def forward(self, x: Tensor, left_out: Iterable[int] = (), fails_at: int | None = None) -> Tensor:
        """From and to (batch, WIDTH); backward raises when it comes to layer `fails_at`."""
        for number, layer in enumerate(self.layers):
            if number not in left_out:
                x = layer(x).tanh()
            if number == fails_at:
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

    def __init__(
        self, module: nn.Module | None = None, hook: str | Callable[..., Any] = "none", **options: Any
    ) -> None:
        # So small that the model has several buckets.
        self.model = fastddp.DistributedDataParallel(module or Layers(), bucket_cap_mb=0.04, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if callable(hook):  # a user's
            self.model.register_comm_hook(None, hook)
        elif named := hook_named(hook):
            self.model.register_comm_hook(*named.state_and_hook(comm_hooks))

    def backward(self, **arguments: Any) -> None:
        """Forward and backward on random numbers."""
        self.model(torch.randn(4, WIDTH), **arguments).square().mean().backward()

    def update(self) -> None:
        """The optimizer's part."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, **arguments: Any) -> None:
        """All of it."""
        self.backward(**arguments)
        self.update()


def _plain(training: Training, number: int) -> None:
    training.step()


def _sum_by_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Torch's mean, written by a user."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _changing_use(training: Training, number: int) -> None:
    # Sometimes the same layers on all ranks, sometimes others, and layer 5 often on none.
    training.step(left_out={number % 5, (number // 3 + dist.get_rank()) % 5, 5 if number % 7 else 0})


def _static_graph(training: Training, number: int) -> None:
    training.step(left_out=(2,))


def _accumulating(training: Training, number: int) -> None:
    with training.model.no_sync():
        training.backward()
        training.backward()
    training.step()


def _sparse(training: Training, number: int) -> None:
    training.model(torch.randint(100, (1 + number % 4,))).square().mean().backward()
    training.update()


def _sampled(training: Training, number: int) -> None:
    if number == 0:
        training.model.sample_steps(1, compare_ranks=True)
    training.step()
    training.model.step_report()


def _joined(training: Training, number: int) -> None:
    with training.model.join():
        for _ in range(1 + (number + dist.get_rank()) % 2):
            training.step()


def _failing(training: Training, number: int) -> None:
    try:
        fails = number % FAILS_EVERY == FAILS_EVERY - 1
        training.backward(fails_at=number // FAILS_EVERY % 5 if fails else None)
    except _FailureOnPurposeError:
        training.optimizer.zero_grad()
    else:
        training.update()


class _TwoWrappers:
    def __init__(self) -> None:
        self._both = Training(), Training()

    def __call__(self, number: int) -> None:
        first, second = self._both
        first.backward()
        loss = second.model(first.model(torch.randn(4, WIDTH)))  # one backward for both
        loss.square().mean().backward()
        first.update()
        second.update()


class Watched:
    """A training in which nothing must be said: stalls, corruptions, replicas and sums are all looked for.

    Each rank pauses now and then as ranks do, in its data, in its forward and in its optimizer, for up to nine tenths
    of the patience. Garbage is collected; rank 0 makes checkpoints, and evaluates while the others wait at a barrier.
    """

    _PATIENCE, _AUDIT_EVERY = 5.0, 100  # seconds, steps
    _LONG_CHANCE = 0.006  # of one rank in a step
    _SHORT, _SHORT_CHANCE = 0.02, 0.02  # seconds at most, of pauses that each rank has
    _PLACES = ("data", "forward", "optimizer")
    _COLLECT_EVERY, _CHECKPOINT_EVERY, _EVALUATE_EVERY = 50, 500, 1000  # steps
    _ACCUMULATE_EVERY = 10  # steps, one of which has two backwards

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._chance = random.Random(self._rank)
        self._pause = ("", 0.0)  # the long one of this step, if this rank has one: where, and seconds
        self._alarms: list[str] = []
        self._soft = 0
        self._paused = dict.fromkeys(self._PLACES, 0.0)  # seconds
        self._module = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)
        )
        self._module[2].register_forward_hook(lambda *_: self._come_to("forward"))
        watch = fastddp.Watch(
            stall=self._on_stall,
            patience=self._PATIENCE,
            corruption=lambda corruption: self._alarms.append(str(corruption)),
            audit_every=self._AUDIT_EVERY,
        )
        self._model = fastddp.DistributedDataParallel(self._module, bucket_cap_mb=0.01, watch=watch)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self._optimizer.register_step_pre_hook(lambda *_: self._come_to("optimizer"))
        self._model.audit(self._optimizer)

    def __call__(self, number: int) -> None:
        """One step."""
        chance = random.Random(number)  # the same on all ranks
        is_long = chance.random() < self._LONG_CHANCE and chance.randrange(dist.get_world_size()) == self._rank
        if is_long:
            self._pause = chance.choice(self._PLACES), chance.uniform(0, 0.9 * self._PATIENCE)
        self._come_to("data")
        self._optimizer.zero_grad()
        if number % self._ACCUMULATE_EVERY == 0:
            with self._model.no_sync():
                self._loss(self._model).backward()
        self._loss(self._model).backward()
        self._optimizer.step()
        if (number + self._rank) % self._COLLECT_EVERY == 0:
            gc.collect()
        if number % self._CHECKPOINT_EVERY == 0 and self._rank == 0:
            torch.save({"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}, io.BytesIO())
        if number % self._EVALUATE_EVERY == 0:
            self._evaluate()

    def _loss(self, model: nn.Module) -> Tensor:
        inputs = torch.randn(8, 16)
        return (model(inputs) - inputs[:, :4].sin()).square().mean()

    def _evaluate(self) -> None:
        """On rank 0 alone, as is common."""
        if self._rank == 0:
            self._module.eval()
            with torch.no_grad():
                for _ in range(50):
                    self._loss(self._module)
                    time.sleep(self._SHORT)
            self._module.train()
        dist.barrier()

    def _come_to(self, place: str) -> None:
        if self._pause[0] == place:
            seconds = self._pause[1]
            self._pause = ("", 0.0)
            time.sleep(seconds)
            self._paused[place] += seconds
        elif self._chance.random() < self._SHORT_CHANCE:
            time.sleep(self._chance.uniform(0, self._SHORT))

    def _on_stall(self, report: fastddp.StallReport) -> None:
        if report.is_soft:
            self._soft += 1
        else:
            self._alarms.append(str(report))

    def told(self) -> dict[str, Any]:
        """What was said; and whether all ranks have the same bits, by all of them, not by the audit. A collective."""
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest(self._model.parameters()))
        paused = {place: round(seconds, 1) for place, seconds in self._paused.items()}
        facts = {"alarms": self._alarms, "soft_reports": self._soft, "paused": paused}
        return facts | {"replicas_agree": len(set(digests)) == 1}


@dataclass(frozen=True)
class Mode:
    """A way of training; `make` is called once, on each rank."""

    name: str
    about: str
    make: Callable[[], Step]


def _mode(name: str, about: str, step: Callable[[Training, int], None] = _plain, **options: Any) -> Mode:
    """Steps of one training, whose options these are."""
    return Mode(name, about, lambda: partial(step, Training(**options)))


_weights = itertools.count(1)
MODES = (
    _mode("default", "no options"),
    _mode("view", "gradient_as_bucket_view", gradient_as_bucket_view=True),
    _mode(
        "unused",
        "find_unused_parameters; ranks use other layers in each step",
        _changing_use,
        find_unused_parameters=True,
    ),
    _mode("static", "static_graph, one layer never used", _static_graph, static_graph=True),
    _mode("no_sync", "three backwards a window", _accumulating),
    _mode("bf16", "bf16_compress_hook", hook="bf16"),
    _mode("powersgd", "PowerSGD of rank 2", hook="powersgd2"),
    _mode("hook", "a hook in Python", hook=_sum_by_hook),
    Mode("sparse", "an embedding with sparse gradients", lambda: partial(_sparse, Training(Words()))),
    _mode("weight", "gradient_average: a weight that changes", gradient_average=lambda: 1.0 + next(_weights) % 5),
    _mode("sampling", "sample_steps(1, compare_ranks=True), and a report of each step", _sampled),
    _mode("join", "join() around each step; a rank has one batch more", _joined),
    _mode("failing", f"each {FAILS_EVERY}th backward raises on all ranks, and is caught", _failing),
    Mode("two", "two wrappers in one backward", _TwoWrappers),
    Mode("watched", "pauses, checkpoints and evaluation, in which no alarm may be raised", Watched),
)
