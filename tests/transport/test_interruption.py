"""Waits that another thread can end, and that have no timeout of their own."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

import fastddp
from on_ranks import on_ranks
from package_copy import import_library, load_with_fastddp
from parts import Parts, local_input
from repository import ROOT

pytestmark = pytest.mark.tier("slow")  # it compiles


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = ROOT / "tests" / "support" / "late_work.cpp"
    return load_with_fastddp(source, tmp_path_factory.mktemp("late_work"))


@pytest.fixture(scope="module")
def works(library: Path) -> Any:
    return import_library(library)


@pytest.mark.parametrize("is_known", [True, False], ids=["a collective", "written in Python"])
def test_a_work_that_comes_late_has_ended_well_or_raises_its_own_error(works: Any, is_known: bool) -> None:
    late = 0.5  # seconds; a wait looks whether it is interrupted more often
    works.wait_for_late_work(is_known, late, fails=False)
    with pytest.raises(RuntimeError, match="the connection is lost"):
        works.wait_for_late_work(is_known, late, fails=True)


def test_a_wait_for_a_collective_that_nobody_joins_can_be_ended(works: Any) -> None:
    with pytest.raises(RuntimeError, match="another rank is stopped"):
        works.wait_for_interrupted_work()


def test_all_waits_for_messages_are_ended_and_not_only_the_last_that_began(works: Any) -> None:
    errors = works.interrupt_messages(3)
    assert ["another rank is stopped" in error for error in errors] == [True] * 3


def test_a_long_wait_asks_its_future_once(works: Any) -> None:
    assert works.calls_after_a_wait(0.7) == 1


def test_groups_are_aborted_at_once_and_those_that_cannot_be_are_told(works: Any) -> None:
    assert works.abort_groups(["", "the abort takes too long", ""]) == ["the abort takes too long"]


@pytest.mark.parametrize("is_interrupted", [True, False])
@on_ranks(2)
def test_memory_that_may_be_on_its_way_outlives_an_interrupted_model(
    rank: int, library: Path, is_interrupted: bool
) -> None:
    """Another rank may still write to it, and nobody waits for that any more."""
    model = fastddp.DistributedDataParallel(Parts("a"), gradient_as_bucket_view=True)
    model(local_input(rank)).backward()
    wire = StorageWeakRef(next(model.parameters()).grad.untyped_storage())
    model.zero_grad()  # parameters are kept, and their gradients would be
    if is_interrupted:
        import_library(library).interrupt(model.reducer.interruption, "another rank is stopped")
    del model
    gc.collect()
    assert wire.expired() == (not is_interrupted)
