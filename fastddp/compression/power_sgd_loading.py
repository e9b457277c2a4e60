"""Checks PowerSGD's memory, before any part of a saved state is taken, or a state for another model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fastddp.compression.saved_state import Shapes, check_name, check_tensor, either, refuse

_KIND = "PowerSGD"


def check_memory(
    qs: Mapping[str, object], errors: Mapping[str, object], rank: int, shapes: Shapes, dtypes: Mapping[str, torch.dtype]
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
