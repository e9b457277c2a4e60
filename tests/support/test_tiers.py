"""What `make test` leaves out."""

from __future__ import annotations

import pytest


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(5))
def test_one_in_two_is_not_slow(request: pytest.FixtureRequest, number: int) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (number % 2 == 0)
