"""``gradient_average``: the weight of a rank's gradients in the average over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.compression.power_sgd import PowerSGD
from fastddp.errors import see
from fastddp.exchange.descriptions import Exchange, PythonHook
from fastddp.ranks.together import finish

GradientAverage = Literal["mean", "sum"] | Tensor | Callable[[], "Tensor | float"]
"""The mean over ranks; their sum; or a weight: sum(weight * gradient) / sum(weight) over ranks.

The ranks are those of the exchange, which may be fewer than the model's ranks.
"""

_CHOICES = '"mean", "sum", a tensor of one element or a callable that returns a weight'


def check_gradient_average(average: GradientAverage) -> None:
    """Raise ValueError for another string or a tensor of several elements, TypeError for what is no choice at all."""
    if isinstance(average, str):
        if average not in ("mean", "sum"):
            raise ValueError(f"gradient_average is {_CHOICES}, not {average!r}." + see("FD031"))
    elif isinstance(average, Tensor):
        if average.numel() != 1:
            raise ValueError(
                f"gradient_average as a weight has one element, not a shape of {tuple(average.shape)}." + see("FD031")
            )
    elif not callable(average):
        raise TypeError(f"gradient_average is {_CHOICES}, not {average!r}." + see("FD031"))


def check_exchange(average: GradientAverage, exchange: Exchange) -> None:
    """Raise ValueError if ``exchange`` cannot average as ``average`` says."""
    if isinstance(average, str) and average == "mean":
        return
    if isinstance(exchange, PythonHook):
        raise ValueError(
            "gradient_average is for exchanges that fastddp runs: a communication hook gets gradients as they are and "
            'decides itself what becomes of them. Leave gradient_average at "mean", and scale in the hook.'
            + see("FD031")
        )
    if isinstance(exchange, PowerSGD) and isinstance(average, str):
        raise ValueError(
            'PowerSGD keeps what its average has lost, and has no sum to keep: gradient_average must be "mean" or a '
            "weight." + see("FD031")
        )


class Weight:
    """A rank's share of the next window's average. Ranks add up their weights while forward runs.

    The weight is a number, a tensor of one element, or what a callable returns when a forward that synchronises begins.
    """

    def __init__(self, source: float | Tensor | Callable[[], Tensor | float], device: torch.device) -> None:
        self._source = source
        self._device = device

    def send(self, group: dist.ProcessGroup | None, counts: bool) -> None:
        """Begin to add up the weights of the ranks of ``group``, a collective; None: each keeps its own gradients.

        A rank that does not count, since it has no gradients, has the weight 0.
        """
        self._problem: Exception | None = None
        self._work: dist.Work | None = None
        self._group = group
        try:
            self._mine = self._read() if counts else 0.0
        except Exception as problem:  # raised later: the other ranks wait for a weight, and get nan
            self._mine, self._problem = float("nan"), problem
        if group is not None:
            with self._own_stream():
                self._total = torch.tensor(self._mine, dtype=torch.float64, device=self._device)
                self._work = dist.all_reduce(self._total, group=group, async_op=True)

    def share(self) -> float:
        """This rank's part of the sum of all weights; 1 where there is none.

        Raises:
            ValueError: on every rank of the group, if the weights do not add up to a positive, finite number.
            TypeError: this rank's weight is no number; the other ranks raise ValueError.
            Exception: the error that this rank's callable raised.
        """
        total: float | None = None
        if self._work is not None and self._group is not None:
            with self._own_stream():  # on the current stream this would wait for the forward
                finish(self._work, self._group)
                total = self._total.item()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if total is None:
            return 1.0
        if not 0 < total < float("inf"):
            raise ValueError(
                f"The weights of gradient_average add up to {total} over all ranks that average with each other; this "
                f"rank's is {self._mine}. They have to add up to a positive, finite number. Where a rank cannot read "
                "its weight, it sends nan." + see("FD031")
            )
        return self._mine / total

    def _read(self) -> float:
        weight = self._source() if callable(self._source) else self._source
        try:
            return float(weight)
        except (TypeError, ValueError, RuntimeError) as error:  # the last for a tensor of several elements
            raise TypeError(
                f"The callable of gradient_average returned {weight!r}, which is no number." + see("FD031")
            ) from error

    def _own_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._device.type == "cpu" else self._stream

    @functools.cached_property
    def _stream(self) -> torch.Stream:
        return torch.Stream(device=self._device)
