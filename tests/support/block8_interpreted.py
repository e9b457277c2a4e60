"""Block8's Triton kernels behind the functions of :mod:`fastddp.kernels.block8_reference`, run by Triton's interpreter.

The tables are those that the launcher in C++ makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastddp import _C
from interpreting import interpreted_copies

kernels, reference = interpreted_copies("block8_kernels", "block8_reference")
Format = reference.Format
Blocked = Sequence[tuple[Tensor, int]]


def table(words: Sequence[int]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64)


def tables(form: Any, gradients: Blocked) -> tuple[Tensor, Tensor]:
    """Addresses and runs, a row each."""
    words = _C.block8_tables(list(gradients), [], form.block, kernels.ELEMENTS)
    return table(words["gradients"]), table(words["runs"]).view(-1, kernels.RUN_WORDS)


def encode(
    form: Any,
    gradients: Blocked,
    error: Tensor | None,
    wire: Tensor,
    scale: float = 1.0,
    key: int | None = None,
    before: Tensor | None = None,
) -> None:
    given = tables(form, gradients)
    _launch(kernels.block8_encode_kernel, len(given[1]))(
        wire,
        _or_null(error if before is None else before),
        _or_null(error),
        *given,
        scale,
        _signed(key),
        **_of(form, gradients),
        STOCHASTIC=key is not None,
    )


def add(
    form: Any,
    shards: Sequence[Tensor],
    target: Tensor,
    error: Tensor | None,
    key: int | None = None,
    first_element: int = 0,
) -> None:
    addresses = table(_C.block8_tables([], list(shards), form.block, kernels.ELEMENTS)["shards"])
    blocks = target.numel() // form.group_bytes * 4
    _launch(kernels.block8_add_kernel, -(-blocks * form.block // kernels.ELEMENTS))(
        addresses,
        len(addresses),
        target,
        _or_null(error),
        blocks,
        first_element,
        _signed(key),
        **kernels.format_constants(form.number, form.block),
        STOCHASTIC=key is not None,
    )


def decode(form: Any, gradients: Blocked, wire: Tensor) -> Tensor:
    """What each program measured."""
    given = tables(form, gradients)
    partials = torch.full((len(given[1]), 2), torch.nan, dtype=torch.float64)
    _launch(kernels.block8_decode_kernel, len(given[1]))(wire, *given, partials, **_of(form, gradients))
    return partials


def _launch(kernel: Any, programs: int) -> Any:
    return kernel[(programs,)] if programs > 0 else lambda *arguments, **constants: None


def _or_null(error: Tensor | None) -> Tensor:
    nothing = torch.empty(0)
    assert nothing.data_ptr() == 0
    return nothing if error is None else error


def _signed(key: int | None) -> int:
    """The 64 bits as an int64."""
    return 0 if key is None else key - 2**64 * (key >> 63)


def _of(form: Any, gradients: Blocked) -> dict[str, Any]:
    return kernels.gradient_constants(form.number, form.block, gradients[0][0].dtype)
