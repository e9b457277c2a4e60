"""torchft's own tests of its class, with fastddp's in its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "torchft_tests.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("ddp_healthy or sync_quorum", marks=pytest.mark.tier("slow")),
        pytest.param("ddp", marks=pytest.mark.tier("nightly")),
    ],
)
def test_torchfts_own_tests_pass(chosen: str) -> None:
    pytest.importorskip("torchft")
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "-k", f"({chosen}) and ddp and not async_quorum and not torchcomms"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) >= (2 if "healthy" in chosen else 4)
