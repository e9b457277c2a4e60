"""Tensors inside the inputs and outputs of a forward.

Containers are those that torch's pytree knows (tuples, named tuples, lists, dicts and registered classes) and
dataclasses, frozen ones too. Other objects are left as they are, and not searched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in ``value``, at any depth of containers."""
    return [value] if isinstance(value, Tensor) else list(_walk(value))


def _walk(value: Any) -> Iterator[Tensor]:
    for leaf in _pytree.tree_leaves(value, is_leaf=_is_dataclass):
        if isinstance(leaf, Tensor):
            yield leaf
        elif _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from _walk(getattr(leaf, field.name, None))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Copy ``value`` with ``function(tensor)`` in place of each tensor, at any depth of containers."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return _map_dataclass(function, leaf) if _is_dataclass(leaf) else leaf

    return _pytree.tree_map(replaced, value, is_leaf=_is_dataclass)


def _is_dataclass(value: Any) -> bool:
    # Some dataclasses are also registered with pytree (the results of Hugging Face's models), which can rebuild them.
    known = type(value) in _pytree.SUPPORTED_NODES
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not known


def _map_dataclass(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    result = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(result, field.name, map_tensors(function, getattr(value, field.name)))
    return result
