"""Ranks and names, in the words of messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import SequenceMatcher

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


def names_near(name: object, names: Collection[str]) -> str:
    """What to say of a name that is none of these: the nearest one, and which there are.

    >>> names_near("hooks", ["hook", "buckets"])
    "Did you mean 'hook'? There are hook, buckets."
    """

    def likeness(known: str) -> tuple[float, int]:
        blocks = SequenceMatcher(None, known.lower(), str(name).lower()).get_matching_blocks()
        return sum(block.size for block in blocks) / max(1, len(str(name))), -len(known)

    nearest = max(names, key=likeness)
    return (f"Did you mean {nearest!r}? " if likeness(nearest)[0] > 0.7 else "") + f"There are {', '.join(names)}."
