"""Checks the saved state of a hook, part by part, before any of it is taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastddp.errors import see

Shapes = dict[str, tuple[int, ...]]


class SavedState:
    """The parts of a saved state, ``kind`` in errors, by type; ValueError: one is wrong, or it is of another format."""

    def __init__(self, kind: str, state: object, format: int) -> None:
        self.kind = kind
        self._parts = self.mapping(state, "state")
        found = self._parts.get("format")
        if found != format or isinstance(found, bool):
            raise ValueError(f"This is no {kind} state of format {format}: its format is {found!r}." + see("FD036"))

    def part(self, name: str) -> Any:
        """The part of this name, of any type."""
        if name not in self._parts:
            raise ValueError(
                f"The saved {self.kind} state cannot be loaded: it has no {name!r}. Nothing has been changed."
                + see("FD036")
            )
        return self._parts[name]

    def mapping(self, value: object, what: str) -> dict[str, Any]:
        """``value`` as a dict whose keys are names."""
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise refuse(self.kind, what, "a dict whose keys are names", type(value).__name__)
        return dict(value)

    def count(self, name: str, least: int = 0) -> int:
        """The part of this name, which must be an integer of at least ``least``."""
        value = self.part(name)
        if type(value) is not int or value < least:
            raise refuse(self.kind, name, f"an integer >= {least}", repr(value))
        return value

    def shapes(self, model: Shapes) -> Shapes:
        """The part "shapes", by parameter, which must be those of ``model`` unless that is empty."""
        shapes = {name: self._shape(shape, name) for name, shape in self.mapping(self.part("shapes"), "shapes").items()}
        if model and shapes != model:
            raise ValueError(
                f"The saved {self.kind} state belongs to a model with {describe(shapes, model)}; this one to a "
                f"model with {describe(model, shapes)}." + see("FD036")
            )
        return shapes

    def of_rank(self, name: str, rank: int) -> dict[str, Any] | None:
        """The entry of ``rank`` in the part of this name; None: there is none."""
        found = self.mapping(self.part(name), name).get(f"rank {rank}")
        return None if found is None else self.mapping(found, f"{name}['rank {rank}']")

    def _shape(self, shape: object, name: str) -> tuple[int, ...]:
        is_text = isinstance(shape, (str, bytes))  # a sequence as well, and bytes would pass for sizes
        if is_text or not isinstance(shape, Sequence) or not all(type(size) is int and size >= 0 for size in shape):
            raise refuse(self.kind, f"shapes[{name!r}]", "a list of sizes", repr(shape))
        return tuple(shape)


def refuse(kind: str, what: str, wanted: str, found: object) -> ValueError:
    """The error that says what is wrong with a part."""
    return ValueError(
        f"The saved {kind} state cannot be loaded: {what} must be {wanted}, not {found}. Nothing has been changed."
        + see("FD036")
    )


def check_tensor(kind: str, value: object, what: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    """``value``, if it is a dense tensor of one of these dtypes; else ValueError."""
    if not isinstance(value, Tensor):
        raise refuse(kind, what, "a tensor", type(value).__name__)
    if value.dtype not in dtypes or value.layout != torch.strided or value.is_meta:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise refuse(kind, what, f"a dense tensor of {wanted}", f"{value.dtype} on {value.device}, {value.layout}")
    return value


def check_name(kind: str, name: str, what: str, shapes: Shapes) -> None:
    """Raise ValueError unless a parameter has this name."""
    if name not in shapes:
        raise refuse(kind, what, "that of a parameter in 'shapes'", "of another name")


def either(shapes: Iterable[tuple[int, ...]]) -> str:
    """The allowed shapes, in words."""
    return " or ".join(str(list(shape)) for shape in sorted(shapes)) or "no parameter without elements"


def check_model(state: object, known: Shapes, model: Shapes) -> None:
    """Raise ValueError if the state belongs to another model than this; ``known`` is empty if it belongs to none."""
    if known and known != model:
        kind = type(state).__name__
        raise ValueError(
            f"This {kind} belongs to a model with {describe(known, model)}; the model it was given to has "
            f"{describe(model, known)}. Make a new {kind} for each model." + see("FD035")
        )


def warn_of_ranks(what: str, saved_on: int, group: dist.ProcessGroup, has_errors: bool) -> None:
    """Say that errors were saved on another number of ranks, and what this rank, whose state is loaded, has of them."""
    has = "takes those of its number" if has_errors else "begins with none"
    words = f"{what} were saved on {saved_on} ranks and are loaded on {group.size()}: rank {group.rank()} {has}."
    warnings.warn(words, stacklevel=3)


def describe(model: Shapes, other: Shapes) -> str:
    """How many parameters ``model`` has, and the first one that ``other`` lacks or has in another shape."""
    different = [f"{name} {list(shape)}" for name, shape in model.items() if other.get(name) != shape]
    first = f", {different[0]} among them," if different else ""
    return f"{len(model)} parameters{first} where the other has {len(other)}" if first else f"{len(model)} parameters"


def replace(tensors: dict[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Copy into the tensors in use, which the reducer holds too, and add copies of the others."""
    for name, value in loaded.items():
        if name in tensors and tensors[name].shape == value.shape:
            tensors[name].copy_(value)
        else:
            tensors[name] = value.clone()
