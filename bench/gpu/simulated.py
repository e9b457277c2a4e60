"""The simulated device of the tests, on which everything can be tried out."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from bench import harness

DEVICE = "simulated"


def of_tests(name: str) -> Any:
    """A module of the tests: their simulated device, or one of their helpers."""
    tests = harness.ROOT / "tests"
    sys.path += [str(tests), str(tests / "support")]
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[-2:]


def fake_cuda() -> Any:
    """The tests' module."""
    return of_tests("fake_cuda")


def install() -> None:
    """Give this process the device."""
    module = fake_cuda()
    module.install()
    module.schedule("in_order")
