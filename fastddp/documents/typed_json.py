"""JSON that is taken from somebody else: within bounds, and as values of the types that are expected."""

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
"""Lists and objects inside of each other. What fastddp writes has fewer than ten, and whatever is done with it may
recurse so often."""


class Unexpected(ValueError):
    """A value is none of the type that is expected; the message names its place."""


def parsed(data: bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is not JSON, it is cut short, or it is nested too deeply.
    """
    try:
        value = json.loads(data, parse_constant=_refuse)
        if _depth(value) <= DEEPEST:
            return value
    except RecursionError:  # Python's own limit, which is higher
        pass
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def _depth(value: Any) -> int:
    """How many lists and objects are inside of each other, without recursion."""
    depth = 0
    level = [value]
    while level := [inner for inner in level if isinstance(inner, (list, dict))]:
        depth += 1
        level = [item for inner in level for item in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _refuse(constant: str) -> None:
    """Python's own extensions of JSON: NaN and Infinity."""
    raise ValueError(f"{constant} is no number of JSON")


def restored(value: Any, kind: Any, place: str) -> Any:
    """What ``asdict`` and ``json`` made of a value of type ``kind``; ``place`` says where it stands, for errors.

    Args:
        value: of :func:`parsed`.
        kind: str, int, float, bool; a dataclass of such; tuple, list or dict (with str as keys) of such; Literal; or
            one of these or None.
        place: in words.

    Raises:
        Unexpected: the value is of another type.
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
    """The arguments of a dataclass."""
    types, defaults = _field_types(kind), _with_default(kind)
    if surplus := sorted(value.keys() - types.keys()):
        raise Unexpected(f"{place}.{reprlib.repr(surplus[0])[1:-1]}: there is no such field")
    for name, field_type in types.items():
        if name not in value and name in defaults:
            continue
        if name not in value:
            raise Unexpected(f"{place}.{name} is missing")
        yield name, restored(value[name], field_type, f"{place}.{name}")


@cache
def _field_types(kind: type) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


@cache
def _with_default(kind: type) -> frozenset[str]:
    """The fields of a dataclass that it can do without."""
    return frozenset(field.name for field in fields(kind) if field.default is not MISSING)


def demand(holds: bool, value: Any, place: str, what: str) -> None:
    """Complain about a value of which the condition does not hold."""
    if not holds:
        raise Unexpected(f"{place}: expected {what}, found {shown(value)}")


def shown(value: Any) -> str:
    """A value of :func:`parsed` in JSON, or as much of it as tells what it is."""
    text = "".join(islice(json.JSONEncoder().iterencode(value), 61))  # of a character or more each
    return text if len(text) <= 60 else f"{text[:59]}…"
