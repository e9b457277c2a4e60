"""Where a bucket's gradients lie in its wire, and how the wire is cut into chunks. Pure: numbers, nothing launched.

Shape letters:

    N  gradients of the bucket, one for each parameter
    L  elements of the wire, the sum of the parameters' elements
    C  chunks: runs of at most ``chunk_elements`` elements of one gradient
    D  dims of one gradient

Note [Memory order]: the wire keeps every parameter's elements in the order in which the parameter itself lies in
memory. Here there are no gaps between parameters; the reducer's wires have some (note [Aligned members],
csrc/bucket/bucket.h), which to the kernels are other starts and nothing more. A parameter that is not dense (sliced,
expanded) is taken in row-major order. These are the strides that torch's gradient layout contract gives to a gradient,
so gradients usually travel as flat runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .pack_kernels import CHUNK_ELEMENTS

Strides = tuple[int, ...]


class Dim(NamedTuple):
    """A run of ``size`` positions, ``stride`` elements apart."""

    size: int
    stride: int


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """The strides that a parameter has in the wire: its own if it is dense, else row-major. See Note [Memory order].

    >>> memory_order((2, 3), (1, 2)), memory_order((2, 3), (4, 1))
    ((1, 2), (3, 1))
    """
    extent = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != extent:
            break
        extent *= size
    else:
        if 0 not in shape:
            return tuple(strides)
    return torch.empty(tuple(shape), device="meta").stride()


def collapse(shape: Sequence[int], strides: Sequence[int], wire_strides: Sequence[int]) -> list[Dim]:
    """A gradient's dims in the wire's order, innermost first, neighbours merged where one stride carries on the other.

    Empty or ``[Dim(numel, 1)]`` means that the gradient lies in memory exactly as it does in the wire.

    >>> collapse((2, 3, 4), (12, 4, 1), (12, 4, 1))
    [Dim(size=24, stride=1)]
    >>> collapse((2, 3), (1, 2), (3, 1))
    [Dim(size=3, stride=2), Dim(size=2, stride=1)]
    """
    dims: list[Dim] = []
    outwards = sorted(zip(wire_strides, shape, strides, strict=True))
    for size, stride in ((size, stride) for _, size, stride in outwards if size > 1):
        if dims and stride == dims[-1].size * dims[-1].stride:
            dims[-1] = Dim(dims[-1].size * size, dims[-1].stride)
        else:
            dims.append(Dim(size, stride))
    return dims


def may_overlap(dims: Sequence[Dim]) -> bool:
    """Whether two positions may share memory. False is certain; True also covers layouts too tangled to tell."""
    extent = 1
    for dim in sorted(dims, key=lambda dim: dim.stride):
        if dim.stride < extent:
            return True
        extent += dim.stride * (dim.size - 1)
    return False


@dataclass(frozen=True)
class Placement:
    """One gradient's place: elements ``offset`` to ``offset + numel`` of the wire, laid out with ``strides``."""

    shape: tuple[int, ...]
    strides: Strides
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """The static half of a bucket. Nothing in it depends on an address, so it is built once and never changes.

    For parameters of 3 and 5 elements and ``chunk_elements=4``: offsets 0 and 3, L = 8, and the chunks

        gradient  begin  start  count
               0      0      0      3
               1      0      3      4
               1      4      7      1
    """

    placements: tuple[Placement, ...]
    chunk_elements: int

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], chunk_elements: int = CHUNK_ELEMENTS) -> "BucketLayout":
        """Place ``parameters`` one after another, each in its own memory order.

        Raises:
            ValueError: ``chunk_elements`` is not a power of two.
        """
        if chunk_elements < 1 or chunk_elements & (chunk_elements - 1):
            raise ValueError(f"chunk_elements is {chunk_elements}, but must be a power of two: Triton's tiles are")
        placements = []
        offset = 0
        for parameter in parameters:
            strides = memory_order(parameter.shape, parameter.stride())
            placements.append(Placement(tuple(parameter.shape), strides, offset, parameter.numel()))
            offset += parameter.numel()
        return cls(tuple(placements), chunk_elements)

    @property
    def numel(self) -> int:
        """L, the length of the wire."""
        return self.placements[-1].offset + self.placements[-1].numel if self.placements else 0

    def chunks(self) -> torch.Tensor:
        """The chunk table, int64 [C, 4] on the CPU: gradient, begin, start, count, as :mod:`.pack_kernels` says."""
        pieces = [torch.empty(0, 4, dtype=torch.int64)]
        for index, place in enumerate(self.placements):
            begin = torch.arange(0, place.numel, self.chunk_elements, dtype=torch.int64)
            count = (place.numel - begin).clamp(max=self.chunk_elements)
            pieces.append(torch.stack([torch.full_like(begin, index), begin, place.offset + begin, count], dim=1))
        return torch.cat(pieces)

    def views(self, wire: torch.Tensor) -> list[torch.Tensor]:
        """The wire seen as N tensors with the parameters' shapes."""
        return [
            wire.as_strided(place.shape, place.strides, wire.storage_offset() + place.offset)
            for place in self.placements
        ]

    def check_wire(self, wire: torch.Tensor) -> None:
        """Raise ValueError unless ``wire`` is one contiguous run of L elements."""
        if wire.numel() != self.numel:
            raise ValueError(
                f"the wire has {wire.numel()} elements, but the bucket's {len(self.placements)} parameters have "
                f"{self.numel}: allocate torch.empty(layout.numel)"
            )
        if not wire.is_contiguous():
            raise ValueError(
                f"the wire has strides {wire.stride()}, but must be contiguous: collectives send it as it lies"
            )

    def check_gradients(self, gradients: Sequence[torch.Tensor | None], wire: torch.Tensor) -> None:
        """Raise ValueError unless ``gradients`` fit the parameters, each other and the wire. None is always welcome."""
        if len(gradients) != len(self.placements):
            raise ValueError(
                f"got {len(gradients)} gradients for a bucket of {len(self.placements)} parameters: pass one for each, "
                "None where it is undefined"
            )
        first_dtype: torch.dtype | None = None
        for index, (gradient, place) in enumerate(zip(gradients, self.placements, strict=True)):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise ValueError(f"gradient {index} is {gradient.layout}: only strided gradients share a bucket")
            if tuple(gradient.shape) != place.shape:
                raise ValueError(
                    f"gradient {index} has shape {tuple(gradient.shape)}, but its parameter has {place.shape}: pass "
                    "the gradients in the order of the bucket's parameters"
                )
            if gradient.device != wire.device:
                raise ValueError(
                    f"gradient {index} is on {gradient.device}, but the wire is on {wire.device}: a bucket "
                    "lives on one device"
                )
            first_dtype = first_dtype or gradient.dtype
            if gradient.dtype != first_dtype:
                raise ValueError(
                    f"gradient {index} is {gradient.dtype}, but the bucket's first is {first_dtype}: a "
                    "bucket holds one dtype"
                )
            if gradient.is_neg():
                raise ValueError(f"gradient {index} is a lazily negated view: pass gradient.resolve_neg()")
