"""What `bench.soak` takes for growth, and that each of its modes trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import harness, soak, soak_modes

sys.path.pop()

MIB = 1 << 20


def samples(**changed: list[int]) -> dict[str, list[int]]:
    """Of 16 times, all flat but what is named."""
    flat = {"bytes": [300 * MIB] * 16, "threads": [9] * 16, "descriptors": [20] * 16, "keys": [7] * 16}
    return flat | changed


def test_what_does_not_change_is_flat() -> None:
    assert soak.judge(samples(), every=100)["grows"] == []


def test_memory_that_grows_in_the_first_half_is_flat() -> None:
    warming_up = [min(place, 7) * 4 * MIB for place in range(16)]
    assert soak.judge(samples(bytes=warming_up), every=100)["grows"] == []


def test_one_jump_of_memory_is_no_growth() -> None:
    jump = [300 * MIB] * 12 + [300 * MIB + 4096] + [308 * MIB] + [300 * MIB] * 2
    assert soak.judge(samples(bytes=jump), every=100)["grows"] == []


def test_memory_that_a_step_loses_is_growth() -> None:
    losing = [300 * MIB + 100 * 2000 * place for place in range(16)]  # 2,000 bytes a step
    verdict = soak.judge(samples(bytes=losing), every=100)
    assert verdict["grows"] == ["memory"]
    assert verdict["bytes_a_step"] == 2000


@pytest.mark.parametrize("name", soak.COUNTS)
def test_a_count_that_differs_at_the_end_is_growth(name: str) -> None:
    assert soak.judge(samples(**{name: [9] * 15 + [10]}), every=100)["grows"] == [name]


class Recorded(soak_modes.Training):
    """Remembers what was made."""

    made: ClassVar[list[soak_modes.Training]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made.append(self)


def trained(rank: int, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters before and after some steps of a mode."""
    Recorded.made.clear()
    with mock.patch.object(soak_modes, "Training", Recorded):
        step = next(mode.make for mode in soak_modes.MODES if mode.name == name)()
    parameters = [parameter for training in Recorded.made for parameter in training.model.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    torch.manual_seed(rank)
    for number in range(soak_modes.FAILS_EVERY + 2):
        step(number)
    return before, [parameter.detach() for parameter in parameters]


@pytest.mark.tier("slow", but_one_in=4)
@pytest.mark.parametrize("name", [mode.name for mode in soak_modes.MODES])
def test_every_mode_trains_and_ranks_agree(ranks: RankPool, name: str) -> None:
    (before, mine), (_, other) = ranks.run(trained, 2, name)
    assert all(map(torch.equal, mine, other))
    assert sum(not torch.equal(*pair) for pair in zip(before, mine, strict=True)) >= 5


def test_the_exit_status_says_that_something_grew() -> None:
    row = {"mode": "default", "rank": 1, "grows": []}
    soak.exit_if_growing([row])
    with pytest.raises(SystemExit, match=r"default \(rank 1\): keys"):
        soak.exit_if_growing([row, row | {"grows": ["keys"]}])


@pytest.mark.tier("nightly")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "soak.json"
    arguments = ["--mode", "default", "failing", "--steps", "24", "--every", "4", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench.soak", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    # So few steps may be a warm-up still.
    monkeypatch.setattr(soak, "exit_if_growing", lambda rows: None)
    soak.main()
    rows = json.loads(path.read_text())
    assert [(row["mode"], row["rank"]) for row in rows] == [(m, r) for m in ("default", "failing") for r in (0, 1)]
    assert all(len(values) == 6 for row in rows for values in row["samples"].values())
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("default", "failing", *soak.COUNTS))
    assert printed.count("flat") + printed.count("GROWS") == 4
