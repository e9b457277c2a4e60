"""A number for each model of a process group, by which ranks tell models apart, in the store and in each step."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ModelNumber:
    """``name`` is a part of keys in the store. ``agreed``: the number, from 1, if ranks agree on it; else 0.

    ``generation``: how often the model was given other ranks. ``members``: by rank, the number of its process
    (:func:`.generations.this_process`); (): ranks have not told each other.
    """

    name: str
    agreed: int
    generation: int = 0
    members: tuple[int, ...] = ()


_greatest: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_copies = itertools.count(1)


def next_number(group: dist.ProcessGroup) -> int:
    """This rank's proposal for the next model of ``group``. Proposals differ if ranks have made models alone."""
    return _greatest.get(group, 0) + 1


def take_number(
    group: dist.ProcessGroup, number: int, is_agreed: bool, generation: int = 0, members: tuple[int, ...] = ()
) -> ModelNumber:
    """Give a model of ``group`` this number; ``is_agreed``: the other ranks give it the same number."""
    _greatest[group] = max(number, _greatest.get(group, 0))
    # The store of the group may have keys of its earlier generations.
    name = f"{number} in generation {generation}" if generation else str(number)
    return ModelNumber(name, number if is_agreed else 0, generation, members)


def number_of_a_copy() -> ModelNumber:
    """A name of its own for a model that was copied or unpickled, maybe on this rank alone."""
    return ModelNumber(f"copy {next(_copies)}", 0)
