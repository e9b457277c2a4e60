"""Ranks and names, in the words of messages."""

from __future__ import annotations

import re
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

    def nearness(known: str) -> tuple[int, float]:
        return len(words(name) & words(known)), SequenceMatcher(None, str(name).lower(), known.lower()).ratio()

    def words(text: object) -> set[str]:
        return set(re.split(r"[\W_]+", str(text).lower())) - {""}

    nearest = max(names, key=nearness)
    is_near = nearness(nearest) >= (1, 0.0) or nearness(nearest)[1] > 0.6
    return (f"Did you mean {nearest!r}? " if is_near else "") + f"There are {', '.join(names)}."
