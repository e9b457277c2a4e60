"""That `bench.healthy` trains as it says, and would hear an alarm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

from ranks import RankPool
from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import healthy

sys.path.pop()


def trained(rank: int, folder: str, damaged: bool) -> tuple[list[str], float, bool, bool]:
    """What was said, seconds paused, whether ranks agree, and whether there is a checkpoint."""
    options = argparse.Namespace(steps=30, ranks=2, pauses=4, patience=0.1, every=5, seed=0)
    training = healthy.Training(options, folder)
    if damaged and rank == 1:
        with torch.no_grad():
            next(training.model.parameters())[0, 0] += 1
    training.run(show=False)
    agree = healthy._agree(training.model)
    return training.said, sum(training.paused.values()), agree, Path(folder, "checkpoint").exists()


@pytest.mark.tier("nightly")  # an evaluation of a second
@pytest.mark.parametrize("damaged", [False, True], ids=["healthy", "damaged"])
def test_it_hears_what_is_wrong_and_only_that(ranks: RankPool, tmp_path: Path, damaged: bool) -> None:
    results = ranks.run(trained, 2, str(tmp_path), damaged)
    for said, _, agree, has_checkpoint in results:
        assert any("Replicas differ" in text for text in said) == damaged
        assert agree == (not damaged)
        assert has_checkpoint
    planned = healthy.pauses(4, 30, 2, 0.09, 0).values()
    assert sum(paused for _, paused, _, _ in results) == pytest.approx(sum(pause.seconds for pause in planned))


def test_the_exit_status_says_that_an_alarm_was_raised() -> None:
    row = {"rank": 1, "alarms": [], "replicas_agree": True}
    healthy.exit_if_alarmed([row])
    with pytest.raises(SystemExit, match="rank 1: step 3 stands still"):
        healthy.exit_if_alarmed([row, row | {"alarms": ["step 3 stands still"]}])
    with pytest.raises(SystemExit, match="replicas differ"):
        healthy.exit_if_alarmed([row | {"replicas_agree": False}])
