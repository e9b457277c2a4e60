"""compute-sanitizer finds nothing in a few steps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.needs_cuda
@pytest.mark.timeout(320)
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_sanitizer(tool: str, mode: str) -> None:
    script = Path(__file__).with_name("small_step.py")
    # Kernels of ours only: those of libraries are many, and not what is tested.
    only_ours = ["--kernel-name", "kernel_substring=fastddp"]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *only_ours, sys.executable]
    result = subprocess.run([*command, str(script), mode], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
