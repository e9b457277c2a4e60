"""Which model of its process group a model is: so ranks know which one they speak of, in the store and in each step."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ModelNumber:
    """The name is a part of keys of the store. ``agreed``: the number, from 1, if ranks agree on it; else 0."""

    name: str
    agreed: int


_greatest: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_copies = itertools.count(1)


def next_number(group: dist.ProcessGroup) -> int:
    """What this rank would give the next model of ``group``: ranks may have made models alone."""
    return _greatest.get(group, 0) + 1


def take_number(group: dist.ProcessGroup, number: int, is_agreed: bool) -> ModelNumber:
    """Take this number for a model of ``group``; ``is_agreed``: the other ranks give it the same."""
    _greatest[group] = max(number, _greatest.get(group, 0))
    return ModelNumber(str(number), number if is_agreed else 0)


def number_of_a_copy() -> ModelNumber:
    """For a model that was copied or unpickled, maybe on this rank alone: a name of its own."""
    return ModelNumber(f"copy {next(_copies)}", 0)
