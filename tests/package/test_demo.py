"""What `make demo` shows is so: both DDPs come to the same bits, a stopped rank is named, and 8 bits are a quarter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    figures = json.loads((tmp_path / "train_gpt.json").read_text())
    both_come_to_the_same_bits(figures)
    the_report_names_the_stopped_rank_and_torchs_ddp_says_nothing(*figures["stalls"])
    with_8_bits_a_quarter_of_the_bytes_arrive(figures)
    each_part_says_where_to_read_on(ended.stdout)
    assert (tmp_path / "train_gpt.png").is_file()


def both_come_to_the_same_bits(figures: dict[str, Any]) -> None:
    assert figures["bitwise_equal"]
    assert figures["largest_difference"] == 0
    assert figures["fastddp"]["losses"] == figures["torch"]["losses"]
    assert len(figures["fastddp"]["losses"]) == STEPS


def the_report_names_the_stopped_rank_and_torchs_ddp_says_nothing(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["named"] == [1]
    assert ours["report"]["causes"][0]["cause"] == "stopped"
    assert "rank 1 is stopped" in ours["said"]
    assert theirs["report"] is None
    assert theirs["said"] == ""
    for stall in (ours, theirs):
        kinds = [{span["kind"] for span in spans} for spans in stall["spans"]]
        assert kinds == [{"step", "waits"}, {"step", "stopped"}]


def with_8_bits_a_quarter_of_the_bytes_arrive(figures: dict[str, Any]) -> None:
    plain, eight = figures["fastddp"], figures["eight_bits"]
    assert plain["bytes_a_step"] == pytest.approx(4 * figures["parameters"], rel=0.01)
    assert plain["bytes_a_step"] == pytest.approx(figures["torch"]["bytes_a_step"], rel=0.01)
    assert 0.25 < eight["bytes_a_step"] / plain["bytes_a_step"] < 0.28
    assert eight["losses"] != plain["losses"]
    assert eight["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.05)


def each_part_says_where_to_read_on(screen: str) -> None:
    pages = [line.split()[1].rstrip(":") for line in screen.splitlines() if line.startswith("→")]
    assert pages == ["docs/differences.md", "docs/watch.md", "docs/compression.md"]
    assert all((ROOT / page).is_file() for page in pages)
