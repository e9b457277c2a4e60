"""What `make demo` shows is so: both DDPs come to the same bits, a stopped rank is named, and 8 bits are a quarter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

SMALL = ["--steps", "12", "--block", "4", "--layers", "2", "--width", "128", "--context", "32"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The figures, what stood on the screen, and the folder, of a small run."""
    folder = tmp_path_factory.mktemp("demo")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(ROOT / "examples" / "train_gpt.py")
    ended = subprocess.run(
        [*torchrun, script, *SMALL, "--out", str(folder)], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "train_gpt.json").read_text()), ended.stdout, folder


@pytest.mark.tier("slow")
@pytest.mark.timeout(300)
def test_both_ddps_come_to_the_same_bits(shown: tuple[dict[str, Any], str, Path]) -> None:
    figures, _, _ = shown
    assert figures["bitwise_equal"]
    assert figures["largest_difference"] == 0
    assert figures["fastddp"]["losses"] == figures["torch"]["losses"]
    assert len(figures["fastddp"]["losses"]) == 12


@pytest.mark.tier("slow")
@pytest.mark.timeout(300)
def test_the_report_names_the_stopped_rank_and_torchs_ddp_says_nothing(
    shown: tuple[dict[str, Any], str, Path],
) -> None:
    figures, _, _ = shown
    ours, theirs = figures["stalls"]
    assert ours["named"] == [1]
    assert ours["report"]["causes"][0]["cause"] == "stopped"
    assert "rank 1 is stopped" in ours["said"]
    assert theirs["report"] is None
    assert theirs["said"] == ""
    for stall in (ours, theirs):
        kinds = [{span["kind"] for span in spans} for spans in stall["spans"]]
        assert kinds == [{"step", "waits"}, {"step", "stopped"}]


@pytest.mark.tier("slow")
@pytest.mark.timeout(300)
def test_with_8_bits_a_quarter_of_the_bytes_arrive(shown: tuple[dict[str, Any], str, Path]) -> None:
    figures, _, _ = shown
    plain, eight = figures["fastddp"], figures["eight_bits"]
    assert plain["bytes_a_step"] == pytest.approx(4 * figures["parameters"], rel=0.01)
    assert plain["bytes_a_step"] == pytest.approx(figures["torch"]["bytes_a_step"], rel=0.01)
    assert 0.25 < eight["bytes_a_step"] / plain["bytes_a_step"] < 0.28
    assert eight["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.05)


@pytest.mark.tier("slow")
@pytest.mark.timeout(300)
def test_each_part_says_where_to_read_on(shown: tuple[dict[str, Any], str, Path]) -> None:
    _, screen, folder = shown
    pages = [line.split()[1].rstrip(":") for line in screen.splitlines() if line.startswith("→")]
    assert pages == ["docs/differences.md", "docs/watch.md", "docs/compression.md"]
    assert all((ROOT / page).is_file() for page in pages)
    assert (folder / "train_gpt.png").is_file()
