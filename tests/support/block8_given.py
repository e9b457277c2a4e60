"""What kernels of 8 bits and their reference both work on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BITS = {2: torch.int16, 4: torch.int32}
GUARD = 32


class Given:
    """Gradients, a wire and errors with memory around them that nobody may touch; equal bits each time it is made.

    Gradients lie ``shift`` elements after a multiple of 64 bytes, errors ``error_shift``; the first gradient has the
    block ``first``, and between two of them there is a block of none.
    """

    def __init__(
        self,
        form: Any,
        gradients: list[Tensor],
        shift: int = 0,
        error_shift: int = 0,
        first: int = 1,
        error: float = 1e-2,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.buffers: list[Tensor] = []
        self.gradients: list[tuple[Tensor, int]] = []
        block = first
        for gradient in gradients:
            inside = self._guarded(gradient, shift)
            self.gradients.append((inside, block))
            block += form.blocks_of(gradient.numel()) + 1
        groups = -(-block // 4)
        given = torch.randn(groups * 4 * form.block, generator=torch.Generator().manual_seed(1)) * error
        self.before = self._guarded(given, error_shift)
        self.error = self._guarded(torch.full_like(given, 5), error_shift)
        self.wire = self._guarded(torch.zeros(groups * form.group_bytes, dtype=torch.uint8), 0)
        assert self.wire.data_ptr() % 16 == 0

    def _guarded(self, values: Tensor, shift: int) -> Tensor:
        buffer, inside = guarded(values, shift, self.device)
        self.buffers.append(buffer)
        return inside

    def assert_equal(self, other: Given) -> None:
        """Every byte, also of what lies around; all NaN are alike."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            assert torch.equal(bits(mine.cpu()), bits(theirs.cpu())), mine.dtype


def guarded(values: Tensor, shift: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A buffer, and the values in it, which begin ``shift`` elements after a multiple of 64 bytes."""
    begin = GUARD + shift
    buffer = torch.full((values.numel() + begin + GUARD,), 7, dtype=values.dtype, device=device)
    assert buffer.data_ptr() % 64 == 0
    inside = buffer[begin : begin + values.numel()]
    return buffer, inside.copy_(values)


def around_is_untouched(buffer: Tensor, inside: Tensor) -> bool:
    return bool((buffer == 7).sum() >= buffer.numel() - inside.numel())


def bits(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:
        return tensor
    canonical = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return canonical.view(BITS[tensor.element_size()])


def random(count: int, seed: int = 0) -> Tensor:
    """Of magnitudes that differ from block to block, and within one."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 2, (count,), generator=generator).float()
    of_blocks = torch.linspace(-30, 30, -(-count // 128)).round().repeat_interleave(128)[:count]
    return torch.randn(count, generator=generator) * torch.exp2(exponents + of_blocks)
