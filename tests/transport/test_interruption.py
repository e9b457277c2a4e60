"""Waits that another thread can end, and that have no timeout of their own."""

from __future__ import annotations

from typing import Any

import pytest

from package_copy import import_library, load_with_fastddp
from repository import ROOT

pytestmark = pytest.mark.tier("slow")  # it compiles


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = ROOT / "tests" / "support" / "late_work.cpp"
    return import_library(load_with_fastddp(source, tmp_path_factory.mktemp("late_work")))


@pytest.mark.parametrize("is_known", [True, False], ids=["a collective", "written in Python"])
def test_a_work_that_comes_late_has_ended_well_or_raises_its_own_error(works: Any, is_known: bool) -> None:
    late = 0.5  # seconds; a wait looks whether it is interrupted more often
    works.wait_for_late_work(is_known, late, fails=False)
    with pytest.raises(RuntimeError, match="the connection is lost"):
        works.wait_for_late_work(is_known, late, fails=True)


def test_a_wait_for_a_collective_that_nobody_joins_can_be_ended(works: Any) -> None:
    with pytest.raises(RuntimeError, match="another rank is stopped"):
        works.wait_for_interrupted_work()


def test_groups_are_aborted_at_once_and_those_that_cannot_be_are_told(works: Any) -> None:
    assert works.abort_groups(["", "the abort takes too long", ""]) == ["the abort takes too long"]
