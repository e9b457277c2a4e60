"""The simulated device of the tests, on which everything can be tried out."""

from __future__ import annotations

import sys
from typing import Any

from bench import harness

DEVICE = "simulated"


def fake_cuda() -> Any:
    """The tests' module."""
    sys.path.append(str(harness.ROOT / "tests"))
    try:
        import fake_cuda
    finally:
        sys.path.pop()
    return fake_cuda


def install() -> None:
    """Give this process the device."""
    module = fake_cuda()
    module.install()
    module.schedule("in_order")
