"""Which model of its process group a model is: so ranks know which one they speak of, in the store and in each step."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from fastddp.wrapper import Wrapper


@dataclass(frozen=True)
class ModelNumber:
    """The name is a part of keys of the store. ``agreed``: the number, from 1, if ranks agree on it; else 0."""

    name: str
    agreed: int


_greatest: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_number_of: weakref.WeakKeyDictionary[Wrapper, ModelNumber] = weakref.WeakKeyDictionary()
_copies = itertools.count(1)


def next_number(group: dist.ProcessGroup) -> int:
    """What this rank would give the next model of ``group``: ranks may have made models alone."""
    return _greatest.get(group, 0) + 1


def give_number(model: Wrapper, number: int, is_agreed: bool) -> None:
    """Give ``model`` this number; ``is_agreed``: the other ranks give it the same."""
    _greatest[model.process_group] = max(number, _greatest.get(model.process_group, 0))
    _number_of[model] = ModelNumber(str(number), number if is_agreed else 0)


def give_number_of_a_copy(model: Wrapper) -> None:
    """Give a model that was copied or unpickled, maybe on this rank alone, a name of its own."""
    _number_of[model] = ModelNumber(f"copy {next(_copies)}", 0)


def number_of(model: Wrapper) -> ModelNumber:
    """What it was given."""
    return _number_of[model]
