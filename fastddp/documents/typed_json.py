"""JSON from somebody else, read within bounds, and as values of the expected types."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

DEEPEST = 32
"""Most lists and objects inside of each other. Fastddp writes fewer than ten, and code that reads the value may safely
recurse this often."""


class Unexpected(ValueError):
    """A value is not of the expected type; the message names its place."""


def parsed(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, is cut short, or is nested too deeply."""
    try:
        value = json.loads(data, parse_constant=_refuse)
        if _depth(value) <= DEEPEST:
            return value
    except RecursionError:  # at Python's own limit, which is higher than ours
        pass
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def _depth(value: Any) -> int:
    """How many lists and objects are inside of each other. Counted without recursion."""
    depth = 0
    level = [value]
    while level := [inner for inner in level if isinstance(inner, (list, dict))]:
        depth += 1
        level = [item for inner in level for item in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, Python's own extensions of JSON."""
    raise ValueError(f"{constant} is no number of JSON")


def restored(value: Any, kind: Any, place: str) -> Any:
    """The value of type ``kind`` of which ``asdict`` and ``json`` made ``value``, as :func:`parsed` returns it.

    A kind is str, int, float, bool; a dataclass, tuple, list or dict (with str as keys) of such types; Literal; or one
    of these or None. Raises Unexpected, with the ``place`` of the value, in words, if it is of another type.
    """
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (some,) = (option for option in arguments if option is not NoneType)
        return None if value is None else restored(value, some, place)
    if origin is Literal:
        demand(value in arguments, value, place, "one of " + ", ".join(map(repr, arguments)))
        return value
    if origin in (tuple, list):
        demand(isinstance(value, list), value, place, "a list")
        kinds = [arguments[0]] * len(value) if origin is list or arguments[-1] is Ellipsis else arguments
        demand(len(value) == len(kinds), value, place, f"a list of {len(kinds)}")
        items = enumerate(zip(value, kinds, strict=True))
        return origin(restored(item, of_item, f"{place}[{i}]") for i, (item, of_item) in items)
    if kind is float:
        demand(type(value) in (int, float), value, place, "a number")
        return float(value)
    if kind in _WORDS:
        demand(type(value) is kind, value, place, _WORDS[kind])
        return value
    demand(isinstance(value, dict), value, place, "an object")
    if origin is dict:
        return {key: restored(item, arguments[1], f"{place}.{key}") for key, item in value.items()}
    return kind(**dict(_restored_fields(value, kind, place)))


_WORDS = {str: "a string", int: "a whole number", bool: "true or false"}


def _restored_fields(value: dict[str, Any], kind: type, place: str) -> Iterator[tuple[str, Any]]:
    """The arguments of the dataclass ``kind``, by name."""
    known = _fields(kind)
    if surplus := sorted(value.keys() - known.keys()):
        raise Unexpected(f"{place}.{reprlib.repr(surplus[0])[1:-1]}: there is no such field")
    for name, (field_type, may_be_missing) in known.items():
        if name in value:
            yield name, restored(value[name], field_type, f"{place}.{name}")
        elif not may_be_missing:
            raise Unexpected(f"{place}.{name} is missing")


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Of each field of a dataclass the type, and whether it may be missing."""
    types = get_type_hints(kind)
    return {field.name: (types[field.name], field.default is not MISSING) for field in fields(kind)}


def demand(holds: bool, value: Any, place: str, what: str) -> None:
    """Raise Unexpected, about this value, unless the condition holds."""
    if not holds:
        raise Unexpected(f"{place}: expected {what}, found {shown(value)}")


def shown(value: Any) -> str:
    """A value of :func:`parsed` as JSON; a long one is cut short."""
    text = "".join(islice(json.JSONEncoder().iterencode(value), 61))  # each chunk has at least one character
    return text if len(text) <= 60 else f"{text[:59]}…"
