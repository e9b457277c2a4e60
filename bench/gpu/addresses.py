"""Where gradients lie, step by step: after how many steps each bucket's addresses come again, and what is copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from bench.contestants import VIEW
from bench.gpu.alone import work
from bench.gpu.contestants import Mode
from bench.gpu.models import cases
from bench.gpu.results import Run
from bench.gpu.step import lonely_group

STEPS = 30
_MODES = (Mode("fastddp", "fastddp"), Mode("fastddp-view", "fastddp", VIEW))


def measure(run: Run) -> None:
    """Adds a row for each model and mode: autocast, parameters in bf16; default, views."""
    with lonely_group(run.device):
        for case in cases(run.quick)[:2]:
            model, batch_of = case.build(run.device)
            for mode in _MODES:
                if run.out_of_time():
                    run.skip(f"addresses of {case.name} under {mode.name}")
                    continue
                step = mode.prepare(model)
                seen = Addresses(step.module)
                for number in range(6 if run.quick else STEPS):
                    step.run(batch_of(0, number))
                    seen.end_step()
                run.results.add(
                    "addresses",
                    case=case.name,
                    contestant=mode.name,
                    periods=seen.periods(),
                    addresses=[len(set(keys)) for keys in zip(*seen.steps, strict=True)],
                    **work(step, partial(batch_of, 0), run.device),
                )


class Addresses:
    """Of the gradients of each bucket, as autograd hands them over."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.now: dict[str, int] = {}
        self.steps: list[list[tuple[int, ...]]] = []
        for name, parameter in model.module.named_parameters():  # type: ignore[union-attr]
            parameter.register_hook(lambda gradient, name=name: self.now.__setitem__(name, gradient.data_ptr()))

    def end_step(self) -> None:
        """Remember them by bucket; buckets may have changed in the first steps."""
        buckets = self.model.bucket_plan().buckets  # type: ignore[operator]
        keys = [tuple(self.now.get(parameter.name, 0) for parameter in bucket.parameters) for bucket in buckets]
        if self.steps and len(keys) != len(self.steps[0]):
            self.steps = []
        self.steps.append(keys)

    def periods(self) -> list[int | None]:
        """Of each bucket."""
        return [period([step[bucket] for step in self.steps]) for bucket in range(len(self.steps[0]))]


def period(keys: Sequence[object]) -> int | None:
    """After how many steps they come again, in the later half; None: they do not.

    >>> period([9, 9, 1, 2, 1, 2, 1, 2]), period([1, 2, 3, 4])
    (2, None)
    """
    later = keys[len(keys) // 2 :]
    fits = (n for n in range(1, len(later) // 2 + 1) if all(map(lambda a, b: a == b, later, later[n:])))
    return next(fits, None)
