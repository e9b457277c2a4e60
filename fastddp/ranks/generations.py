"""What is remembered of a process group holds for one generation of it.

Torch can give a group other ranks (``ProcessGroup.reconfigure``), and the object stays the same. Or a rank comes back
to a group that others have never left. So each time ranks begin to use a group together, they forget what some of them
may remember of it.
"""

from __future__ import annotations

import os
import weakref
from typing import Generic, TypeVar

import torch.distributed as dist

from fastddp.ranks.living import Living

Value = TypeVar("Value")
Default = TypeVar("Default")

_generations: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

_drawn: tuple[int, int] = (0, 0)  # process and number


def generation_of(group: dist.ProcessGroup) -> int:
    """How often :func:`begin_generation` was called for this group, in this process. Ranks may differ."""
    return _generations.get(group, 0)


def begin_generation(group: dist.ProcessGroup) -> None:
    """All ranks of the group call this together, when they begin to use it for a model that has trained in another."""
    _generations[group] = generation_of(group) + 1


class OfGroups(Generic[Value]):
    """A value for each group, in its present generation. Groups are not kept alive."""

    def __init__(self) -> None:
        self._values: Living[dist.ProcessGroup, tuple[int, Value]] = Living()

    def get(self, group: dist.ProcessGroup, default: Default) -> Value | Default:
        """The group's value; ``default``: it has none."""
        generation, value = self._values.get(group, (None, default))
        return value if generation == generation_of(group) else default

    def __setitem__(self, group: dist.ProcessGroup, value: Value) -> None:
        self._values[group] = generation_of(group), value

    def groups(self) -> list[dist.ProcessGroup]:
        """Those that have a value, the first one first."""
        return [group for group in self._values if self._values[group][0] == generation_of(group)]


def this_process() -> int:
    """A number of 64 bits that no other process has, also not one that takes this one's place."""
    global _drawn
    if _drawn[0] != os.getpid():
        _drawn = os.getpid(), int.from_bytes(os.urandom(8), "little", signed=True)
    return _drawn[1]
