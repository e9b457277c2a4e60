"""Things that one thread walks while another may add some; known for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Living(weakref.WeakKeyDictionary[Key, Value]):
    """Its keys may be walked beside threads that add some: weakref's own walk raises then, between two keys."""

    def __iter__(self) -> Iterator[Key]:
        return iter([key for reference in self.keyrefs() if (key := reference()) is not None])
