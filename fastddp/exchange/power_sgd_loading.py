"""Whether a saved PowerSGD state can be taken over: all of it is checked before any of it is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORMAT = 1

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Saved:
    """A saved state, checked."""

    iter: int
    world_size: int
    total_numel_before_compression: int
    total_numel_after_compression: int
    shapes: Shapes
    qs: dict[str, Tensor]
    errors: dict[str, Tensor] | None
    """Of this rank; None: it has saved none."""


def checked(
    state: object, matrix_approximation_rank: int, model: Shapes, dtypes: Mapping[str, torch.dtype], rank: int
) -> Saved:
    """What ``PowerSGDState.state_dict()`` has returned.

    Args:
        state: any object.
        matrix_approximation_rank: that of the state that is to take it.
        model: names and shapes of the parameters it is for; empty: of any.
        dtypes: theirs, by name; empty: not known.
        rank: whose errors are taken.

    Raises:
        ValueError: what is wrong, with the name of the part.
    """
    parts = _mapping(state, "state")
    found = parts.get("format")
    if found != FORMAT or isinstance(found, bool):
        raise ValueError(f"This is no PowerSGD state of format {FORMAT}: its format is {found!r}.")
    saved_rank = _count(parts, "matrix_approximation_rank", least=1)
    if saved_rank != matrix_approximation_rank:
        raise ValueError(
            f"The saved PowerSGD state has matrix_approximation_rank {saved_rank}, this "
            f"one {matrix_approximation_rank}. Make one of the same rank, or begin without the saved state."
        )
    shapes = {name: _shape(shape, name) for name, shape in _mapping(_part(parts, "shapes"), "shapes").items()}
    if model and shapes != model:
        raise ValueError(
            f"The saved PowerSGD state belongs to a model with {describe(shapes, model)}; this one to a "
            f"model with {describe(model, shapes)}."
        )
    qs = _mapping(_part(parts, "qs"), "qs")
    errors = _mapping(_part(parts, "errors"), "errors").get(f"rank {rank}")
    if errors is not None:
        errors = _mapping(errors, f"errors['rank {rank}']")
    check_memory(qs, errors or {}, saved_rank, shapes, dtypes)
    return Saved(
        iter=_count(parts, "iter"),
        world_size=_count(parts, "world_size", least=1),
        total_numel_before_compression=_count(parts, "total_numel_before_compression"),
        total_numel_after_compression=_count(parts, "total_numel_after_compression"),
        shapes=shapes,
        qs=qs,
        errors=errors,
    )


def check_memory(
    qs: Mapping[str, object],
    errors: Mapping[str, object],
    rank: int,
    shapes: Shapes,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Raise ValueError unless this is what PowerSGD remembers of parameters with these shapes and dtypes."""
    for name, q in qs.items():
        _check_q(q, name, rank, shapes, dtypes)
    for name, error in errors.items():
        _check_error(error, name, shapes, dtypes)


def describe(model: Shapes, other: Shapes) -> str:
    """How many parameters ``model`` has, and the first that ``other`` has not."""
    different = [f"{name} {list(shape)}" for name, shape in model.items() if other.get(name) != shape]
    first = f", {different[0]} among them," if different else ""
    return f"{len(model)} parameters{first} where the other has {len(other)}" if first else f"{len(model)} parameters"


def _refuse(what: str, wanted: str, found: object) -> ValueError:
    return ValueError(
        f"The saved PowerSGD state cannot be loaded: {what} must be {wanted}, not {found}. Nothing has been changed."
    )


def _part(parts: Mapping[str, Any], name: str) -> Any:
    if name not in parts:
        raise ValueError(f"The saved PowerSGD state cannot be loaded: it has no {name!r}. Nothing has been changed.")
    return parts[name]


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _refuse(what, "a dict whose keys are names", type(value).__name__)
    return dict(value)


def _count(parts: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = _part(parts, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _refuse(name, f"an integer >= {least}", repr(value))
    return value


def _shape(shape: object, name: str) -> tuple[int, ...]:
    sizes = list(shape) if isinstance(shape, Sequence) and not isinstance(shape, (str, bytes)) else None
    if sizes is None or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise _refuse(f"shapes[{name!r}]", "a list of sizes", repr(shape))
    return tuple(sizes)


def _check_q(q: object, name: str, rank: int, shapes: Shapes, dtypes: Mapping[str, torch.dtype]) -> None:
    what = f"qs[{name!r}]"
    wide = dtypes.get(name)
    allowed = (torch.float32, torch.float64) if wide is None else (torch.promote_types(wide, torch.float32),)
    tensor = _tensor(q, what, allowed)
    if name.startswith("bucket "):  # batched: of buckets that may be others by now
        if tensor.dim() != 2 or not 1 <= tensor.shape[0] <= min(rank, tensor.shape[1]):
            raise _refuse(what, f"of shape [at most {rank}, columns]", f"of shape {list(tensor.shape)}")
        return
    _check_name(name, what, shapes)
    # The matrix has one of the parameter's dimensions for rows: which one, its memory says.
    elements = math.prod(shapes[name])
    sides = [(size, elements // size) for size in shapes[name] if size]
    possible = {(min(rank, *side), side[1]) for side in sides}
    if tuple(tensor.shape) not in possible:
        raise _refuse(what, f"of shape {_either(possible)}", f"of shape {list(tensor.shape)}")


def _check_error(error: object, name: str, shapes: Shapes, dtypes: Mapping[str, torch.dtype]) -> None:
    what = f"the error of {name!r}"
    _check_name(name, what, shapes)
    known = dtypes.get(name)
    allowed = (torch.float32, torch.float16, torch.bfloat16, torch.float64) if known is None else (known,)
    tensor = _tensor(error, what, allowed)
    elements = math.prod(shapes[name])
    possible = {(size, elements // size) for size in shapes[name] if size} | {(elements,)}  # batched: flat
    if tuple(tensor.shape) not in possible:
        raise _refuse(what, f"of shape {_either(possible)}", f"of shape {list(tensor.shape)}")


def _check_name(name: str, what: str, shapes: Shapes) -> None:
    if name not in shapes:
        raise _refuse(what, "that of a parameter in 'shapes'", "of another name")


def _tensor(value: object, what: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    if not isinstance(value, Tensor):
        raise _refuse(what, "a tensor", type(value).__name__)
    if value.dtype not in dtypes or value.layout != torch.strided or value.is_meta:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise _refuse(what, f"a dense tensor of {wanted}", f"{value.dtype} on {value.device}, {value.layout}")
    return value


def _either(shapes: Iterable[tuple[int, ...]]) -> str:
    return " or ".join(str(list(shape)) for shape in sorted(shapes)) or "no parameter without elements"
