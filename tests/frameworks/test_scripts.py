"""Scripts that use a framework, ours and what it ships, under torchrun, with and without ``-m fastddp``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.test_utils
import pytest
import torch

from repository import ROOT
from side_by_side import differences

SCRIPT = Path(__file__).with_name("train.py")
ACCELERATE = Path(accelerate.test_utils.__file__).parent / "scripts"
# torch's gloo threads drop the tensors of a finished collective after they have said that it is finished, and need the
# GIL for it. Where Python ends just then, the thread is unwound through a destructor, which aborts the process: under
# load about one run in thirty of this script with torch's own class.
ABORTED_AT_EXIT = "terminate called without an active exception"


def run_under_torchrun(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Two processes that run a script; once more, at most twice, where torch's process group aborts as Python ends."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(3):
        ended = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=140)
        if ended.returncode == 0 or ABORTED_AT_EXIT not in ended.stderr:
            break
    return ended


def trained(framework: str, under: list[str], file: Path) -> dict[str, Any]:
    ended = run_under_torchrun([*under, str(SCRIPT), framework, str(file)])
    assert ended.returncode == 0, ended.stderr
    found = torch.load(file)
    assert found["ranks"] == 2
    return found


@pytest.mark.tier("nightly")
@pytest.mark.timeout(860)
@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_a_script_trains_the_same_with_fastddp(framework: str, tmp_path: Path) -> None:
    theirs = trained(framework, [], tmp_path / "theirs.pt")
    ours = trained(framework, ["-m", "fastddp"], tmp_path / "ours.pt")
    assert theirs["wrapper"] == "torch.nn.parallel.distributed"
    assert ours["wrapper"] == "fastddp.ddp"
    assert differences(theirs["parameters"], ours["parameters"]) == []


@pytest.mark.tier("slow")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_accelerates_own_tests_pass_and_say_the_same(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of trainings they say that losses and parameters are those of one process, or else they end with an error.
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    theirs, ours = (run_under_torchrun([*under, str(ACCELERATE / f"{script}.py")]) for under in ([], ["-m", "fastddp"]))
    assert (theirs.returncode, ours.returncode) == (0, 0), ours.stderr
    assert sorted(ours.stdout) == sorted(theirs.stdout)  # letters, because two ranks write into each other's lines
    assert "in place of torch's DDP: 2 ranks over gloo" in ours.stderr


@pytest.mark.tier("slow")
def test_the_trainer_of_the_page_of_recipes_trains_with_8_bits() -> None:
    """And gets options that it knows nothing of."""
    script = ROOT / "examples" / "recipes" / "transformers_trainer.py"
    ended = run_under_torchrun(["-m", "fastddp", "--hook", "int8", "--on-stall", "raise", str(script)])
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks over gloo" in ended.stderr
    assert "hook int8_compress_hook, watching for stalls" in ended.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", ended.stdout)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]
