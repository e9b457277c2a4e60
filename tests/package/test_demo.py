"""What `make demo` shows is so: both DDPs come to the same bits, a stopped rank is named, and 8 bits are a quarter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

STEPS = 12
SMALL = ["--steps", str(STEPS), "--block", "4", "--layers", "2", "--width", "128", "--context", "32"]


@pytest.mark.tier("slow")
def test_the_demo_shows_what_is_so(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    demo = [*torchrun, str(ROOT / "examples" / "train_gpt.py"), *SMALL, "--out", str(tmp_path)]
    ended = subprocess.run(demo, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "train_gpt.png").is_file()
    figures = json.loads((tmp_path / "train_gpt.json").read_text())
    # Both come to the same bits.
    fastddp, torch, eight = figures["fastddp"], figures["torch"], figures["eight_bits"]
    assert (figures["bitwise_equal"], figures["largest_difference"]) == (True, 0)
    assert fastddp["losses"] == torch["losses"]
    assert len(fastddp["losses"]) == STEPS
    # The report names the stopped rank, and torch's DDP says nothing.
    ours, theirs = figures["stalls"]
    assert (ours["named"], ours["report"]["causes"][0]["cause"]) == ([1], "stopped")
    assert "rank 1 is stopped" in ours["said"]
    assert (theirs["report"], theirs["said"]) == (None, "")
    for stall in (ours, theirs):
        kinds = [{span["kind"] for span in spans} for spans in stall["spans"]]
        assert kinds == [{"step", "waits"}, {"step", "stopped"}]
    # With 8 bits a quarter of the bytes arrive.
    assert fastddp["bytes_a_step"] == pytest.approx(4 * figures["parameters"], rel=0.01)
    assert fastddp["bytes_a_step"] == pytest.approx(torch["bytes_a_step"], rel=0.01)
    assert 0.25 < eight["bytes_a_step"] / fastddp["bytes_a_step"] < 0.28
    assert eight["losses"] != fastddp["losses"]
    assert eight["losses"][-1] == pytest.approx(fastddp["losses"][-1], rel=0.05)
    # Bars and the table below tell the same speed.
    for of_contestant in (fastddp, torch):
        assert ended.stdout.count(f"{of_contestant['tokens_a_second']:,.0f}") == 2
    # Each part says where to read on.
    pages = [line.split()[1].rstrip(":") for line in ended.stdout.splitlines() if line.startswith("→")]
    assert pages == ["docs/differences.md", "docs/watch.md", "docs/compression.md"]
    assert all((ROOT / page).is_file() for page in pages)
