"""Nodes on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from unittest import mock

from fastddp.exchange import placement


def on_machines(rank: int, machines: Sequence[int]) -> AbstractContextManager[object]:
    """Inside, this rank finds itself on the machine of that number; ``machines``: of all ranks."""
    return mock.patch.object(placement, "_this_machine", return_value=machines[rank].to_bytes(8))


def nodes_of_two(rank: int) -> AbstractContextManager[object]:
    """Inside, ranks 0 and 1 find themselves on one machine, 2 and 3 on another one, and so on."""
    return on_machines(rank, (0, 0, 1, 1, 2, 2, 3, 3))
