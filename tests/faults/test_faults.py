"""Faults in real runs: rank and cause are named, by a report or by an error; and nothing is said without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from repository import ROOT

# Only while bench is imported: with the root there for good, kernels/ could shadow the package of that name on PyPI.
sys.path.append(str(ROOT))

from bench.faults import network
from bench.faults.entries import FAULTS, Fault
from bench.faults.forking import Forking, forking
from bench.faults.launch import run_fault

sys.path.pop()

PATIENCE = 3.0
# TCP sends again after 3.0 and then after 6.2 s, and twice the patience makes a verdict.
PATIENCE_OF_A_NETWORK = 5.0


def selection() -> Iterator[Any]:
    """Each fault twice, with other numbers of ranks and other exchanges: all pairs of a rank count and an exchange."""
    for number, fault in enumerate(FAULTS):
        for turn in range(2):
            ranks = fault.ranks[(number + turn) % len(fault.ranks)]
            exchange = fault.exchanges[(number + 2 * turn) % len(fault.exchanges)]
            tier = pytest.mark.tier("slow" if turn == 0 and fault.name == "sigstop" else "nightly")
            yield pytest.param(fault, ranks, exchange, id=f"{fault.name}-{ranks}-{exchange}", marks=tier)


@pytest.fixture(scope="module")
def starter() -> Iterator[Forking]:
    with forking() as process:
        yield process


@pytest.mark.parametrize(("fault", "ranks", "exchange"), list(selection()))
def test_rank_and_cause_are_named(starter: Forking, fault: Fault, ranks: int, exchange: str) -> None:
    if fault.network and (why := network.unavailable()):
        pytest.skip(why)
    outcome = run_fault(starter, fault, ranks, exchange, PATIENCE_OF_A_NETWORK if fault.network else PATIENCE)
    assert outcome.is_right(), outcome
