"""Waits that another thread can end: they look up now and then, which those who wait never notice."""

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


def test_a_collective_that_ends_while_the_wait_looks_up_has_ended_well_or_raises_its_own_error(works: Any) -> None:
    works.wait_for_late_work(fails=False)
    with pytest.raises(RuntimeError, match="the connection is lost"):
        works.wait_for_late_work(fails=True)
    with pytest.raises(RuntimeError, match="the connection is lost"):
        works.wait_for_broken_work()  # which never says that it has ended


def test_groups_are_aborted_at_once_and_those_that_cannot_be_are_told(works: Any) -> None:
    assert works.abort_groups(["", "the abort takes too long", ""]) == ["the abort takes too long"]
