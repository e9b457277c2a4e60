"""Nodes on one machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from fastddp.exchange import placement


def nodes_of_two(rank: int) -> AbstractContextManager[object]:
    """Inside, ranks 0 and 1 find themselves on one machine, 2 and 3 on another one, and so on."""
    return mock.patch.object(placement, "_this_machine", return_value=(rank // 2).to_bytes(8))
