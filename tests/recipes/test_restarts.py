"""The scripts of docs/elastic.md that survive `kill -9`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

pytestmark = [pytest.mark.tier("slow"), pytest.mark.timeout(300)]

RECIPES = ROOT / "examples" / "recipes"


def children_of(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(") ", 1)[1].split()[1])
        except OSError:  # it has ended
            continue
        if parent == process:
            found.append(int(stat.parent.name))
    return found


def losses_of(folder: Path, *, kill_at: int | None) -> dict[tuple[str, str], str]:
    """By rank and step, under torchrun; ``kill_at``: the step of rank 0 after which one rank is killed.

    Lines of two ranks may come as one.
    """
    restarts = f"--max-restarts={int(kill_at is not None)}"  # no second attempt fails
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", restarts]
    process = subprocess.Popen(
        [*command, str(RECIPES / "restarts.py"), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert process.stdout is not None
    losses: dict[tuple[str, str], str] = {}
    for line in process.stdout:
        for rank, step, loss in re.findall(r"rank (\d), step (\d+), loss ([\d.e-]+)", line):
            losses[rank, step] = loss
            if (rank, int(step)) == ("0", kill_at):
                kill_at = None
                os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    assert process.wait() == 0
    return losses


def test_after_a_restart_losses_are_those_of_a_run_that_nobody_has_disturbed(tmp_path: Path) -> None:
    undisturbed = losses_of(tmp_path / "undisturbed", kill_at=None)
    assert len(undisturbed) == 2 * 40
    assert losses_of(tmp_path / "killed", kill_at=18) == undisturbed


def test_in_one_process_the_ranks_that_are_left_go_on_and_another_joins() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # The file's name in the place of a rank's: the launcher.
    result = subprocess.run(
        [sys.executable, str(RECIPES / "in_process.py"), "launcher", str(port)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert set(re.findall(r"(\d) ranks, generation (\d)", result.stdout)) == {("3", "0"), ("2", "1"), ("3", "2")}
    sums = re.findall(r"([a-d]): (-?\d[\d.e-]*)", result.stdout)
    assert sorted(name for name, _ in sums) == ["a", "c", "d"]
    assert len({total for _, total in sums}) == 1
