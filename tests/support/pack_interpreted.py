"""What packs and unpacks, in one form: Triton's kernels, run by Triton's interpreter, and the C++ twin.

The tables are those that the launcher in C++ makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastddp import _C
from interpreting import interpreted_copies

Gradients = Sequence[Tensor | None]
Views = Sequence[Tensor]

(kernels,) = interpreted_copies("pack_kernels")


class Tables(NamedTuple):
    """What a launch of one call passes."""

    wire: Tensor
    addresses: Tensor
    chunks: Tensor
    constants: dict[str, Any]


def tables(gradients: Gradients, views: Views, chunk: int, writable: bool = False) -> Tables | None:
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


Measured = tuple[float, float]  # a sum of squares, and how many are not finite


class Interpreted:
    """The slots of a call are such that the kernels move all of them; a program moves ``chunk`` elements.

    Gradients may be undefined, views empty. What is measured is so by gradient whose view has elements.
    """

    squares_in = torch.float32
    unpack_measures = "what it writes"

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def pack(self, gradients: Gradients, views: Views, scale: float = 1.0) -> None:
        self._run(kernels.pack_kernel, tables(gradients, views, self.chunk), scale, measures=False)

    def pack_measuring(self, gradients: Gradients, views: Views, scale: float = 1.0) -> list[Measured]:
        return by_gradient(*self._run(kernels.pack_measuring_kernel, tables(gradients, views, self.chunk), scale))

    def measure_gradients(self, gradients: Gradients, views: Views) -> list[Measured]:
        """Views say in which order elements are read."""
        return by_gradient(*self._run(kernels.measure_gradients_kernel, tables(gradients, views, self.chunk)))

    def unpack(self, gradients: Gradients, views: Views) -> Measured:
        given = tables(gradients, views, self.chunk, writable=True)
        return in_all(self._run(kernels.unpack_kernel, given, 1.0)[0])

    def _run(self, kernel: Any, given: Tables | None, *scale: float, measures: bool = True) -> tuple[Tensor, Tensor]:
        """What each program has measured, and the chunks."""
        if given is None:
            return torch.empty(0, 2), torch.empty(0, kernels.CHUNK_WORDS)
        wire, addresses, chunks, constants = given
        partials = rows_of(chunks)
        where = (wire, addresses, chunks) if scale else (addresses, chunks)
        kernel[(len(chunks),)](*where, *scale, *([partials] if measures else []), **constants)
        return partials, chunks

    def measure(self, wire: Tensor) -> Measured:
        programs = -(-wire.numel() // kernels.CHUNK_ELEMENTS)
        partials = torch.full((programs, 2), torch.nan, dtype=torch.float64)
        if programs > 0:
            kernels.measure_kernel[(programs,)](wire, wire.numel(), partials, CHUNK=kernels.CHUNK_ELEMENTS)
        return in_all(partials)


def rows_of(chunks: Tensor) -> Tensor:
    """Of each program, before it has measured."""
    return torch.full((len(chunks), 2), torch.nan, dtype=torch.float64)


def in_all(partials: Tensor) -> Measured:
    squares, odd = partials.sum(0).tolist()
    return squares, odd


def by_gradient(partials: Tensor, chunks: Tensor) -> list[Measured]:
    """Each gradient has rows of its own."""
    numbers = chunks[:, 0].unique().tolist()
    assert numbers == [*range(len(numbers))]
    return [in_all(partials[chunks[:, 0] == number]) for number in numbers]


class Twin:
    """Elements are dealt to threads, not in chunks."""

    squares_in = torch.float64
    unpack_measures = "what it reads"

    def __init__(self, chunk: int) -> None:
        self._kernels = _C.Kernels(torch.device("cpu"))

    def pack(self, gradients: Gradients, views: Views, scale: float = 1.0) -> None:
        self._kernels.pack(list(gradients), list(views), scale)

    def pack_measuring(self, gradients: Gradients, views: Views, scale: float = 1.0) -> list[Measured]:
        found = self._kernels.pack_measuring(list(gradients), list(views), scale) if views else []
        return [measured for measured, view in zip(found, views, strict=True) if view.numel() > 0]

    def measure_gradients(self, gradients: Gradients, views: Views) -> list[Measured]:
        with_elements = [one for one, view in zip(gradients, views, strict=True) if view.numel() > 0]
        return list(self._kernels.measure_gradients(with_elements)) if with_elements else []

    def unpack(self, gradients: Gradients, views: Views) -> Measured | None:
        """Not measured, where a gradient lies otherwise than its place in the wire."""
        there = [(one, view) for one, view in zip(gradients, views, strict=True) if one is not None]
        measured = self._kernels.unpack([one for one, _ in there], [view for _, view in there], measuring=True)
        return None if measured is None else in_all(measured.view(1, 2))

    def measure(self, wire: Tensor) -> Measured:
        return in_all(self._kernels.measure(wire).view(1, 2))
