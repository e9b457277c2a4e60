"""What `bench.gpu` does without a GPU: its arithmetic, its models and its rows."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import block8, pack
from bench.gpu import gradients, pages, results
from bench.gpu.contestants import GpuStep

sys.path.pop()

CPU = torch.device("cpu")


# -------------------------------------------------------------------------------------------- models and contestants


class _Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * (self.weight * values).sum()


# ---------------------------------------------------------------------------------------------------------- verdicts


def test_gradients_are_compared_by_the_spread_of_the_reference() -> None:
    own, batch = GpuStep(_Doubled(), zeroed=False), (torch.ones(3),)
    expected = gradients.Expected.of(own, batch)
    assert expected.spread == 0
    assert expected.verdict(own, batch) == ("equal", 0.0)
    assert expected.verdict(own, (torch.tensor([1.0, 1.0, 1.5]),)) == ("WRONG", 0.5)
    loose = gradients.Expected(expected.gradients, spread=0.2)
    assert loose.verdict(own, (torch.tensor([1.0, 1.0, 1.5]),))[0] == "within the spread"
    assert gradients.largest_difference([torch.tensor([math.nan])], [torch.ones(1)]) == math.inf
    assert gradients.largest_difference([], [torch.ones(1)]) == math.inf


@pytest.mark.parametrize(("dtype", "wire"), pack.DTYPES, ids=str)
def test_all_ways_to_pack_agree_unless_one_does_nothing(monkeypatch: pytest.MonkeyPatch, dtype: Any, wire: Any) -> None:
    assert pack.wrong_contestants(pack.contestants(0.05, dtype, wire, CPU)) == set()
    monkeypatch.setattr(pack, "unpack_foreach_copy", lambda bucket: None)
    assert pack.wrong_contestants(pack.contestants(0.05, dtype, wire, CPU)) == {("unpack", "_foreach_copy_")}


@pytest.mark.parametrize("operation", block8.OPERATIONS)
def test_a_step_of_block8_that_does_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setattr(block8, "call", lambda kernels, operation, coded: None)
    assert block8.wrong_contestants(operation, "int8", torch.float32, CPU) == {"fastddp", "operators"}


# ------------------------------------------------------------------------------------------------- rows and profiles


def test_rows_are_in_the_file_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    results.Results(path, "ceilings").add("ceiling", what="copy", median=1 / 3)
    results.Results(path, "step").add("step", result="WRONG", largest_difference=math.inf)
    again = results.Results(path, "ceilings")  # this section's rows are measured anew, the others stay
    again.add("ceiling", what="matmul", median=2e-7 / 3)
    rows = results.read(path)
    assert [row["section"] for row in rows] == ["step", "ceilings"]
    assert rows[0]["largest_difference"] is None
    assert rows[1]["median"] == 6.66667e-8
    assert results.wrong(rows) == rows[:1]
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------------------------ the page


def test_pages_say_what_all_rows_say() -> None:
    """After new rows: ``python -m bench.gpu.pages --write``, and the READMEs by hand."""
    rows = pages.read()
    text = pages.PAGE.read_text()
    assert pages.page(text, rows) == text
    assert {name for _, name, _ in pages.PLACE.findall(text)} == pages.PARTS.keys()
    for readme in ("README.md", "bench/results/README.md"):
        assert all(figure in (ROOT / readme).read_text() for figure in pages.headline(rows)), readme


def test_ahead_is_in_all_runs_and_beyond_what_torch_differs_from_itself() -> None:
    assert pages.verdict([0.90, 0.97], [0.98, 1.01]) == "ahead"
    assert pages.verdict([0.90, 1.01], [1.0]) == pages.verdict([0.97, 0.98], [1.03]) == "level"
    assert pages.verdict([1.01, 1.02], [1.0, 1.001]) == "behind"
