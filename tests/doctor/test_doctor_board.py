"""What ranks put up for the doctor: JSON, taken as values of known types, and nothing that could run."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fastddp.tools.doctor
from fastddp.tools.doctor.examination import Examination
from fastddp.tools.doctor.exchange import Timing
from fastddp.tools.doctor.findings import KernelCheck
from fastddp.tools.doctor.software import Software
from fastddp.tools.doctor.together import KINDS, Answers, Board

SOFTWARE = Software("3.11", "2.13", None, None, None, "no \ud800", "0.1.0", None, None, "580.95.05", ("H100",))
CHECK = KernelCheck("cpu", "pack", "C++", wrong=("läuft nicht",))
VALUES: dict[str, Any] = {
    "examination": Examination(SOFTWARE, "cuda:0", "host GPU-1", (CHECK,)),
    "backend": "gloo",
    "exchange": Timing(1e-3, False),
    "verdict": True,
}


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def heard(store: dist.Store, stage: str) -> Answers:
    return Board(store).collect(stage, [0], 20)


@pytest.mark.parametrize("stage", KINDS)
def test_values_come_back_as_they_were(store: dist.Store, stage: str) -> None:
    Board(store).post(stage, 0, lambda: VALUES[stage])
    assert heard(store, stage).values == {0: VALUES[stage]}


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("an entry was run",))


ENTRIES = [pickle.dumps((Harmful(), None)), b"[" * 100_000, b"3", b'{"value": 3}', b'{"error": {}}']


def test_an_entry_that_cannot_be_read_is_the_error_of_its_rank(store: dist.Store) -> None:
    for rank, entry in enumerate(ENTRIES):
        store.set(f"backend/{rank}", entry)
    answers = Board(store).collect("backend", range(len(ENTRIES)), 20)
    assert (answers.values, sorted(answers.errors)) == ({}, [*range(len(ENTRIES))])
    for error in answers.errors.values():
        assert error.startswith("what it put up cannot be read ")
        assert len(error) < 1100


def test_a_step_that_cannot_be_read_is_said_to_be(store: dist.Store) -> None:
    board = Board(store)
    board.tell(0, 3, "joining")
    store.set("step/1", pickle.dumps(Harmful()))
    silent = board.collect("backend", [0, 1, 2], 0).silent
    words = ["joining", "something that cannot be read", "nowhere: it has not come"]
    assert [silent[rank].words for rank in range(3)] == words
    assert silent[0].number == 3


# What could run what somebody else wrote; torch.distributed's collectives of objects do.
MODULES = r"^\s*(import|from) \w*(pickle|dill|marshal|shelve)\b"
LOADS = re.compile(rf"{MODULES}|\.\w+_object(_list)?\(|torch\.load\((?!.*weights_only=True)", re.MULTILINE)


def test_nothing_unpickles_what_came_over_the_network() -> None:
    sources = [*Path(fastddp.tools.doctor.__file__).parents[2].rglob("*.py")]
    assert len(sources) > 50
    assert [(path.name, match[0]) for path in sources if (match := LOADS.search(path.read_text()))] == []
