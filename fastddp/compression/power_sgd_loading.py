"""Checks a saved PowerSGD state as a whole, before any part of it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastddp.compression.saved_state import SavedState, Shapes, check_name, check_tensor, either, refuse
from fastddp.errors import see

FORMAT = 1
_KIND = "PowerSGD"


@dataclass(frozen=True)
class Saved:
    """A saved state that has been checked."""

    iter: int
    world_size: int
    total_numel_before_compression: int
    total_numel_after_compression: int
    shapes: Shapes
    qs: dict[str, Tensor]
    errors: dict[str, Tensor] | None
    """The errors of this rank; None: none were saved."""


def checked(
    state: object, matrix_approximation_rank: int, model: Shapes, dtypes: Mapping[str, torch.dtype], rank: int
) -> Saved:
    """The parts of a ``PowerSGDState.state_dict()``.

    Args:
        state: any object.
        matrix_approximation_rank: of the state that takes it over.
        model: names and shapes of the parameters that it must be for; empty: any.
        dtypes: their dtypes, by name; empty: not known.
        rank: whose errors are taken.

    Raises:
        ValueError: it says what is wrong, with the name of the part.
    """
    saved = SavedState(_KIND, state, FORMAT)
    saved_rank = saved.count("matrix_approximation_rank", least=1)
    if saved_rank != matrix_approximation_rank:
        raise ValueError(
            f"The saved PowerSGD state has matrix_approximation_rank {saved_rank}, this "
            f"one {matrix_approximation_rank}. Make one of the same rank, or begin without the saved state."
            + see("FD036")
        )
    shapes = saved.shapes(model)
    qs = saved.mapping(saved.part("qs"), "qs")
    errors = saved.of_rank("errors", rank)
    check_memory(qs, errors or {}, saved_rank, shapes, dtypes)
    return Saved(
        iter=saved.count("iter"),
        world_size=saved.count("world_size", least=1),
        total_numel_before_compression=saved.count("total_numel_before_compression"),
        total_numel_after_compression=saved.count("total_numel_after_compression"),
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
    """Raise ValueError unless these can be PowerSGD's Q and errors of parameters with these shapes and dtypes."""
    for name, q in qs.items():
        _check_q(q, name, rank, shapes, dtypes)
    for name, error in errors.items():
        _check_error(error, name, shapes, dtypes)


def _check_q(q: object, name: str, rank: int, shapes: Shapes, dtypes: Mapping[str, torch.dtype]) -> None:
    what = f"qs[{name!r}]"
    wide = dtypes.get(name)
    allowed = (torch.float32, torch.float64) if wide is None else (torch.promote_types(wide, torch.float32),)
    tensor = check_tensor(_KIND, q, what, allowed)
    if name.startswith("bucket "):  # batched: the buckets may have changed since
        if tensor.dim() != 2 or not 1 <= tensor.shape[0] <= min(rank, tensor.shape[1]):
            raise refuse(_KIND, what, f"of shape [at most {rank}, columns]", f"of shape {list(tensor.shape)}")
        return
    check_name(_KIND, name, what, shapes)
    # The rows are one of the parameter's dimensions. Which one depends on its memory, which is not known here.
    elements = math.prod(shapes[name])
    sides = [(size, elements // size) for size in shapes[name] if size]
    possible = {(min(rank, *side), side[1]) for side in sides}
    if tuple(tensor.shape) not in possible:
        raise refuse(_KIND, what, f"of shape {either(possible)}", f"of shape {list(tensor.shape)}")


def _check_error(error: object, name: str, shapes: Shapes, dtypes: Mapping[str, torch.dtype]) -> None:
    what = f"the error of {name!r}"
    check_name(_KIND, name, what, shapes)
    known = dtypes.get(name)
    allowed = (torch.float32, torch.float16, torch.bfloat16, torch.float64) if known is None else (known,)
    tensor = check_tensor(_KIND, error, what, allowed)
    elements = math.prod(shapes[name])
    possible = {(size, elements // size) for size in shapes[name] if size} | {(elements,)}  # batched: flat
    if tuple(tensor.shape) not in possible:
        raise refuse(_KIND, what, f"of shape {either(possible)}", f"of shape {list(tensor.shape)}")
