"""What `bench.construction` measures and says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fastddp
from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import construction, harness

sys.path.pop()


def verdicts(rank: int) -> list[bool]:
    module = nn.ParameterList([torch.zeros(3), torch.zeros(2, 2)])
    everyone = [construction.starts_from_rank_0(wrap, module) for wrap in construction.CONTESTANTS.values()]
    without = construction.starts_from_rank_0(lambda m: fastddp.DistributedDataParallel(m, init_sync=False), module)
    return [*everyone, without]


@pytest.mark.tier("slow")
def test_ranks_that_keep_values_of_their_own_are_noticed(ranks: RankPool) -> None:
    assert ranks.run(verdicts, 2) == [[True, True, True, False]] * 2


def test_rows_have_medians_and_both_ratios() -> None:
    samples = {"torch": [10.0, 20.0, 60.0], "fastddp": [10.0, 10.0, 15.0]}
    torch_row, row = construction.compare(samples, [True, False])
    assert (torch_row["ratio_to_torch"], torch_row["paired_ratio_to_torch"], torch_row["values"]) == (1, 1, "rank 0's")
    assert (row["median_ms"], row["ratio_to_torch"], row["paired_ratio_to_torch"]) == (10, 0.5, 0.5)
    assert row["values"] == "WRONG"


def test_the_exit_status_says_that_somebody_was_wrong() -> None:
    row = {"contestant": "fastddp", "case": "gpt2", "values": "rank 0's"}
    construction.exit_if_wrong([row])
    with pytest.raises(SystemExit, match="fastddp on gpt2"):
        construction.exit_if_wrong([row, row | {"values": "WRONG"}])


@pytest.mark.tier("nightly")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "construction.json"
    arguments = ["--case", "5000x8sq", "--rounds", "2", "--warmup", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench.construction", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path, str(harness.ROOT)])  # the ranks inherit it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    construction.main()
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [row["contestant"] for row in rows] == ["torch", "torch-again", "fastddp"]
    assert all(row["contestant"] in printed for row in rows)
    assert {row["values"] for row in rows} == {"rank 0's"}
    assert rows[0]["parameters"] == 5000
