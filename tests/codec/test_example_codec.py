"""A codec that is no part of fastddp, compiled against its headers: examples/codec/random_k.cpp."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastddp
from fastddp import _C
from models import RaisesInBackward
from package_copy import import_library, load_with_fastddp
from ranks import RankPool
from repository import ROOT

SOURCE = ROOT / "examples" / "codec" / "random_k.cpp"
KEPT, WINDOWS = 4, 40


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_with_fastddp(SOURCE, tmp_path_factory.mktemp("random_k"))


def random_k(library: Path) -> Any:
    return import_library(library).RandomK(k=KEPT, seed=7)


class Line(nn.Module):
    """The gradient of each element is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(24, 8) for _ in range(3))

    def forward(self, x: float, raises: bool) -> Tensor:
        first = RaisesInBackward.apply(self.parts[0]) if raises else self.parts[0]
        return x * (first.sum() + self.parts[1].sum() + self.parts[2].sum())


def trained(rank: int, library: Path, fails_in: int | None) -> tuple[Tensor, Tensor]:
    """Sums of the gradients of all windows, of those in which an element travelled, and how many of a window did."""
    model = fastddp.DistributedDataParallel(Line(), bucket_cap_mb=0.001)
    for _ in range(2):
        model(1.0, raises=False).backward()  # buckets are rebuilt, with the exchange that the model knows of
    transport = _C.Transport.all_reduce([model.process_group])
    model.reducer.set_exchange(_C.Exchange.pipeline(random_k(library), transport))
    total = torch.zeros(3, 24, 8)
    travelled = []
    for window in range(WINDOWS):
        model.zero_grad()
        fails = window == fails_in
        loss = model(rank + 1.0, raises=fails and rank == 1)
        with pytest.raises((ArithmeticError, RuntimeError)) if fails else contextlib.nullcontext():
            loss.backward()
        if not fails:
            gradients = torch.stack([part.grad for part in model.module.parts])
            total += gradients
            travelled.append((gradients != 0).sum())
    return total, torch.stack(travelled)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("fails_in", [None, 5])
def test_all_that_ranks_have_travels_in_the_end(ranks: RankPool, library: Path, fails_in: int | None) -> None:
    (total, travelled), (of_other, _) = ranks.run(trained, 2, library, fails_in)
    assert torch.equal(total, of_other)
    assert travelled.tolist() == [3 * 24 * 8 // KEPT] * len(travelled)
    # An element has given away all windows up to the last in which it was chosen.
    if fails_in is None:
        assert total.max() == 1.5 * WINDOWS
    else:
        # Of the void window only what had been averaged before it failed may be among them: not what raised.
        assert total.max() <= 1.5 * WINDOWS
        assert total[0].max() < 1.5 * WINDOWS
    assert total.min() > 0
    assert total.mean() > 1.5 * (WINDOWS - 2 * KEPT)
