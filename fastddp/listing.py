"""Ranks, in the words of messages."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 16


def listed(numbers: Sequence[int]) -> str:
    """Numbers of ranks; of many only the first sixteen.

    >>> listed([0, 1])
    '0, 1'
    """
    return ", ".join(map(str, numbers[:_MOST])) + (f", … ({len(numbers)} in all)" if len(numbers) > _MOST else "")


def ranks(numbers: Sequence[int]) -> str:
    """The same, with the noun.

    >>> ranks([3]), ranks([0, 1])
    ('rank 3', 'ranks 0, 1')
    """
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
