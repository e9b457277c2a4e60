"""Block8 in plain torch, bit for bit: gradients as numbers of 8 bits, with a scale for each block of them.

Shape letters:

    N  gradients of one call
    B  elements of a block, 128 or 256
    G  groups of a wire, each 4 scales of fp32 and then 4 blocks of B bytes

A wire is uint8, [G * 4 * (B + 4)]. Errors are fp32, [G * 4 * B], one for each number of the wire. Everything is
computed in fp32, each operation rounded once. For a block y, with m its largest magnitude and L the format's largest
number::

    scale = m / L,  x = y * (L / m),  number = x rounded to the format,  value = number * scale

If m < 2^-100, scale and bytes are 0. A block with an infinity or NaN, or with m > 2^127, counts as not finite: its
scale is NaN, its bytes are 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Number = Literal["int8", "e4m3", "e5m2"]

GROUP_BLOCKS = 4
LEAST_MAGNITUDE = 2.0**-100
MOST_MAGNITUDE = 2.0**127


@dataclass(frozen=True)
class Format:
    """The format of a wire's numbers."""

    number: Number
    block: int

    @property
    def group_bytes(self) -> int:
        """Of four blocks with their scales."""
        return GROUP_BLOCKS * (self.block + 4)

    @property
    def largest(self) -> float:
        """The largest number: L."""
        return {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}[self.number]

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype for such numbers."""
        return {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[self.number]

    def blocks_of(self, elements: int) -> int:
        """How many blocks a gradient has."""
        return -(-elements // self.block)


def encode(
    form: Format,
    gradients: Sequence[tuple[Tensor, int]],
    error: Tensor | None,
    wire: Tensor,
    scale: float = 1.0,
    key: int | None = None,
    before: Tensor | None = None,
) -> None:
    """Write the bytes of y = gradient * scale + before, with zeros after a gradient, to the wire; error = y - value.

    Args:
        form: of the wire.
        gradients: N pairs of a gradient, [elements], fp32, fp16 or bf16, and its first block in the wire.
        error: written; 0 in a block that is not finite. None: nothing is added, and no error is remembered.
        wire: only the blocks of these gradients are written.
        scale: of the gradients.
        key: 64 bits; round stochastically, by draws from them. None: round to nearest, ties to even.
        before: the errors so far, like ``error``. None: they are in ``error``.

    Example: int8, blocks of 128, gradients [2, -4] and [127, 0.75] at blocks 0 and 1, scale 0.5, no error: the scales
    are 2/127 and 0.5; the blocks begin with [64, -127] and [127, 1], and zeros follow.
    """
    scales, bytes_ = _parts(form, wire)
    errors = None if error is None else error.view(-1, form.block)
    earlier = error if before is None else before
    for gradient, first in gradients:
        own = slice(first, first + form.blocks_of(gradient.numel()))
        y = _in_blocks(form, gradient) * _fp32(scale)
        if earlier is not None:
            y = y + earlier.view(-1, form.block)[own]
        of_blocks, numbers, values = _quantised(form, y, key, first * form.block)
        _write(scales, bytes_, own, of_blocks, numbers)
        if errors is not None:
            errors[own] = torch.where(of_blocks.isnan()[:, None], 0.0, y - values)


def add(
    form: Format,
    shards: Sequence[Tensor],
    target: Tensor,
    error: Tensor | None,
    key: int | None = None,
    first_element: int = 0,
) -> None:
    """Write the bytes of y, the values of the shards added to 0 in their order, to the target; error += y - value.

    Args:
        form: of the wires.
        shards: wires, or parts of them, of one size.
        target: of the same size; may be one of the shards.
        error: as in :func:`encode`, of these blocks; unchanged where a block is not finite.
        key: as in :func:`encode`.
        first_element: where the shards begin in their wire; draws depend on it.

    Example: int8, blocks of 128, two shards whose first blocks begin with [127, 2] and [127, -1] and have the scales 1
    and 0.5: y is [190.5, 1.5], the scale of the target is 1.5, and its first block begins with [127, 1].
    """
    scales, bytes_ = _parts(form, target)
    y = torch.zeros(len(scales) * GROUP_BLOCKS, form.block)
    for shard in shards:
        y = y + _values(form, shard)
    of_blocks, numbers, values = _quantised(form, y, key, first_element)
    _write(scales, bytes_, slice(0, len(y)), of_blocks, numbers)
    if error is not None:
        errors = error.view(-1, form.block)
        errors.copy_(torch.where(of_blocks.isnan()[:, None], errors, errors + (y - values)))


def decode(form: Format, gradients: Sequence[tuple[Tensor, int]], wire: Tensor) -> None:
    """Write the wire's values to each gradient, rounded to its dtype. Arguments as of :func:`encode`.

    Example: int8, blocks of 128: a block that begins with [127, 1] and has the scale 0.5 gives the gradient
    [63.5, 0.5].
    """
    values = _values(form, wire)
    for gradient, first in gradients:
        count = gradient.numel()
        gradient.copy_(values[first : first + form.blocks_of(count)].view(-1)[:count])


def draw(key: int, elements: Tensor) -> Tensor:
    """Draw a fraction of 16 bits, fp32, for each of these elements of a wire, int64.

    Example: key 1 and elements 0 to 3 draw 0x58f5, 0, 0x6785 and 0x3656, over 2^16.
    """
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    random = _hash((_hash(elements & 0xFFFFFFFF ^ low) + high) & 0xFFFFFFFF)
    return (random >> 16).float() * 2.0**-16


def _hash(x: Tensor) -> Tensor:
    x = x ^ x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x = x ^ x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _fp32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)


def _in_blocks(form: Format, gradient: Tensor) -> Tensor:
    """The gradient in fp32, [blocks, B], with zeros after the last element."""
    y = torch.zeros(form.blocks_of(gradient.numel()) * form.block)
    y[: gradient.numel()] = gradient
    return y.view(-1, form.block)


def _parts(form: Format, wire: Tensor) -> tuple[Tensor, Tensor]:
    """The wire's scales, fp32 [G, 4], and its bytes, [G, 4, B]; both are views."""
    groups = wire.view(-1, form.group_bytes)
    return groups[:, :16].view(torch.float32), groups[:, 16:].unflatten(1, (GROUP_BLOCKS, form.block))


def _values(form: Format, wire: Tensor) -> Tensor:
    """The wire's values, fp32, [blocks, B]."""
    scales, bytes_ = _parts(form, wire)
    numbers = bytes_.contiguous().view(form.dtype).float()
    return (numbers * scales[..., None]).view(-1, form.block)


def _write(scales: Tensor, bytes_: Tensor, own: slice, of_blocks: Tensor, numbers: Tensor) -> None:
    blocks = torch.arange(own.start, own.stop)
    at = (blocks // GROUP_BLOCKS, blocks % GROUP_BLOCKS)
    scales[at] = of_blocks
    bytes_[at] = numbers.view(torch.uint8)


def _quantised(form: Format, y: Tensor, key: int | None, first_element: int) -> tuple[Tensor, Tensor, Tensor]:
    """For y, fp32 [blocks, B]: scales [blocks], numbers in the format's dtype and values in fp32, both [blocks, B]."""
    largest = _fp32(form.largest)
    m = y.abs().amax(1)
    is_finite = m <= MOST_MAGNITUDE  # False for NaN
    usable = is_finite & (m >= LEAST_MAGNITUDE)
    m = torch.where(usable, m, 1.0)
    scales = torch.where(usable, m / largest, torch.where(is_finite, 0.0, torch.nan))
    x = torch.where(usable[:, None], y * (largest / m)[:, None], 0.0)
    fraction = None
    if key is not None:
        fraction = draw(key, first_element + torch.arange(y.numel())).view(y.shape)
    numbers = _rounded(form, x, fraction).to(form.dtype)
    return scales, numbers, numbers.float() * scales[:, None]


def _rounded(form: Format, x: Tensor, fraction: Tensor | None) -> Tensor:
    """``x`` rounded to numbers of the format, in fp32."""
    magnitude = x.abs()
    distance = torch.ones(())
    if form.number != "int8":
        mantissa, least = {"e4m3": (3, -6), "e5m2": (2, -14)}[form.number]
        exponent = torch.frexp(magnitude).exponent - 1
        distance = torch.exp2((exponent.clamp_min(least) - mantissa).float())
    if fraction is None:
        k = torch.round(magnitude / distance)
    else:
        k = torch.floor(magnitude.clamp_max(form.largest) / distance + fraction)
    return torch.copysign(k * distance, x)
