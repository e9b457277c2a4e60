"""Triton's pack and unpack behind the methods of :class:`fastddp._C.Kernels`, run by Triton's interpreter.

The tables are those that the launcher in C++ makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastddp import _C
from interpreting import interpreted_copies

(kernels,) = interpreted_copies("pack_kernels")


class Tables(NamedTuple):
    """What a launch of one call passes."""

    wire: Tensor
    addresses: Tensor
    chunks: Tensor
    constants: dict[str, Any]


def tables(
    gradients: Sequence[Tensor | None], views: Sequence[Tensor], chunk: int, writable: bool = False
) -> Tables | None:
    """None: there is nothing to launch."""
    words, gradient, wire = _C.pack_tables(list(gradients), list(views), chunk, writable)
    assert words["left"] == []
    if gradient is None or wire is None:
        return None
    first = min((view for view in views if view.numel() > 0), key=Tensor.data_ptr)
    assert words["wire"] == [first.data_ptr()]
    assert wire == first.dtype
    chunks = torch.tensor(words["chunks"]).view(-1, kernels.CHUNK_WORDS)
    return Tables(first, torch.tensor(words["addresses"]), chunks, kernels.kernel_constants(gradient, wire, chunk))


class Interpreted:
    """The slots of a call are such that the kernels move all of them; a program moves ``chunk`` elements."""

    def __init__(self, chunk: int = kernels.CHUNK_ELEMENTS) -> None:
        self.chunk = chunk

    def pack(self, gradients: Sequence[Tensor | None], views: Sequence[Tensor], scale: float = 1.0) -> None:
        given = tables(gradients, views, self.chunk)
        if given is not None:
            wire, addresses, chunks, constants = given
            kernels.pack_kernel[(len(chunks),)](wire, addresses, chunks, scale, **constants)

    def pack_measuring(
        self, gradients: Sequence[Tensor | None], views: Sequence[Tensor], scale: float = 1.0
    ) -> tuple[Tensor, list[int]]:
        """What each program measured, and of which gradient."""
        given = tables(gradients, views, self.chunk)
        if given is None:
            return torch.zeros(0, 2, dtype=torch.float64), []
        wire, addresses, chunks, constants = given
        partials = torch.full((len(chunks), 2), torch.nan, dtype=torch.float64)
        kernels.pack_measuring_kernel[(len(chunks),)](wire, addresses, chunks, scale, partials, **constants)
        return partials, chunks[:, 0].tolist()

    def measure_gradients(self, gradients: Sequence[Tensor], views: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """As :meth:`pack_measuring`; views say in which order elements are read."""
        given = tables(gradients, views, self.chunk)
        if given is None:
            return torch.zeros(0, 2, dtype=torch.float64), []
        _, addresses, chunks, constants = given
        partials = torch.full((len(chunks), 2), torch.nan, dtype=torch.float64)
        kernels.measure_gradients_kernel[(len(chunks),)](addresses, chunks, partials, **constants)
        return partials, chunks[:, 0].tolist()

    def unpack(self, gradients: Sequence[Tensor | None], views: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        """As the launcher's, but with gradients that are undefined, and scaled. Returns what each program measured."""
        given = tables(gradients, views, self.chunk, writable=True)
        if given is None:
            return torch.zeros(0, 2, dtype=torch.float64)
        wire, addresses, chunks, constants = given
        partials = torch.full((len(chunks), 2), torch.nan, dtype=torch.float64)
        kernels.unpack_kernel[(len(chunks),)](wire, addresses, chunks, scale, partials, **constants)
        return partials

    def measure(self, wire: Tensor) -> Tensor:
        programs = -(-wire.numel() // kernels.CHUNK_ELEMENTS)
        partials = torch.full((programs, 2), torch.nan, dtype=torch.float64)
        if programs > 0:
            kernels.measure_kernel[(programs,)](wire, wire.numel(), partials, CHUNK=kernels.CHUNK_ELEMENTS)
        return partials
