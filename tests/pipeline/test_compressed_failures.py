"""8 bits, and what ``auto_hook`` has chosen, where a rank fails: what errors hold afterwards, to the last rounding."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fastddp
from models import RaisesInBackward
from program_hooks import blocks_of, compress, plans_at_once
from ranks import RankPool

LAYERS, WIDTH = 6, 30  # a bucket each; the last one is first in backward
SCALES = (1.0, -0.7, 0.4, 1.3, -1.1, 0.9, 0.3, 1.0)  # of windows
BEHIND = 5  # windows that went well
RAISING = 1
PLACES = pytest.mark.parametrize("place", [0, 2, 5], ids=["at the end", "in the middle", "at the beginning"])


class Layers(nn.Module):
    """The gradient of each parameter is the input times a fixed wave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: float, raises_behind: int | None = None) -> Tensor:
        total = torch.zeros(())
        for number, layer in enumerate(self.layers):
            used = RaisesInBackward.apply(layer) if number == raises_behind else layer
            total = total + x * (used * wave(number)).sum()
        return total


def wave(number: int) -> Tensor:
    return torch.sin((number + 1.0) * torch.arange(float(WIDTH * WIDTH))).view(WIDTH, WIDTH)


class Training:
    def __init__(self, rank: int, hook: Any, two_levels: bool) -> None:
        self.rank, self.ranks = rank, dist.get_world_size()
        hierarchy = init_device_mesh("cpu", (2, 2)) if two_levels else None
        self.model = fastddp.DistributedDataParallel(Layers(), bucket_cap_mb=0.0, hierarchy=hierarchy)
        compress(self.model, hook)

    def step(self, window: int, raises_behind: int | None = None) -> None:
        self.model.zero_grad()
        self.model(SCALES[window] * (self.rank + 1), raises_behind).backward()

    def gradients(self) -> Tensor:
        return torch.stack([layer.grad for layer in self.model.module.layers]).double()  # type: ignore[union-attr]

    def mean(self, window: int) -> Tensor:
        scale = SCALES[window] * (self.ranks + 1) / 2
        return torch.stack([scale * wave(number) for number in range(LAYERS)]).double()

    def errors(self) -> Tensor:
        """Of this rank, [layers, elements], fp64; zeros where it exchanges nothing in 8 bits."""
        whole = torch.zeros(LAYERS, WIDTH * WIDTH, dtype=torch.float64)
        for part, error in blocks_of(self.model).errors.items():  # type: ignore[union-attr]
            name, _, span = part.partition("[")
            begin, end = map(int, span[:-1].split(":")) if span else (0, WIDTH * WIDTH)
            whole[int(name.removeprefix("layers."))][begin:end] = error
        return whole

    def in_8_bits(self) -> list[bool]:
        """Which layers travel so."""
        plan = self.model.compression_plan()
        if plan is None:
            return [True] * LAYERS
        choices = [bucket.choice for bucket in plan.buckets]
        names = [bucket.parameters[0].name for bucket in self.model.bucket_plan().buckets]
        return [choices[names.index(f"layers.{number}")] in ("int8", "fp8") for number in range(LAYERS)]


def around_a_failure(rank: int, hook: Any, two_levels: bool, place: int) -> dict[str, Any]:
    with plans_at_once(hook) if hook == "auto" else contextlib.nullcontext():
        training = Training(rank, hook, two_levels)
        for window in range(BEHIND):
            training.step(window)
        before = training.errors()
        with pytest.raises((ArithmeticError, RuntimeError)):  # its own, and that of whoever waited for it
            training.step(BEHIND, place if rank == RAISING else None)
        for layer in training.model.module.layers:  # type: ignore[union-attr]
            if layer.grad is not None:
                layer.grad.data.fill_(100.0)  # whatever becomes of them, errors do not ask
        training.model.zero_grad()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            training.model(1.0)  # which repairs
        after = training.errors()
        lacking = torch.zeros(LAYERS, WIDTH * WIDTH, dtype=torch.float64)
        gradients = []
        for window in range(BEHIND + 1, len(SCALES)):
            training.step(window)
            gradients.append(training.gradients())
            lacking += (training.mean(window) - gradients[-1]).flatten(1)
        gained = training.errors() - after
        dist.all_reduce(gained)
        return {
            "before": before,
            "after": after,
            "unaccounted": (lacking - gained).abs().amax(1),
            "gradients": gradients,
            "in 8 bits": torch.tensor(training.in_8_bits()),
        }


@pytest.mark.tier("slow", but_one_in=3)
@PLACES
@pytest.mark.parametrize("two_levels", [False, True], ids=["one level", "two levels"])
@pytest.mark.parametrize("hook", ["int8", "e4m3", "e5m2", "auto"])
def test_what_windows_lack_is_in_the_errors_behind_one_that_failed(
    ranks: RankPool, hook: str, two_levels: bool, place: int
) -> None:
    of_ranks = ranks.run(around_a_failure, 4 if two_levels else 2, hook, two_levels, place)
    for found in of_ranks:
        in_8_bits = found["in 8 bits"]
        assert in_8_bits.any()
        assert (found["unaccounted"][in_8_bits] < 1e-5).all()
        assert all(torch.equal(*pair) for pair in zip(found["gradients"], of_ranks[0]["gradients"], strict=True))


@pytest.mark.tier("slow", but_one_in=3)
@PLACES
@pytest.mark.parametrize("two_levels", [False, True], ids=["one level", "two levels"])
@pytest.mark.parametrize("hook", ["int8", "e4m3", "e5m2"])
def test_errors_behind_a_window_that_failed(ranks: RankPool, hook: str, two_levels: bool, place: int) -> None:
    for found in ranks.run(around_a_failure, 4 if two_levels else 2, hook, two_levels, place):
        assert torch.equal(found["after"], found["before"])
