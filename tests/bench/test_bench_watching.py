"""What `bench.watching` counts."""

from __future__ import annotations

import sys

import pytest

from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench import watching

sys.path.pop()


@pytest.mark.tier("nightly")
def test_a_page_costs_more_the_more_gradients_there_are() -> None:
    few, many = (watching._nanoseconds_of_page([list(range(count))]) for count in (1, 10_000))
    assert 0 < few < many
