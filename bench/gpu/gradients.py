"""Whether two ways to train leave the same gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import checks
from bench.cases import Batch
from bench.gpu.contestants import GpuStep

# Operators for which torch has no deterministic version on a GPU may make two runs of one step differ. What differs by
# no more than a few times that is taken for the same. In 16 bits runs mostly agree, and now and then a number is
# rounded to its neighbour: a few runs would not show that.
_SPREADS = 4.0
_RUNS = 16


@dataclass(frozen=True)
class Expected:
    """The gradients of a batch, and the largest relative difference between some runs of the step that left them."""

    gradients: list[Tensor]
    spread: float

    @classmethod
    def of(cls, step: GpuStep, batch: Batch) -> Expected:
        """From a step which is the reference for others."""
        first, *others = (leave_gradients(step, batch) for _ in range(_RUNS))
        return cls(first, max(largest_difference(other, first) for other in others))

    def verdict(self, step: GpuStep, batch: Batch, check: checks.Check | None = None) -> tuple[str, float]:
        """`equal` (in every bit), `within the spread` or `WRONG`, and the largest relative difference.

        Where a hook's check holds, it is named in place of the spread.
        """
        got = leave_gradients(step, batch)
        difference = largest_difference(got, self.gradients)
        if check is not None and check.holds(got, self.gradients):
            return check.passed, difference
        if difference == 0:
            return "equal", difference
        return ("within the spread" if difference <= _SPREADS * self.spread else "WRONG"), difference


def leave_gradients(step: GpuStep, batch: Batch) -> list[Tensor]:
    """Copies of the gradients of one step."""
    with deterministic():
        step.run(batch)
    gradients = [gradient.clone() for gradient in step.gradients()]
    step.clear()
    return gradients


def largest_difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Over all parameters: the largest difference of two elements, relative to the parameter's largest gradient."""
    return checks.largest_difference(got, expected, _relative_difference)


def _relative_difference(got: Tensor, expected: Tensor) -> float:
    absolute = checks.difference(got, expected)
    return absolute if absolute in (0, math.inf) else absolute / max(float(expected.abs().max()), 1e-30)


@contextmanager
def deterministic() -> Iterator[None]:
    """Operators compute the same bits each time, as far as torch can make them.

    Not in cuDNN's attention; and matrix products do only if CUBLAS_WORKSPACE_CONFIG was set before the first of them.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    attention = torch.backends.cuda.cudnn_sdp_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about those that it cannot
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(attention)
            torch.use_deterministic_algorithms(before[0])
            torch.backends.cudnn.benchmark = before[1]
