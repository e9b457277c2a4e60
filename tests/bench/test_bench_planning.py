"""The command line of `bench.planning`, and what it says at its end."""

from __future__ import annotations

import doctest
import sys
from typing import Any

import pytest

from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import contestants, network, planning, step

sys.path.pop()


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(planning).failed == 0


def test_the_plan_competes_with_every_fixed_size_and_is_made_before_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []

    def run(options: Any) -> list[Any]:
        chosen.append(options)
        return []

    monkeypatch.setattr(network, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench.planning", "--rounds", "3"])
    planning.main()
    (options,) = chosen
    assert (options.rate, options.case, options.rounds) == (["1gbit", "10gbit"], ["resnet50", "gpt"], 3)
    assert options.warmup >= 8
    line_up = contestants.line_up(options.contestant, options.hook)
    assert [c.bucket_cap_mb(options.bucket_cap_mb) for c in line_up] == [None, "auto", 1, 5, 25, 100]
    assert line_up[0].is_torch


def test_fixed_sizes_compete_only_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.step"])
    assert not [name for name in step.parse_arguments().contestant if name == "fastddp-auto" or name[-1].isdigit()]
