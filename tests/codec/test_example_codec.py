"""Codecs that are no part of fastddp, compiled against its headers: examples/codec/random_k.cpp, and one that adds."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fastddp import _C
from fastddp.ranks import placement
from models import RaisesInBackward
from nodes import by_messages
from package_copy import import_library, load_with_fastddp
from ranks import RankPool
from repository import ROOT, TESTS

KEPT, WINDOWS = 4, 40


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_with_fastddp(ROOT / "examples" / "codec" / "random_k.cpp", tmp_path_factory.mktemp("random_k"))


@pytest.fixture(scope="module")
def adding_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_with_fastddp(TESTS / "support" / "codec_that_adds.cpp", tmp_path_factory.mktemp("adds"))


class Line(nn.Module):
    """The gradient of each element is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(24, 8) for _ in range(3))

    def forward(self, x: float, raises: bool = False) -> Tensor:
        first = RaisesInBackward.apply(self.parts[0]) if raises else self.parts[0]
        return x * (first.sum() + self.parts[1].sum() + self.parts[2].sum())


def trained(rank: int, library: Path, fails_in: int | None) -> Tensor:
    """The sums of the gradients of all windows, in each of which one element of KEPT travels."""
    model = fastddp.DistributedDataParallel(Line(), bucket_cap_mb=0.001)
    for _ in range(2):
        model(1.0).backward()  # buckets are rebuilt, with the exchange that the model knows of
    codec = import_library(library).RandomK(k=KEPT, seed=7)
    model.reducer.set_way(_C.Way(codec, [model.process_group]))
    total = torch.zeros(3, 24, 8)
    for window in range(WINDOWS):
        model.zero_grad()
        if window == fails_in:
            with pytest.raises((ArithmeticError, RuntimeError)):
                model(rank + 1.0, raises=rank == 1).backward()
            continue
        model(rank + 1.0).backward()
        gradients = torch.stack([part.grad for part in model.module.parts])
        assert (gradients != 0).sum() == 3 * 24 * 8 // KEPT
        total += gradients
    return total


@pytest.mark.tier("slow")
@pytest.mark.parametrize("fails_in", [None, 5])
def test_all_that_ranks_have_travels_in_the_end(ranks: RankPool, library: Path, fails_in: int | None) -> None:
    total, of_other = ranks.run(trained, 2, library, fails_in)
    assert torch.equal(total, of_other)
    # An element has given away all windows up to the last in which it was chosen. Of a void window only what had been
    # averaged before it failed may be among them: not what raised.
    assert total.max() <= 1.5 * WINDOWS
    assert (total[0].max() < 1.5 * WINDOWS) == (fails_in is not None)
    assert total.min() > 0
    assert total.mean() > 1.5 * (WINDOWS - 2 * KEPT)


def averages(rank: int, library: Path, keeps_sent: bool, messages: bool) -> list[list[float]]:
    """Of four windows; in the third one rank 1 raises."""
    with by_messages() if messages else contextlib.nullcontext():
        model = fastddp.DistributedDataParallel(Line(), bucket_cap_mb=0.001)
        codec, group = import_library(library).Adds(keeps_sent=keeps_sent), model.process_group
        for _ in range(2):
            model(1.0).backward()
        lanes = _C.Lanes([group], placement.processes_of(group, torch.device("cpu")))
        model.reducer.set_way(_C.Way(codec, lanes, nodes=[0] * 2))
    found = []
    for window in range(4):
        model.zero_grad()
        if window == 2:
            with pytest.raises((ArithmeticError, RuntimeError)):
                model(1.0, raises=rank == 1).backward()
            continue
        model(rank + 1.0 + window).backward()
        found.append(torch.cat([part.grad.flatten() for part in model.module.parts]).unique().tolist())
    return found


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("messages", [True, False], ids=["messages", "reads"])
@pytest.mark.parametrize("keeps_sent", [True, False])
def test_a_codec_that_adds_may_keep_what_was_sent_or_not(
    ranks: RankPool, adding_library: Path, keeps_sent: bool, messages: bool
) -> None:
    assert ranks.run(averages, 2, adding_library, keeps_sent, messages) == [[[1.5], [2.5], [4.5]]] * 2
