"""The script of docs/recipes.md that uses Transformers' Trainer, as the page says to start it."""

from __future__ import annotations

import re

import pytest

from repository import ROOT
from test_scripts import run_under_torchrun

SCRIPT = ROOT / "examples" / "recipes" / "transformers_trainer.py"


@pytest.mark.tier("slow")
def test_the_trainer_of_the_page_trains_with_8_bits() -> None:
    ended = run_under_torchrun(["-m", "fastddp", "--hook", "int8", "--on-stall", "raise", str(SCRIPT)])
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks over gloo" in ended.stderr
    assert "hook int8_compress_hook, watching for stalls" in ended.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", ended.stdout)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]
