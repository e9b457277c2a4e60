"""What `bench.training` trains: a small convolutional network on scikit-learn's digits, and the GPT of the demo.

A model maps inputs to logits. The seed of a run decides the first parameters and the order of the data, never what is
trained and evaluated on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench import harness

# The demo's files know each other by their bare names.
sys.path.append(str(harness.ROOT / "examples"))

from corpus import Batches, read_corpus
from gpt import GPT, Shape

sys.path.pop()

Batch = tuple[Tensor, Tensor]  # inputs and targets
_WARMUP_STEPS = 20


@dataclass(frozen=True)
class Data:
    """What one rank sees in one run."""

    batch: Callable[[int], Batch]  # of a step: this rank's rows of the batch of all ranks
    evaluation: Sequence[Batch]  # this rank's share, the same in every run


@dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained, like the demo: warm-up, then linearly down to a tenth."""

    name: str
    about: str
    steps: int
    learning_rate: float
    model: Callable[[], nn.Module]
    data: Callable[[int, int, int], Data]  # of seed, rank and world size
    optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]  # of parameters and learning rate

    def learning_rate_at(self, step: int) -> float:
        """Of a step, counted from 0."""
        warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
        return self.learning_rate * warmup * (1.0 - 0.9 * step / self.steps)


# -------------------------------------------------------------------------------------------------------------- digits


def _digits_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _digits_data(rows: int) -> Callable[[int, int, int], Data]:
    def data(seed: int, rank: int, world_size: int) -> Data:
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ImportError as error:
            raise ImportError("the digits come with scikit-learn: pip install 'fastddp[bench]'") from error
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
        train_x, test_x = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2])
        train_y, test_y = (torch.tensor(part, dtype=torch.long) for part in parts[2:])

        def batch(step: int) -> Batch:
            """Epochs of whole batches, each epoch in an order of its own."""
            epoch, place = divmod(step, len(train_y) // (world_size * rows))
            order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
            mine = order[(place * world_size + rank) * rows :][:rows]
            return train_x[mine], train_y[mine]

        return Data(batch, [(test_x[rank::world_size], test_y[rank::world_size])])

    return data


def digits_task(steps: int = 400, rows: int = 32) -> Task:
    """A small convolutional network on 8 x 8 images of digits, a quarter of which are for evaluation."""
    return Task(
        "digits",
        f"scikit-learn's digits, convolutional network, SGD with momentum, {rows} images a rank",
        steps,
        0.05,
        _digits_model,
        _digits_data(rows),
        lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    )


# ----------------------------------------------------------------------------------------------------------------- GPT


_corpus = functools.cache(read_corpus)


def _gpt_data(length: int, rows: int, evaluation_batches: int) -> Callable[[int, int, int], Data]:
    def data(seed: int, rank: int, world_size: int) -> Data:
        corpus = _corpus()
        batches = Batches(corpus.training, rows, length, rank, world_size, seed)
        evaluation = Batches(corpus.validation, rows, length, rank, world_size)
        return Data(batches, [evaluation(index) for index in range(evaluation_batches)])

    return data


def gpt_task(steps: int = 500, shape: Shape | None = None, rows: int = 4, evaluation_batches: int = 96) -> Task:
    """The demo's model, text, batches, optimizer and learning rate."""
    shape = shape or Shape()
    return Task(
        "gpt",
        f"the demo's GPT on Python's standard library, AdamW, {rows} x {shape.context} bytes a rank",
        steps,
        2e-3,
        lambda: GPT(shape),
        _gpt_data(shape.context, rows, evaluation_batches),
        lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), fused=True),
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits_task, "gpt": gpt_task}
