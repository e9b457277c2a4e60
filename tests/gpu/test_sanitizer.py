"""compute-sanitizer finds nothing in a few steps of every mode. Slow: `-k 'not sanitizer'` leaves it out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("small_step.py")
SECONDS = 220
SECONDS_ALONE = 90


def command(tool: str) -> list[str]:
    """Looks at kernels of ours only, and not at errors that calls return: NCCL probes what the driver can do."""
    only_ours = ["--kernel-name", "kernel_substring=fastddp", "--report-api-errors", "no"]
    return ["compute-sanitizer", "--tool", tool, *only_ours, "--error-exitcode", "9", sys.executable, str(SCRIPT)]


@pytest.fixture(scope="module")
def kernels_in_tritons_cache() -> None:
    """Compiled without a sanitizer, under which everything takes a multiple."""
    alone = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=SECONDS_ALONE)
    assert alone.returncode == 0, alone.stdout[-3000:] + alone.stderr[-2000:]


@pytest.mark.needs_cuda
@pytest.mark.usefixtures("kernels_in_tritons_cache")
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    try:
        result = subprocess.run(command(tool), capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"not done after {SECONDS} s:\n{(error.stdout or b'')[-3000:]!r}")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
