"""The same training under torch's DDP and under fastddp.

A *training* is a function at module level that knows nothing of fastddp: it uses a framework as its users do, and
returns what it trained as a :class:`Trained`. ``same_training`` runs it twice on two ranks and compares.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastddp
from ranks import SEED, RankPool


class Network(nn.Module):
    """A classifier of 6 numbers into 3 classes, with the buffers of a batch norm, and perhaps an unused layer."""

    def __init__(self, unused_layer: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 3)]
        self.layers = nn.Sequential(*layers)
        if unused_layer:
            self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def without_buffers() -> nn.Module:
    """One in which a sample's gradient has rank 1: on two ranks, PowerSGD of rank 4 loses nothing but roundings."""
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def data(samples: int = 28, batch_size: int = 4) -> DataLoader:
    """Inputs and classes, the same in every call. Without other arguments there is a batch too few for two ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(3, (samples,), generator=generator)), batch_size)


@dataclass
class Trained:
    """How a training ended."""

    wrapper: type
    parameters: dict[str, Tensor]
    others: dict[str, Tensor]
    """Buffers, which may differ between ranks, and whatever else has to be the same under both DDPs."""
    exchange: tuple[str, torch.dtype | None] | None = None
    """Of fastddp's: how gradients travelled at the end, and in which dtype if not their own."""
    windows: int = 0
    """Of fastddp's: how often gradients were synchronised."""

    @classmethod
    def of(cls, model: nn.Module, **others: float) -> Trained:
        """What ``model``, wrapped, holds now, and ``others``, such as a loss."""
        module: Any = model.module
        others_now = [*module.named_buffers(), *((name, torch.tensor(value)) for name, value in others.items())]
        found = cls(type(model), _copies(module.named_parameters()), _copies(others_now))
        if isinstance(model, fastddp.DistributedDataParallel):
            found.exchange = type(model.engine.now.exchange).__name__, getattr(model.engine.now.exchange, "wire", None)
            found.windows = model.reducer.windows()
        return found


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors}


def launched(rank: int) -> AbstractContextManager[Any]:
    """Inside is the environment that torchrun gives a process; the process group is there already."""
    ranks = dict.fromkeys(["RANK", "LOCAL_RANK"], str(rank))
    sizes = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(dist.get_world_size()))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # nobody connects: the group is there
    return mock.patch.dict(os.environ, ranks | sizes | address | {"OMP_NUM_THREADS": "1"})


@contextlib.contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """An empty folder, the same on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        paths = [own]
        dist.broadcast_object_list(paths)
        yield Path(paths[0])
        dist.barrier()  # rank 0's folder goes when all are done with it


def under(ddp: str, rank: int, training: Callable[..., Trained], *args: Any) -> Trained:
    """The training under "torch" or "fastddp", from the same random state; assert that it was under this DDP."""
    torch.manual_seed(SEED)
    with launched(rank), fastddp.patch() if ddp == "fastddp" else contextlib.nullcontext():
        trained = training(rank, *args)
    assert issubclass(trained.wrapper, nn.parallel.DistributedDataParallel)
    assert issubclass(trained.wrapper, fastddp.DistributedDataParallel) is (ddp == "fastddp")
    return trained


def under_both(rank: int, training: Callable[..., Trained], args: tuple[Any, ...]) -> tuple[Trained, Trained]:
    return under("torch", rank, training, *args), under("fastddp", rank, training, *args)


def same_training(
    ranks: RankPool, training: Callable[..., Trained], *args: Any, rtol: float = 0.0, backend: str | None = None
) -> list[Trained]:
    """Assert that two ranks train the same under both DDPs, that each DDP was really there, and that ranks agree.

    ``training`` is called with the rank and ``args``; a tensor may be as far from the one under torch's DDP as
    ``differences`` says of ``rtol``. Returns what fastddp's training ended with, by rank.
    """
    results = ranks.run(under_both, 2, training, args, backend=backend)
    for theirs, ours in results:
        assert differences(theirs.parameters, ours.parameters, rtol) == []
        assert differences(theirs.others, ours.others, rtol) == []
    (_, first), (_, second) = results
    assert differences(first.parameters, second.parameters) == []
    return [ours for _, ours in results]


def resumed_elsewhere(rank: int, training: Callable[..., Trained], save_under: str, load_under: str) -> list[str]:
    """Where a training that is saved under one DDP and goes on under another differs from torch's whole one.

    ``training`` is called with a folder and the halves to run: both, or the first, which ends with a checkpoint in the
    folder, or the second, which begins with it.
    """
    with shared_folder(rank) as folder:
        whole = under("torch", rank, training, folder / "whole", (1, 2))
        half = under(save_under, rank, training, folder / "halves", (1,))
        assert differences(whole.parameters, half.parameters) != []
        resumed = under(load_under, rank, training, folder / "halves", (2,))
    return differences(whole.parameters, resumed.parameters) + differences(whole.others, resumed.others)


RESUMED = pytest.mark.parametrize(
    ("save_under", "load_under"), [("fastddp", "fastddp"), ("torch", "fastddp"), ("fastddp", "torch")]
)


def differences(expected: dict[str, Tensor], actual: dict[str, Tensor], rtol: float = 0.0) -> list[str]:
    """Names of tensors that differ by more than ``rtol`` times the largest element."""
    assert list(expected) == list(actual)
    allowed = {name: rtol * value.abs().max() if rtol else 0.0 for name, value in expected.items()}
    return [
        name for name, value in expected.items() if (actual[name].double() - value.double()).abs().max() > allowed[name]
    ]
